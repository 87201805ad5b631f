{{/* What kustomize does, as far as manifests/ use it: resources, a generated ConfigMap, patches. */}}

{{/* Add the objects and patches of a folder to `state`. In: root, folder, state. */}}
{{- define "idlegpu.collect" }}
{{- $path := printf "%s/kustomization.yaml" .folder }}
{{- $text := .root.Files.Get $path }}
{{- if not $text }}{{ fail (printf "components: there is no %s" (trimPrefix "manifests/" .folder)) }}{{ end }}
{{- $kustomization := fromYaml $text }}
{{- range $key := keys (omit $kustomization "apiVersion" "kind" "resources" "patches" "configMapGenerator") }}
{{- fail (printf "%s: the chart does not know %s" $path $key) }}
{{- end }}
{{- range $kustomization.resources }}
{{- $item := $.root.Files.Get (printf "%s/%s" $.folder .) | fromYaml }}
{{- $_ := set $.state "items" (append $.state.items $item) }}
{{- end }}
{{- range $generator := $kustomization.configMapGenerator }}
{{- $data := dict }}
{{- range $generator.files }}
{{- $file := splitn "=" 2 . }}
{{- $_ := set $data $file._0 ($.root.Files.Get (printf "%s/%s" $.folder (default $file._0 $file._1))) }}
{{- end }}
{{- /* As kustomize does, with a hash of our own: a program that reads the file once is restarted when the file changes. */}}
{{- $name := $generator.name }}
{{- if not $generator.options.disableNameSuffixHash }}
{{- if ne $name "idlegpu-scheduler-config" }}{{ fail (printf "the chart does not know what refers to %s" $name) }}{{ end }}
{{- include "idlegpu.schedulerConfig" (dict "root" $.root "data" $data) }}
{{- $name = printf "%s-%s" $name (toJson $data | sha256sum | trunc 10) }}
{{- $_ := set $.state "schedulerConfig" $name }}
{{- end }}
{{- $metadata := dict "name" $name "namespace" $generator.namespace "labels" $generator.options.labels }}
{{- $_ := set $.state "items" (append $.state.items (dict "apiVersion" "v1" "kind" "ConfigMap" "metadata" $metadata "data" $data)) }}
{{- end }}
{{- range $kustomization.patches }}
{{- $_ := set $.state "patches" (append $.state.patches .) }}
{{- end }}
{{- end }}

{{/* Apply a patch to an object that it is for. In: item, patch (its text). */}}
{{- define "idlegpu.patch" }}
{{- if hasPrefix "- op:" (trim .patch) }}
{{- range $operation := fromYamlArray .patch }}
{{- if not (has $operation.op (list "add" "replace")) }}{{ fail (printf "the chart does not know op %s" $operation.op) }}{{ end }}
{{- $keys := splitList "/" (trimPrefix "/" $operation.path) }}
{{- $appends := eq (last $keys) "-" }}
{{- if $appends }}{{ $keys = initial $keys }}{{ end }}
{{- $into := $.item }}
{{- range initial $keys }}
{{- if kindIs "slice" $into }}{{ $into = index $into (int .) }}{{ else }}{{ $into = index $into . }}{{ end }}
{{- end }}
{{- $value := $operation.value }}
{{- if $appends }}{{ $value = append (index $into (last $keys)) $value }}{{ end }}
{{- $_ := set $into (last $keys) $value }}
{{- end }}
{{- else }}
{{- include "idlegpu.merge" (dict "into" .item "from" (fromYaml .patch)) }}
{{- end }}
{{- end }}

{{/* Merge as Kubernetes does: maps by key, lists of what has a name by name; others are replaced. */}}
{{- define "idlegpu.merge" }}
{{- range $key, $value := .from }}
{{- $known := get $.into $key }}
{{- if and (kindIs "map" $value) (kindIs "map" $known) }}
{{- include "idlegpu.merge" (dict "into" $known "from" $value) }}
{{- else if and (kindIs "slice" $value) (kindIs "slice" $known) (hasKey (first $value) "name") }}
{{- $patched := list }}
{{- range $element := $value }}
{{- $found := dict }}
{{- range $known }}{{ if eq .name $element.name }}{{ $found = . }}{{ end }}{{ end }}
{{- if $found }}
{{- include "idlegpu.merge" (dict "into" $found "from" $element) }}
{{- $known = without $known $found }}
{{- $patched = append $patched $found }}
{{- else }}
{{- $patched = append $patched $element }}
{{- end }}
{{- end }}
{{- /* First, as kustomize has it. */}}
{{- $_ := set $.into $key (concat $patched $known) }}
{{- else }}
{{- $_ := set $.into $key $value }}
{{- end }}
{{- end }}
{{- end }}
