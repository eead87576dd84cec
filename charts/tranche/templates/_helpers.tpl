{{/* Names are fixed: the driver name is one per cluster, so a second release could not work. */}}

{{- define "tranche.selector" -}}
app.kubernetes.io/name: tranche
app.kubernetes.io/component: node
{{- end }}

{{- define "tranche.labels" -}}
{{ include "tranche.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "tranche.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
