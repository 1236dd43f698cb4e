"""Folders of this machine that back a pod's volumes. Claims outlive the node, all else is made anew."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from k8s.node.manifests import NodeError, Pod
from k8s.node.quantity import parse_quantity
from k8s.node.secret_store import SecretStore

Manifest = dict[str, Any]


class Volumes:
    def __init__(self, folder: Path, secrets: SecretStore) -> None:
        self._claims, self._pods, self._secrets = folder / "claims", folder / "pods", secrets
        shutil.rmtree(self._pods, ignore_errors=True)

    def make(self, pod: Pod) -> dict[str, Path]:
        """Folder of each volume of a pod."""
        gid = pod.spec["securityContext"]["fsGroup"]
        return {volume["name"]: self._make(pod, volume, gid) for volume in pod.spec["volumes"]}

    def _make(self, pod: Pod, volume: Manifest, gid: int) -> Path:
        folder = self._pods / pod.name / volume["name"]
        match {key: value for key, value in volume.items() if key != "name"}:
            case {"persistentVolumeClaim": claim}:
                folder = self._claims / claim["claimName"]
                folder.mkdir(parents=True, exist_ok=True)
                mode = 0o2775
            case {"emptyDir": empty_dir}:
                folder.mkdir(parents=True)
                if empty_dir.get("medium") == "Memory":
                    options = f"size={int(parse_quantity(empty_dir['sizeLimit']))}"
                    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
                mode = 0o2777
            case {"secret": secret}:
                folder.mkdir(parents=True)
                self._secrets.copy(secret["secretName"], folder, secret["defaultMode"], gid)
                mode = 0o2755
            case source:
                raise NodeError(f"volume {volume['name']} of pod {pod.name} (={', '.join(source)}) must be a "
                                "persistentVolumeClaim, an emptyDir or a Secret; this node has no others")  # fmt: skip
        os.chown(folder, 0, gid)  # as the kubelet does for fsGroup
        folder.chmod(mode)
        return folder
