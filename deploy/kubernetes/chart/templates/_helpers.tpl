{{- define "picker.selector" -}}
app.kubernetes.io/name: picker
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}
{{- define "picker.labels" -}}
{{ include "picker.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
{{- define "picker.meta" -}}
name: {{ .Release.Name | quote }}
namespace: {{ .Release.Namespace | quote }}
labels:
  {{- include "picker.labels" . | nindent 2 }}
{{- end }}
{{- /* The port of an address in the configuration: of its section and key, else a default port. */}}
{{- define "picker.port" -}}
{{- $section := get (include "picker.config" (index . 0) | fromYaml) (index . 1) | default dict }}
{{- get $section (index . 2) | default (printf ":%v" (index . 3)) | splitList ":" | last }}
{{- end }}
{{- /* With an InferencePool, the default ports are those of the flag --pool-name. */}}
{{- define "picker.grpcPort" -}}
{{ include "picker.port" (list . "extproc" "listen" 9002) }}
{{- end }}
{{- define "picker.healthPort" -}}
{{ include "picker.port" (list . "extproc" "health_listen" 9003) }}
{{- end }}
{{- define "picker.adminPort" -}}
{{ include "picker.port" (list . "admin" "listen" (ternary 9090 8081 (ne .Values.inferencePool.name ""))) }}
{{- end }}
{{- /* The pool's name in the fleet, NAMESPACE.NAME; shortened as `--pool-name` does (chart_flags.py). */}}
{{- define "picker.poolKey" -}}
{{- if gt (len .) 64 }}{{ trunc 55 . }}-{{ sha256sum . | trunc 8 }}{{ else }}{{ . }}{{ end }}
{{- end }}
{{- define "picker.config" -}}
{{- $values := .Values.inferencePool }}
{{- $namespace := .Release.Namespace }}
{{- $config := deepCopy (ternary $values.config .Values.config (ne $values.name "")) }}
{{- if and $values.name $values.further }}
{{- $pools := get $config "pools" | default dict }}
{{- $own := include "picker.poolKey" (printf "%s.%s" $namespace $values.name) }}
{{- if not (hasKey $pools $own) }}{{ $_ := set $pools $own nil }}{{ end }}
{{- range $values.further }}
{{- $discovery := dict "kubernetes" (dict "pool" (required "a pool of inferencePool.further needs a name" (get . "name")) "namespace" $namespace) }}
{{- $section := dict "discovery" $discovery "listen" (printf "0.0.0.0:%v" (required "a pool of inferencePool.further needs a port" (get . "port"))) }}
{{- $_ := set $pools (include "picker.poolKey" (printf "%s.%s" $namespace .name)) (merge $section (get . "config" | default dict)) }}
{{- end }}
{{- $_ := set $config "pools" $pools }}
{{- end }}
{{- toYaml $config }}
{{- end }}
{{- /* HTTPS if the admin port has TLS; otherwise empty, which means HTTP. */}}
{{- define "picker.adminScheme" -}}
{{- $admin := get (include "picker.config" . | fromYaml) "admin" | default dict }}
{{- if kindIs "map" (get $admin "tls") }}HTTPS{{ end }}
{{- end }}
{{- /* The further pools' ext_proc ports as a JSON list. */}}
{{- define "picker.furtherPorts" -}}
{{- $ports := list }}
{{- if .Values.inferencePool.name }}{{- range .Values.inferencePool.further }}{{ $ports = append $ports (int .port) }}{{ end }}{{ end }}
{{- toJson $ports }}
{{- end }}
