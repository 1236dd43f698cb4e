#!/usr/bin/env bash
# Runs the control plane, Ray's head and workers on this machine as the manifests say, without Docker and without a
# Kubernetes cluster: in crun's containers, from an image that docker/build_unprivileged.sh has built. As root; as another
# user with subordinate ids (/etc/subuid) it has no limits of CPUs and memory, was not tried to its end, and is refused
# where control groups of both versions are mounted.
#
#   apt-get install buildah crun iproute2          and kubectl, which renders the manifests
#   make setup
#   docker/run_unprivileged.sh IMAGE [--overlay local] [--workers N] [--port 8321] [--folder node]
#
# It ends with ^C or SIGTERM. k8s/node does the work, and says what of a cluster it does not have.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHONPATH=$root exec "${PYTHON:-$root/.venv/bin/python}" -m k8s.node "$@"
