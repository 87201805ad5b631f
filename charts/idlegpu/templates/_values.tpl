{{/* What the chart's values change in an object of the manifests. In: root, item, schedulerConfig
     (name of the second scheduler's ConfigMap). */}}
{{- define "idlegpu.change" }}
{{- $values := .root.Values }}
{{- $item := .item }}
{{- /* `helm upgrade --reuse-values` keeps those of a release that had none. */}}
{{- $proxies := (default dict $values.apiProxy).addresses }}
{{- $name := $item.metadata.name }}
{{- if has $item.kind (list "Deployment" "DaemonSet" "Job") }}
{{- include "idlegpu.pod" (dict "root" .root "spec" $item.spec.template.spec) }}
{{- else if eq $item.kind "CronJob" }}
{{- include "idlegpu.pod" (dict "root" .root "spec" $item.spec.jobTemplate.spec.template.spec) }}
{{- end }}
{{- if eq $item.kind "Job" }}
{{- /* A Job cannot be changed: each revision has its own, and Helm deletes the one before. */}}
{{- $_ := set $item.metadata "name" (printf "%s-%d" $name .root.Release.Revision) }}
{{- else if eq $item.kind "Deployment" }}
{{- $own := ternary $values.scheduler $values.extender (eq $name "idlegpu-scheduler") }}
{{- $_ := set $item.spec "replicas" $own.replicas }}
{{- include "idlegpu.workload" (dict "spec" $item.spec.template.spec "values" $own) }}
{{- if eq $name "idlegpu-extender" }}
{{- include "idlegpu.grace" (dict "spec" $item.spec.template.spec "settings" $own.settings) }}
{{- end }}
{{- range $variable := (first $item.spec.template.spec.containers).env }}
{{- if and (eq $variable.name "IDLEGPU_API_PROXIES") $proxies }}
{{- $_ := set $variable "value" (join "," $proxies) }}
{{- end }}
{{- end }}
{{- range $volume := $item.spec.template.spec.volumes }}
{{- if eq (dig "configMap" "name" "" $volume) "idlegpu-scheduler-config" }}
{{- $_ := set $volume.configMap "name" $.schedulerConfig }}
{{- end }}
{{- end }}
{{- else if eq $item.kind "DaemonSet" }}
{{- include "idlegpu.workload" (dict "spec" $item.spec.template.spec "values" $values.agent) }}
{{- include "idlegpu.agent" (dict "spec" $item.spec.template.spec "values" $values.agent) }}
{{- if $item.spec.template.spec.runtimeClassName }}
{{- $_ := set $item.spec.template.spec "runtimeClassName" $values.runtimeClassName }}
{{- end }}
{{- if $values.agent.settings }}
{{- /* An agent reads its file at start: changed settings change the template, so the agent is restarted. */}}
{{- $sum := dict "idlegpu.io/settings" ($values.agent.settings | toJson | sha256sum) }}
{{- $metadata := $item.spec.template.metadata }}
{{- $_ := set $metadata "annotations" (merge $sum (default dict $metadata.annotations)) }}
{{- end }}
{{- else if and (eq $item.kind "ConfigMap") (hasKey $item.data "settings.yaml") }}
{{- $settings := ternary $values.extender.settings $values.agent.settings (eq $name "idlegpu-extender") }}
{{- if $settings }}
{{- $shipped := get $item.data "settings.yaml" | fromYaml }}
{{- $_ := set $item.data "settings.yaml" (mergeOverwrite $shipped $settings | toYaml) }}
{{- end }}
{{- else if eq $item.kind "NetworkPolicy" }}
{{- range $rule := $item.spec.ingress }}
{{- range $peer := $rule.from }}
{{- $labels := dig "namespaceSelector" "matchLabels" dict $peer }}
{{- if eq (get $labels "kubernetes.io/metadata.name") "monitoring" }}
{{- $_ := set $labels "kubernetes.io/metadata.name" $values.monitoringNamespace }}
{{- end }}
{{- end }}
{{- end }}
{{- if and (eq $name "idlegpu-extender-control-plane") $values.fixedAddress.controlPlane }}
{{- $peers := list }}
{{- range $values.fixedAddress.controlPlane }}{{ $peers = append $peers (dict "ipBlock" (dict "cidr" .)) }}{{ end }}
{{- $_ := set (first $item.spec.ingress) "from" $peers }}
{{- end }}
{{- if and (eq $name "idlegpu-extender-api-proxy") $proxies }}
{{- $peers := list }}
{{- range $proxies }}{{ $peers = append $peers (dict "ipBlock" (dict "cidr" .)) }}{{ end }}
{{- $_ := set (first $item.spec.ingress) "from" $peers }}
{{- end }}
{{- else if and (eq $item.kind "Service") (eq $name "idlegpu-extender") $item.spec.clusterIP $values.fixedAddress.clusterIP }}
{{- $_ := set $item.spec "clusterIP" $values.fixedAddress.clusterIP }}
{{- else if and (hasPrefix "monitoring.coreos.com/" $item.apiVersion) $values.monitorLabels }}
{{- $_ := set $item.metadata "labels" (merge (dict) $values.monitorLabels $item.metadata.labels) }}
{{- end }}
{{- end }}

{{/* What differs in the agent's container from node to node. In: spec, values (of the agent). */}}
{{- define "idlegpu.agent" }}
{{- $container := dict "name" "agent" }}
{{- range pick .values "env" "volumeMounts" "securityContext" | keys }}
{{- if get $.values . }}{{ $_ := set $container . (get $.values .) }}{{ end }}
{{- end }}
{{- $patch := dict "containers" (list $container) }}
{{- if .values.volumes }}{{ $_ := set $patch "volumes" .values.volumes }}{{ end }}
{{- include "idlegpu.merge" (dict "into" .spec "from" $patch) }}
{{- if .values.kubeletRoot }}
{{- range .spec.volumes }}
{{- if eq .name "pod-resources" }}{{ $_ := set .hostPath "path" (printf "%s/pod-resources" (trimSuffix "/" $.values.kubeletRoot)) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Image, and how it is pulled, of every container of a pod. In: root, spec. */}}
{{- define "idlegpu.pod" }}
{{- $images := .root.Values.images }}
{{- range $container := .spec.containers }}
{{- $program := splitList ":" $container.image | first | base | trimPrefix "idlegpu-" | trimPrefix "kube-" }}
{{- $image := index $images $program }}
{{- $tag := default $.root.Chart.AppVersion $image.tag }}
{{- if eq $program "scheduler" }}
{{- $tag = default (include "idlegpu.kubeVersion" $.root) $image.tag }}
{{- if not $image.digest }}{{ include "idlegpu.notNewer" (dict "root" $.root "tag" $tag) }}{{ end }}
{{- end }}
{{- $version := printf ":%s" $tag }}
{{- if $image.digest }}{{ $version = printf "@%s" $image.digest }}{{ end }}
{{- $registry := "" }}
{{- if hasPrefix "idlegpu-" $image.repository }}{{ $registry = default "" $images.registry }}{{ end }}
{{- if $registry }}{{ $registry = printf "%s/" (trimSuffix "/" $registry) }}{{ end }}
{{- $_ := set $container "image" (printf "%s%s%s" $registry $image.repository $version) }}
{{- if $images.pullPolicy }}{{ $_ := set $container "imagePullPolicy" $images.pullPolicy }}{{ end }}
{{- end }}
{{- if $images.pullSecrets }}
{{- $secrets := list }}
{{- range $images.pullSecrets }}{{ $secrets = append $secrets (dict "name" .) }}{{ end }}
{{- $_ := set .spec "imagePullSecrets" $secrets }}
{{- end }}
{{- end }}

{{/* The API server's version without what a distribution adds to it (-gke.1036000, -eks-1a2b3c, +k3s1). */}}
{{- define "idlegpu.kubeVersion" }}
{{- regexFind "^v[0-9]+\\.[0-9]+\\.[0-9]+(-(alpha|beta|rc)\\.[0-9]+)?" .Capabilities.KubeVersion.Version }}
{{- end }}

{{/* Refuse a kube-scheduler of a newer minor version than the API server. In: root, tag. */}}
{{- define "idlegpu.notNewer" }}
{{- $minor := regexReplaceAll "^v?[0-9]+\\.([0-9]+).*$" .tag "${1}" | int }}
{{- $server := include "idlegpu.kubeVersion" .root }}
{{- if gt $minor (regexReplaceAll "^v[0-9]+\\.([0-9]+).*$" $server "${1}" | int) }}
{{- fail (printf "images.scheduler.tag: %s is newer than the API server (%s): leave it empty for the API server's version" .tag $server) }}
{{- end }}
{{- end }}

{{/* What the values say of the extender in the second scheduler's configuration. In: root, data. */}}
{{- define "idlegpu.schedulerConfig" }}
{{- $settings := .root.Values.scheduler.extender }}
{{- if $settings }}
{{- $config := get .data "kube-scheduler.yaml" | fromYaml }}
{{- $_ := set $config "extenders" (list (mergeOverwrite (first $config.extenders) $settings)) }}
{{- $_ := set .data "kube-scheduler.yaml" (toYaml $config) }}
{{- end }}
{{- end }}

{{/* Time to end: what the settings need, and as much to spare as the manifest has beyond their defaults.
     In: spec, settings (of the extender). */}}
{{- define "idlegpu.grace" }}
{{- $drain := dig "drain_seconds" 5 .settings }}
{{- $shutdown := dig "shutdown_seconds" 95 .settings }}
{{- $grace := addf .spec.terminationGracePeriodSeconds (subf $drain 5) (subf $shutdown 95) }}
{{- $_ := set .spec "terminationGracePeriodSeconds" (ceil $grace | int64) }}
{{- end }}

{{/* Resources, nodes and tolerations of extender, agent or second scheduler. In: spec, values (of the one). */}}
{{- define "idlegpu.workload" }}
{{- if .values.resources }}{{ $_ := set (first .spec.containers) "resources" .values.resources }}{{ end }}
{{- $_ := set .spec "nodeSelector" (merge (dict) .values.nodeSelector .spec.nodeSelector) }}
{{- if .values.tolerations }}{{ $_ := set .spec "tolerations" .values.tolerations }}{{ end }}
{{- end }}
