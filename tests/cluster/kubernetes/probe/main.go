// What the harness's own tests run in pods: a server that says who it is, and a client.
//
//	probe serve ADDRESS           answer each connection with the host name
//	probe get NETWORK ADDRESS     print the answer of a server; NETWORK is tcp4 or tcp6
//	probe lookup NETWORK NAME     print the addresses of a name; NETWORK is ip4 or ip6
package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"time"
)

const bound = 2 * time.Second

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 2 && args[0] == "serve":
		return serve(args[1])
	case len(args) == 3 && args[0] == "get":
		return get(args[1], args[2])
	case len(args) == 3 && args[0] == "lookup":
		return lookup(args[1], args[2])
	}
	return fmt.Errorf("usage: probe serve ADDRESS | get NETWORK ADDRESS | lookup NETWORK NAME")
}

func serve(address string) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	for {
		conn, err := listener.Accept()
		if err != nil {
			return err
		}
		fmt.Fprintln(conn, name)
		conn.Close()
	}
}

func get(network, address string) error {
	conn, err := net.DialTimeout(network, address, bound)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(bound)); err != nil {
		return err
	}
	_, err = io.Copy(os.Stdout, conn)
	return err
}

func lookup(network, name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	addresses, err := net.DefaultResolver.LookupIP(ctx, network, name)
	for _, address := range addresses {
		fmt.Println(address)
	}
	return err
}
