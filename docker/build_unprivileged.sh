#!/usr/bin/env bash
# Builds the image without a container engine's daemon and without a registry of images, from Debian's packages alone:
# mmdebstrap makes the base, buildah the image, in chroots. As root, or in a user namespace (buildah unshare).
#
#   apt-get install buildah mmdebstrap
#   docker/build_unprivileged.sh IMAGE [OPTION of 'buildah build' ...]
#   docker/build_unprivileged.sh shardyard:0.1.0 --build-arg TORCH_INDEX=
#
# MIRROR   Debian's mirror (this machine's sources)
# FOLDER   where the base is kept for the next build (a folder in TMPDIR that is removed)
#
# The image is in buildah's storage, in Docker's format, which keeps HEALTHCHECK. To bring it to nodes:
#   buildah push IMAGE docker-archive:image.tar:IMAGE       then  kind load image-archive, k3s ctr images import, docker load
#   buildah push IMAGE docker://REGISTRY/IMAGE
set -euo pipefail

image=${1:?usage: docker/build_unprivileged.sh IMAGE [OPTION of 'buildah build' ...]}
shift
for program in buildah mmdebstrap; do
    command -v "$program" >/dev/null || {
        echo "build_unprivileged.sh: $program is not installed; apt-get install $program" >&2
        exit 2
    }
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=${FOLDER:-}
if [[ -z $folder ]]; then
    folder=$(mktemp --directory)
    trap 'rm -rf "$folder"' EXIT
fi
base=localhost/shardyard-base:bookworm
if [[ ! -f $folder/base.tar ]]; then
    echo "== base: Debian bookworm with Python 3.11"
    mmdebstrap --variant=minbase --include=ca-certificates,python3,python3-venv \
        bookworm "$folder/base.partial.tar" ${MIRROR:+"$MIRROR"}
    mv "$folder/base.partial.tar" "$folder/base.tar"
fi
container=$(buildah from scratch)
buildah add --quiet "$container" "$folder/base.tar" / >/dev/null
buildah commit --quiet --rm "$container" "$base" >/dev/null

echo "== image: $image"
buildah build --isolation chroot --format docker --file docker/Dockerfile --ignorefile docker/Dockerfile.dockerignore \
    --build-arg "BASE=$base" --tag "$image" "$@" .
