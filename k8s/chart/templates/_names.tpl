{{- define "shardyard.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "shardyard.labels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* Names by which the API may be called, as JSON. */ -}}
{{- define "shardyard.hosts" -}}
{{- $names := list "control-plane" }}
{{- range $domain := list "" ".svc" ".svc.cluster.local" }}
{{- $names = append $names (printf "control-plane.%s%s" $.Release.Namespace $domain) }}
{{- end }}
{{- if .Values.ingress.enabled }}{{ $names = append $names .Values.ingress.host }}{{ end }}
{{- if .Values.gateway.enabled }}{{ $names = append $names .Values.gateway.host }}{{ end }}
{{- concat $names .Values.controlPlane.hosts | uniq | toJson }}
{{- end }}
