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
