#!/usr/bin/env bash
# Builds the image without a container engine's daemon and without a registry of images, from Debian's packages alone:
# mmdebstrap makes the base, buildah the image, in chroots. As root, or in a user namespace (buildah unshare).
#
#   apt-get install buildah mmdebstrap
#   docker/build_unprivileged.sh IMAGE [OPTION of 'buildah build' ...]
#   docker/build_unprivileged.sh shardyard:0.1.0
#
# Where packages come from a private index, its configuration and certificates are mounted for the build (see the
# Dockerfile), and folders that the configuration names with --volume:
#   docker/build_unprivileged.sh shardyard:0.1.0 --build-arg TORCH_INDEX= \
#       --secret id=pip.conf,src=$HOME/.config/pip/pip.conf --secret id=certificates,src=/etc/ssl/certs/ca-certificates.crt \
#       --volume /srv/wheels:/srv/wheels:ro
#
# MIRROR   Debian's mirror (this machine's sources)
#
# The image is in buildah's storage, in Docker's format, which keeps HEALTHCHECK. docker/run_unprivileged.sh runs it. To
# bring it to nodes:
#   buildah push IMAGE docker-archive:image.tar:IMAGE       then  kind load image-archive, k3s ctr images import, docker load
#   buildah push IMAGE docker://REGISTRY/IMAGE
#
# The base stays there too, and layers for the next build, which installs again only what has changed. For a base with
# newer packages: buildah rmi --force localhost/shardyard-base:bookworm
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

base=localhost/shardyard-base:bookworm
if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
    echo "== base: Debian bookworm with Python 3.11"
    folder=$(mktemp --directory)
    trap 'rm -rf "$folder"' EXIT
    mmdebstrap --variant=minbase --include=ca-certificates,python3,python3-venv \
        bookworm "$folder/base.tar" ${MIRROR:+"$MIRROR"}
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$folder/base.tar" / >/dev/null
    buildah commit --quiet --rm "$container" "$base" >/dev/null
fi

echo "== image: $image"
source_digest=$(find pyproject.toml docker/install.sh moe service -type f -not -path '*/__pycache__/*' -print0 |
    sort --zero-terminated | xargs --null sha256sum | sha256sum | cut --characters=-64)
buildah build --isolation chroot --format docker --layers \
    --file docker/Dockerfile --ignorefile docker/Dockerfile.dockerignore \
    --build-arg "BASE=$base" --build-arg "SOURCE_DIGEST=$source_digest" --tag "$image" "$@" .
