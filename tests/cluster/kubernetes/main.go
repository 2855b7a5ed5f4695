// A Kubernetes test cluster in one program: each component is a sub-command.
// One binary shares one copy of client-go and apimachinery on disk and in the
// page cache of the nodes, which read it from the machine that runs them.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// components names each sub-command and what runs it, with os.Args[0] its name.
var components = map[string]func() int{
	"etcd": func() int {
		etcdmain.Main(os.Args)
		return 0
	},
	"apiserver": run(apiserver.NewAPIServerCommand),
	"manager":   run(manager.NewControllerManagerCommand),
	"scheduler": run(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
	"kubelet":   run(func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) }),
	"proxy":     run(proxy.NewProxyCommand),
	"kubectl":   runKubectl,
}

func run(command func() *cobra.Command) func() int {
	return func() int { return cli.Run(command()) }
}

// runKubectl prints errors as kubectl does: cli.Run would repeat the usage text.
func runKubectl() int {
	if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
		kubectlutil.CheckErr(err)
	}
	return 0
}

func main() {
	// Also by its name: a link called kubectl is kubectl.
	name, args := filepath.Base(os.Args[0]), os.Args
	if components[name] == nil && len(os.Args) > 1 {
		name, args = os.Args[1], os.Args[1:]
	}
	component := components[name]
	if component == nil {
		fmt.Fprintf(os.Stderr, "usage: %s %s ...\n", os.Args[0], strings.Join(names(), "|"))
		os.Exit(2)
	}
	os.Args = args
	os.Exit(component())
}

func names() []string {
	names := make([]string, 0, len(components))
	for name := range components {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}
