#!/usr/bin/env bash
# Installs Shardyard in a virtual environment, with the versions of constraints.txt.
#
#   docker/install.sh VENV                 everything
#   docker/install.sh VENV dependencies    only the dependencies: an image layer that changes with the pins
#   docker/install.sh VENV project         only this repository's own code: the small layer on top, no network
#
# PYTHON         interpreter that creates the environment (default: python3)
# TORCH_VERSION  torch version, instead of that in constraints.txt
# EXTRAS         additional extras of pyproject.toml, such as mlflow,wandb
# TORCH_INDEX    URL of a package index with the torch build that the hardware needs (default: pip's own index)
set -euo pipefail

usage="usage: docker/install.sh VENV [all|dependencies|project]"
venv=${1:?$usage}
part=${2:-all}
case $part in
    all | dependencies | project) ;;
    *) echo "install.sh: part (=$part) is none of all, dependencies, project; $usage" >&2; exit 2 ;;
esac
mkdir -p "$venv"
venv=$(cd "$venv" && pwd)  # pip runs in the repository, wherever this was called from
cd "$(dirname "${BASH_SOURCE[0]}")/.."

constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
if [[ -n ${TORCH_VERSION:-}${TORCH_INDEX:-} ]]; then
    # Another build brings the libraries of its device, if any, at the versions that it names itself.
    sed -E '/^(cuda-.*|nvidia-.*|torch|triton)==/d' constraints.txt >"$constraints"
else
    cp constraints.txt "$constraints"
fi
torch=torch==${TORCH_VERSION:-$(sed -n 's/^torch==//p' constraints.txt)}

pip_install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$constraints" "$@"
}

if [[ $part != project ]]; then
    "${PYTHON:-python3}" -m venv "$venv"
    pip_install pip setuptools
    if [[ -n ${TORCH_INDEX:-} ]]; then
        # Only torch comes from that index; what it depends on comes from pip's own, as everything else.
        pip_install --no-deps --index-url "$TORCH_INDEX" "$torch"
    else
        pip_install "$torch"
    fi
    pip_install --no-build-isolation --only-deps ".[gcs,kubernetes,postgres,quantized,s3${EXTRAS:+,$EXTRAS}]"  # torch is there
fi
if [[ $part != dependencies ]]; then
    pip_install --no-build-isolation --no-deps .
fi
