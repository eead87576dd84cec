{{/* Names are fixed: the driver name is one per cluster, so a second release could not work. */}}

{{- define "tranche.selector" -}}
app.kubernetes.io/name: tranche
app.kubernetes.io/component: node
{{- end }}

{{- define "tranche.mps.selector" -}}
app.kubernetes.io/name: tranche
app.kubernetes.io/component: mps
{{- end }}

{{- define "tranche.labels" -}}
{{ include "tranche.selector" . }}
{{ include "tranche.release" . }}
{{- end }}

{{- define "tranche.mps.labels" -}}
{{ include "tranche.mps.selector" . }}
{{ include "tranche.release" . }}
{{- end }}

{{- define "tranche.release" -}}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "tranche.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
