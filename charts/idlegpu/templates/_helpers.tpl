{{/* The reason for each field is in the file of the same object in manifests/ or scheduler-config/. */}}

{{/* Image of a program. In: list of the root context and the program's name under `images`. */}}
{{- define "idlegpu.image" -}}
{{- $root := index . 0 }}
{{- $program := index . 1 }}
{{- $images := $root.Values.images }}
{{- $image := index $images $program }}
{{- if hasPrefix "idlegpu-" $image.repository }}
{{- if not $images.registry }}
{{- fail "images.registry: set the registry to which you pushed the images, such as registry.example.com/team, or docker.io/library for images that you loaded into each node without one" }}
{{- end }}
{{- trimSuffix "/" $images.registry }}/
{{- end }}
{{- $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}
{{- else if eq $program "scheduler" }}:{{ $image.tag | default (include "idlegpu.kubeVersion" $root) }}
{{- else }}:{{ $image.tag | default $root.Chart.AppVersion }}
{{- end }}
{{- end }}

{{/* The API server's version without the suffix of a distribution (-gke.1036000, -eks-1a2b3c, +k3s1). */}}
{{- define "idlegpu.kubeVersion" -}}
{{- regexFind "^v[0-9]+\\.[0-9]+\\.[0-9]+(-(alpha|beta|rc)\\.[0-9]+)?" .Capabilities.KubeVersion.Version }}
{{- end }}

{{/* Secrets with which the kubelet pulls images. */}}
{{- define "idlegpu.imagePullSecrets" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Defaults and values, one of each name; a value replaces the default of its name. In: list of defaults
     and values. */}}
{{- define "idlegpu.byName" -}}
{{- $values := index . 1 | default list }}
{{- $names := list }}
{{- range $values }}{{ $names = append $names .name }}{{ end }}
{{- $all := list }}
{{- range index . 0 }}{{ if not (has .name $names) }}{{ $all = append $all . }}{{ end }}{{ end }}
{{- concat $all $values | toYaml }}
{{- end }}

{{/* "true" if agents run and report to the extender. */}}
{{- define "idlegpu.agentsReport" -}}
{{- if and .Values.agent.enabled (has "agent-reports" .Values.components) }}true{{ end }}
{{- end }}

{{/* Host on which all programs listen: the IPv6 one if the extender's `listen` or the fixed address is IPv6. */}}
{{- define "idlegpu.host" -}}
{{- $listen := dig "listen" "" .Values.extender.settings | toString }}
{{- or (hasPrefix "[" $listen) (contains ":" (toString (.Values.fixedAddress).clusterIP)) | ternary "[::]" "0.0.0.0" }}
{{- end }}
