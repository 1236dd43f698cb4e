"""Containers in crun."""

import json
import subprocess
from pathlib import Path
from typing import IO, Any


class Crun:
    def __init__(self, folder: Path, cgroups: bool) -> None:
        manager = "cgroupfs" if cgroups else "disabled"
        self._command = ["crun", f"--root={folder / 'state'}", f"--cgroup-manager={manager}"]
        self._bundles = folder / "bundles"

    def start(self, name: str, configuration: dict[str, Any], log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a container; the process ends with it, with its exit code."""
        bundle = self._bundles / name
        bundle.mkdir(parents=True, exist_ok=True)
        (bundle / "config.json").write_text(json.dumps(configuration, indent=1))
        (bundle / "config.json").chmod(0o600)  # its variables are secret
        subprocess.run([*self._command, "delete", "--force", name], stderr=subprocess.DEVNULL)
        return subprocess.Popen(
            [*self._command, "run", f"--bundle={bundle}", name],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip

    def succeeds(self, name: str, command: list[str], timeout_s: float) -> bool:
        """Whether a command ends with 0 in a running container within this time."""
        try:
            run = subprocess.run([*self._command, "exec", name, *command], capture_output=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return run.returncode == 0

    def signal(self, name: str, signal: str) -> None:
        """Send a signal to a container's first process, if it runs."""
        subprocess.run([*self._command, "kill", name, signal], stderr=subprocess.DEVNULL)
