#!/bin/sh
# Builds the images for amd64 and arm64 and pushes them, with docker buildx or podman. With neither it writes
# them as OCI archives: images/archive.py.
#
#   images/push.sh REGISTRY     host and path before the images' names, such as registry.example.com/team
#
# TAG: the images' tag, unless set the version in pyproject.toml. PLATFORMS: unless set linux/amd64,linux/arm64.
# PIP_INDEX_URL: a mirror of PyPI.
set -eu
registry=${1:-}
registry=${registry%/}
if [ -z "$registry" ]; then
    echo "name your registry, such as registry.example.com/team: make images REGISTRY=..." >&2
    exit 2
fi
case $registry in
*://*)
    echo "$registry: leave out ${registry%%://*}://, as in registry.example.com/team" >&2
    exit 2
    ;;
esac
root=$(cd "$(dirname "$0")/.." && pwd)
mirror=${PIP_INDEX_URL:+--build-arg PIP_INDEX_URL} # two words, or none
tag=${TAG:-$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/pyproject.toml")}
platforms=${PLATFORMS:-linux/amd64,linux/arm64}

if docker buildx version >/dev/null 2>&1; then
    builder=docker
elif podman --version >/dev/null 2>&1; then
    builder=podman
else
    echo "neither docker buildx nor podman is here: writing OCI archives, which docs/install.md (Air-gapped) loads" >&2
    exec "${PYTHON:-python3}" "$root/images/archive.py" "$registry"
fi

explain() {
    [ $? = 0 ] || case $platforms in
    *,*) echo "to build for several platforms, docker needs a builder of its own (docker buildx create --use), and this machine an emulator (QEMU with binfmt_misc): PLATFORMS=linux/amd64 builds for one" >&2 ;;
    esac
}
trap explain EXIT

for program in extender agent; do
    image=$registry/idlegpu-$program:$tag
    file=$root/images/$program.Dockerfile
    if [ $builder = docker ]; then
        docker buildx build $mirror --platform "$platforms" --file "$file" --tag "$image" --push "$root"
    else
        podman manifest rm "$image" >/dev/null 2>&1 || true # a list from before would only grow
        podman build $mirror --platform "$platforms" --file "$file" --manifest "$image" "$root"
        podman manifest push --all "$image" "docker://$image"
    fi
    echo "pushed $image"
done
