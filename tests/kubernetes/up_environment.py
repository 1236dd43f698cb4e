"""Environment of `shardyard up` with a Ray cluster for each job, on the tests' API server."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from service.control.kubernetes import PERSISTENT_VOLUME_CLAIMS
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.launching import POOL


def up_environment(server: ApiServer, folder: Path, **settings: Any) -> dict[str, str]:
    """This process's environment with the settings. Creates the claim of jobs' storage, which pods mount at
    `folder`."""
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "storage"}}
    server.admin("POST", PERSISTENT_VOLUME_CLAIMS, body={**claim, "spec": {"accessModes": ["ReadWriteMany"]}})
    values: dict[str, Any] = {
        "launcher": "kuberay", "prepare_catalogs": "false",
        "kuberay_kubeconfig": server.kubeconfig(), "kuberay_namespace": server.namespace,
        "kuberay_image": "shardyard:test", "kuberay_pools": json.dumps([POOL]), "kuberay_python": sys.executable,
        "kuberay_storage_path": folder.resolve(), **settings,
    }  # fmt: skip
    return {**os.environ, **{f"SHARDYARD_{name.upper()}": str(value) for name, value in values.items()}}
