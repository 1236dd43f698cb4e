"""Pod Security's seccomp profile `RuntimeDefault`: that of the containers packages, for a process without
capabilities."""

import json
import platform
from pathlib import Path
from typing import Any

PROFILE = Path("/usr/share/containers/seccomp.json")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def runtime_default() -> dict[str, Any]:
    """The profile in the runtime specification's form, which has no conditions."""
    profile = json.loads(PROFILE.read_text())
    architecture = ARCHITECTURES[platform.machine()]
    (machine,) = [
        entry for entry in profile["archMap"] if entry["architecture"] == f"SCMP_ARCH_{platform.machine().upper()}"
    ]
    return {
        "defaultAction": profile["defaultAction"],
        "defaultErrnoRet": profile["defaultErrnoRet"],
        "architectures": [machine["architecture"], *machine["subArchitectures"]],
        "syscalls": [
            {key: rule[key] for key in ("names", "action", "args", "errnoRet") if rule.get(key) is not None}
            for rule in profile["syscalls"] if _applies(rule, architecture)
        ],
    }  # fmt: skip


def _applies(rule: dict[str, Any], architecture: str) -> bool:
    includes = rule.get("includes") or {}
    return not includes.get("caps") and architecture in includes.get("arches", [architecture])
