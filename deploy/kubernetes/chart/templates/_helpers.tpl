{{- define "picker.selector" -}}
app.kubernetes.io/name: picker
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "picker.labels" -}}
{{ include "picker.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
{{- define "picker.meta" -}}
name: {{ .Release.Name }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "picker.labels" . | nindent 2 }}
{{- end }}
{{- define "picker.port" -}}
{{ splitList ":" . | last }}
{{- end }}
{{- /* With a pool the ports are those of the flags that charts of gateways pass. */}}
{{- define "picker.grpcPort" -}}
{{ if .Values.inferencePool.name }}9002{{ else }}{{ include "picker.port" .Values.config.extproc.listen }}{{ end }}
{{- end }}
{{- define "picker.adminPort" -}}
{{ if .Values.inferencePool.name }}9090{{ else }}{{ include "picker.port" .Values.config.admin.listen }}{{ end }}
{{- end }}
{{- define "picker.config" -}}
{{ toYaml (ternary .Values.inferencePool.config .Values.config (ne .Values.inferencePool.name "")) }}
{{- end }}
