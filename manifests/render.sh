#!/bin/sh
# Prints the manifests of a variant with the images of your registry; `kubectl apply -f -` takes them.
#
#   manifests/render.sh REGISTRY [VARIANT]     VARIANT: a folder of manifests/overlays; unless set, the default
#
# TAG: the images' tag, unless set the one in the manifests.
set -eu
registry=${1:-}
variant=${2:-}
folder=$(cd "$(dirname "$0")" && pwd)
if [ -z "$registry" ]; then
    echo "name your registry, such as registry.example.com/team: manifests/render.sh REGISTRY [VARIANT]" >&2
    exit 2
fi
if [ -n "$variant" ] && [ ! -f "$folder/overlays/$variant/kustomization.yaml" ]; then
    echo "$variant is no variant: must be one of $(ls "$folder/overlays" | tr '\n' ' ')" >&2
    exit 2
fi
# Not a pipe from kubectl: its failure must end the script.
rendered=$(kubectl kustomize "$folder${variant:+/overlays/$variant}")
printf '%s\n' "$rendered" |
    sed -E "s#^( *image: )(idlegpu-(extender|agent):)([^ ]+)\$#\1$registry/\2${TAG:-\4}#"
