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
