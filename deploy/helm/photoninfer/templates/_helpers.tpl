{{- define "photoninfer.name" -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "photoninfer.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "photoninfer.labels" -}}
{{ include "photoninfer.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "photoninfer.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}

{{- define "photoninfer.serviceAccount" -}}
{{- default (ternary (include "photoninfer.name" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "photoninfer.keysSecret" -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- .Values.apiKeys.existingSecret -}}
{{- else if .Values.apiKeys.keys -}}
{{- printf "%s-keys" (include "photoninfer.name" .) -}}
{{- end -}}
{{- end -}}

{{- define "photoninfer.model" -}}
{{- ternary "/cache/model.gguf" .Values.model.name (ne .Values.model.url "") -}}
{{- end -}}

{{/* What every container of ours may do: nothing but compute. */}}
{{- define "photoninfer.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 10001
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "photoninfer.env" -}}
- {name: PHOTON_HOST, value: "0.0.0.0"}
- {name: PHOTON_PORT, value: "5728"}
- {name: PHOTON_CACHE_DIR, value: /cache}
- {name: CUPY_CACHE_DIR, value: /cache/cupy}
- {name: PHOTON_LOG_FORMAT, value: json}
- {name: PHOTON_DRAIN_SECONDS, value: {{ .Values.drainSeconds | quote }}}
- {name: PHOTON_HEARTBEAT_LIMIT_SECONDS, value: {{ .Values.probes.heartbeatLimitSeconds | quote }}}
{{- with include "photoninfer.model" . }}
- {name: PHOTON_MODEL, value: {{ . | quote }}}
{{- end }}
{{- with .Values.model.servedName }}
- {name: PHOTON_SERVED_MODEL_NAME, value: {{ . | quote }}}
{{- end }}
{{- if include "photoninfer.keysSecret" . }}
- {name: PHOTON_API_KEYS_FILE, value: /keys/keys}
{{- end }}
{{- with .Values.model.tokenSecret }}
{{- if .name }}
- name: PHOTON_HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
{{- end }}
{{- end }}
{{- with .Values.tracing }}
{{- if .endpoint }}
- {name: PHOTON_TRACE_ENDPOINT, value: {{ .endpoint | quote }}}
- {name: PHOTON_TRACE_SAMPLE_RATIO, value: {{ .sampleRatio | quote }}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name={{ $.Release.Namespace }},k8s.pod.name=$(POD_NAME)
{{- end }}
{{- end }}
{{- range $name, $value := .Values.settings }}
- {name: PHOTON_{{ upper $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- end -}}

{{/* The port that traces go to; nothing where there are none. */}}
{{- define "photoninfer.tracingPort" -}}
{{- with .Values.tracing.endpoint -}}
{{- $url := urlParse . -}}
{{- regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (ternary "443" "80" (eq $url.scheme "https")) -}}
{{- end -}}
{{- end -}}

{{- define "photoninfer.volumeMounts" -}}
- {name: cache, mountPath: /cache}
- {name: tmp, mountPath: /tmp}
{{- if .Values.model.volume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}
