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
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What else stands in an object's metadata. */}}

{{- define "tranche.annotations" -}}
{{- with .Values.commonAnnotations -}}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "tranche.image" -}}
{{- with .Values.image.digest -}}
{{ $.Values.image.repository }}@{{ . }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{- define "tranche.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ kindIs "map" . | ternary . (dict "name" .) | dig "name" "" }}
  {{- end }}
{{- end }}
{{- end }}

{{/* What the controller's Deployment needs to serve the webhook. */}}

{{- define "tranche.controller.selector" -}}
app.kubernetes.io/name: tranche
app.kubernetes.io/component: controller
{{- end }}

{{- define "tranche.controller.labels" -}}
{{ include "tranche.controller.selector" . }}
{{ include "tranche.release" . }}
{{- end }}

{{- define "tranche.webhook.env" -}}
- name: TRANCHE_WEBHOOK_ADDRESS
  {{- if .Values.webhook.enabled }}
  value: {{ printf "%s:%v" .Values.node.ops.host .Values.webhook.port | quote }}
  {{- if eq .Values.webhook.certificates "cert-manager" }}
- name: TRANCHE_WEBHOOK_CERTIFICATES
  value: /certificates
  {{- end }}
  {{- with .Values.webhook.clientCA }}
  {{- if .configMap }}
- name: TRANCHE_WEBHOOK_CLIENT_CA
  value: /client-ca/{{ .key }}
- name: TRANCHE_WEBHOOK_CLIENT_NAMES
  value: {{ join "," .names | quote }}
  {{- end }}
  {{- end }}
  {{- else }}
  value: "off"
  {{- end }}
{{- end }}

{{- define "tranche.webhook.ports" -}}
{{- if .Values.webhook.enabled }}
- name: webhook
  containerPort: {{ .Values.webhook.port }}
{{- end }}
{{- end }}

{{- define "tranche.webhook.volumeMounts" -}}
{{- if and .Values.webhook.enabled (eq .Values.webhook.certificates "cert-manager") }}
- name: webhook-certificate
  mountPath: /certificates
  readOnly: true
{{- end }}
{{- if and .Values.webhook.enabled .Values.webhook.clientCA.configMap }}
- name: webhook-client-ca
  mountPath: /client-ca
  readOnly: true
{{- end }}
{{- end }}

{{- define "tranche.webhook.volumes" -}}
{{- if and .Values.webhook.enabled (eq .Values.webhook.certificates "cert-manager") }}
# Optional: the pod starts before cert-manager has made it, and waits for it.
- name: webhook-certificate
  secret:
    secretName: tranche-webhook-cert
    optional: true
{{- end }}
{{- if and .Values.webhook.enabled .Values.webhook.clientCA.configMap }}
- name: webhook-client-ca
  configMap:
    name: {{ .Values.webhook.clientCA.configMap }}
{{- end }}
{{- end }}

{{- /* CEL: compares the name of a DeviceClass before it with those that the controller places. */ -}}
{{- define "tranche.isShared" -}}
{{- $names := concat (list "shared.gpu.nvidia.com") .Values.deviceClasses.placedByController (values .Values.webhook.kaiClasses | sortAlpha) | uniq -}}
{{- if eq (len $names) 1 -}}
== '{{ index $names 0 }}'
{{- else -}}
in ['{{ join "', '" $names }}']
{{- end -}}
{{- end -}}
