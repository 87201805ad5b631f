#!/bin/sh
# Prints manifests with your registry and addresses; `kubectl apply -f -` takes them.
#
#   manifests/render.sh REGISTRY [VARIANT [COMPONENT...]]
#
# VARIANT: "default" (unless set), a folder of manifests/overlays, "second-scheduler" (the objects of
# scheduler-config/second-scheduler), or the path of your own overlay. COMPONENT: folders of
# manifests/components to add.
#
# Variables of the environment:
#   FIXED_ADDRESS        for fixed-address (part of kubeadm): a free address of the cluster's service range;
#                        with an IPv6 one every port listens on IPv6
#   API_SERVER_NETWORK   for api-proxy: the network of the API server's addresses, such as 10.0.0.0/28
#   KUBELET_ROOT         for kubelet-root: the kubelet's root directory, such as /var/lib/k0s/kubelet
#   TAG                  tag of extender and agent; unless set, the one in the manifests
#   KUBE_VERSION         version of the second scheduler; unless set, the API server's
#   KUBE_REGISTRY        registry of its image; unless set, registry.k8s.io
set -eu
placeholders="FIXED_ADDRESS API_SERVER_NETWORK KUBELET_ROOT"

fail() {
    echo "manifests/render.sh: $1" >&2
    exit "${2:-1}"
}

folder=$(cd "$(dirname "$0")" && pwd -P)
[ -n "${1:-}" ] || fail "name your registry, such as registry.example.com/team: manifests/render.sh REGISTRY [VARIANT]" 2
registry=${1%/}
case $registry in *://*) fail "$registry: leave out ${registry%%://*}://, as in registry.example.com/team" 2 ;; esac
shift
variant=${1:-default}
[ $# -eq 0 ] || shift

case $variant in
default) base=$folder ;;
second-scheduler) base=$(dirname "$folder")/scheduler-config/second-scheduler ;;
*)
    base=$folder/overlays/$variant
    [ -d "$base" ] || base=$variant
    [ -f "$base/kustomization.yaml" ] ||
        fail "$variant is no variant: must be a folder with a kustomization.yaml, default, second-scheduler, or one of $(ls "$folder/overlays" | tr '\n' ' ')" 2
    base=$(cd "$base" && pwd -P)
    ;;
esac

if [ $# -gt 0 ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    work=$(cd "$work" && pwd -P)
    root=$(printf '%s\n' "${work#/}" | sed 's#[^/]\{1,\}#..#g') # kustomize takes relative paths only
    {
        printf 'apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n'
        printf 'resources:\n  - %s%s\ncomponents:\n' "$root" "$base"
        for component in "$@"; do
            [ -d "$folder/components/$component" ] ||
                fail "$component is no component: must be one of $(ls "$folder/components" | tr '\n' ' ')" 2
            printf '  - %s%s/components/%s\n' "$root" "$folder" "$component"
        done
    } >"$work/kustomization.yaml"
    base=$work
fi

# Not a pipe from kubectl: its failure must end the script.
rendered=$(kubectl kustomize "$base")
change="s#^( *image: )(idlegpu-(extender|agent):)([^ ]+)\$#\1$registry/\2${TAG:-\4}#;s#^( *image: )(idlegpu-(extender|agent)@)#\1$registry/\2#"
case ${FIXED_ADDRESS:-} in
*:*) change="$change;s#^( *(- )?(listen|status_listen|value): )0\.0\.0\.0(:[0-9]+)\$#\1\"[::]\4\"#" ;;
esac
for name in $placeholders; do
    case $rendered in *"$name"*) ;; *) continue ;; esac
    eval "value=\${$name:-}"
    [ -n "$value" ] ||
        fail "set $name: it is a placeholder in $(cd "$folder" && grep -rl --include='*.yaml' "$name" components | sed 's#^#manifests/#' | tr '\n' ' ')"
    change="$change;s#(\.\./)?$name#$value#g"
done
case $rendered in *"image: registry.k8s.io/kube-scheduler:"*)
    version=${KUBE_VERSION:-$(kubectl get --raw /version | sed -n 's/.*"gitVersion": *"\(v[0-9.]*[0-9]\).*/\1/p')}
    case $version in [0-9]*) version=v$version ;; esac
    [ -n "$version" ] || fail "set KUBE_VERSION to the API server's version, such as v1.37.2: the API server does not answer"
    change="$change;s#(image: )registry.k8s.io(/kube-scheduler:).*#\1${KUBE_REGISTRY:-registry.k8s.io}\2$version#"
    ;;
esac
printf '%s\n' "$rendered" | sed -E "$change"
