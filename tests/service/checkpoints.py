"""Checkpoints of a few bytes, as a run leaves them, for tests of the control plane."""

import json
from pathlib import Path
from typing import Any

from moe.storage.folder import Folder
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.marker import Marker


def commit(
    storage: str | Path, step: int, *, attempt: int = 1, spec: dict[str, Any] | None = None, size_bytes: int = 100
) -> str:
    """Commit a checkpoint under a job's storage; return its name. `spec`: the run's spec."""
    folder = Folder(f"{storage}/{markers.FOLDER}")
    name = markers.name_of(step, attempt, 0)
    files = {"__0_0.distcp": bytes([step]) * size_bytes, "run.json": b"{}"}
    if spec is not None:
        files["spec.json"] = json.dumps(spec).encode()
    for path, content in files.items():
        folder.write(f"{name}/{path}", content)
    marker = Marker(
        step=step, attempt=attempt, group=0, num_workers=1, created_at="2026-01-31T12:00:00+00:00",
        files={path: markers.seal(content) for path, content in files.items()},
    )  # fmt: skip
    folder.write(name + markers.SUFFIX, marker.to_bytes())
    return name


def fault_of(storage: str | Path, name: str) -> str | None:
    """Fault of a committed checkpoint, or None."""
    folder = Folder(f"{storage}/{markers.FOLDER}")
    return markers.fault(folder, markers.read(folder, name))
