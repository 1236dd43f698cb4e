"""Secrets of the installation, drawn at the first start, with the names and keys of docs/kubernetes.md."""

import os
import secrets
from pathlib import Path

from k8s.node.manifests import NodeError

KEYS = {"api-token": "token", "ray-token": "auth_token"}


class SecretStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name, key in KEYS.items():
            (folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            if not (path := folder / name / key).exists():
                path.touch(mode=0o600)
                path.write_text(secrets.token_hex(32))

    def path(self, name: str) -> Path:
        """Folder with a file for each key."""
        if name not in KEYS:
            raise NodeError(f"the overlay needs the Secret {name}; this node has only {', '.join(KEYS)}")
        return self._folder / name

    def value(self, name: str, key: str) -> str:
        path = self.path(name) / key
        if not path.is_file():
            raise NodeError(f"the overlay needs the key {key} of the Secret {name}, which has only {KEYS[name]}")
        return path.read_text()

    def copy(self, name: str, folder: Path, mode: int, gid: int) -> None:
        """Write a Secret's files for a pod."""
        for path in self.path(name).iterdir():
            target = folder / path.name
            target.touch(mode=0o600)
            target.write_text(path.read_text())
            os.chown(target, 0, gid)
            target.chmod(mode)
