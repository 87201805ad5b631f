#!/bin/sh
# Builds the images for amd64 and arm64 and pushes them, with docker buildx or podman.
#
#   images/push.sh REGISTRY     host and path before the images' names, such as registry.example.com/team
#
# TAG: the images' tag, unless set the version in pyproject.toml. PLATFORMS: unless set linux/amd64,linux/arm64.
set -eu
registry=${1:-}
if [ -z "$registry" ]; then
    echo "name your registry, such as registry.example.com/team: make images REGISTRY=..." >&2
    exit 2
fi
root=$(cd "$(dirname "$0")/.." && pwd)
tag=${TAG:-$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/pyproject.toml")}
platforms=${PLATFORMS:-linux/amd64,linux/arm64}

for program in extender agent; do
    image=$registry/idlegpu-$program:$tag
    file=$root/images/$program.Dockerfile
    if docker buildx version >/dev/null 2>&1; then
        docker buildx build --platform "$platforms" --file "$file" --tag "$image" --push "$root"
    elif podman --version >/dev/null 2>&1; then
        podman manifest rm "$image" >/dev/null 2>&1 || true # a list from before would only grow
        podman build --platform "$platforms" --file "$file" --manifest "$image" "$root"
        podman manifest push --all "$image" "docker://$image"
    else
        echo "neither docker buildx nor podman is here: install one, or build where one is" >&2
        exit 1
    fi
    echo "pushed $image"
done
