{{- define "windtunnel.labels" -}}
app.kubernetes.io/name: windtunnel
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "windtunnel.selector" -}}
app.kubernetes.io/name: windtunnel
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Cluster-wide names carry the namespace: the release's name alone is not unique. */}}
{{- define "windtunnel.clusterName" -}}
windtunnel-{{ .Release.Namespace }}
{{- end }}

{{- define "windtunnel.image" -}}
{{ .root.Values.image.repository }}/{{ .component }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* The user name of a service account, as the API server shows it to policies. */}}
{{- define "windtunnel.user" -}}
system:serviceaccount:{{ .root.Release.Namespace }}:windtunnel-{{ .component }}
{{- end }}

{{/* The whole seconds of a duration as Go writes it. */}}
{{- define "windtunnel.seconds" -}}
{{- $total := 0 }}
{{- range regexFindAll "[0-9]+(ms|s|m|h)" . -1 }}
{{- $number := regexFind "[1-9][0-9]*" . | default "0" | int64 }}
{{- $unit := regexFind "[a-z]+$" . }}
{{- $milliseconds := get (dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000) $unit | int64 }}
{{- $total = add $total (mul $number $milliseconds) }}
{{- end }}
{{- div $total 1000 }}
{{- end }}

{{/*
Readiness is told soon. A restart takes an agent's faults along, and helps only who hangs for good: on
a node that is starved an answer may take seconds, and it takes a minute without any to be ended.
*/}}
{{- define "windtunnel.probes" -}}
livenessProbe:
  httpGet: {path: /livez, port: admin}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: admin}
  periodSeconds: 2
  timeoutSeconds: 2
{{- end }}

{{/*
Refuses a second release: agents share each node's journal, and operators share the experiments.
*/}}
{{- define "windtunnel.alone" -}}
{{- range (lookup "rbac.authorization.k8s.io/v1" "ClusterRole" "" "").items }}
{{- $labels := .metadata.labels | default dict }}
{{- if and (eq (get $labels "app.kubernetes.io/name") "windtunnel") (hasSuffix "-operator" .metadata.name) (ne .metadata.name (printf "%s-operator" (include "windtunnel.clusterName" $))) }}
{{- $other := get (.metadata.annotations | default dict) "meta.helm.sh/release-namespace" | default (trimSuffix "-operator" .metadata.name | trimPrefix "windtunnel-") }}
{{- fail (printf "windtunnel is installed in namespace %s already, and a cluster has room for one: uninstall that one first" $other) }}
{{- end }}
{{- end }}
{{- end }}
