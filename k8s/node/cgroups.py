"""Control groups, in which pods have their limits. Only the real root may make them."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path

from k8s.node.manifests import NodeError

ROOT = Path("/sys/fs/cgroup")
WHOLE_RANGE = ["0", "0", "4294967295"]
NODE_WEIGHT = 16
"""Share of the CPUs that all pods have together, in busy processes outside of them; 1 if nothing were said."""


def check_rootless(root: Path = ROOT) -> None:
    """Raise NodeError where crun refuses containers of a user without root's rights."""
    if (root / "unified" / "cgroup.procs").exists():
        raise NodeError(
            f"{root} has control groups of both versions, which crun refuses and only root can unmount; run this as "
            "root, or boot the machine with systemd.unified_cgroup_hierarchy=1"
        )


def prepare(name: str) -> bool:
    """Make a group for all pods, if this process may. Changes its namespace's mounts where crun would refuse them."""
    in_user_namespace = Path("/proc/self/uid_map").read_text().split() != WHOLE_RANGE
    if in_user_namespace or not os.access(ROOT, os.W_OK):
        return False
    if (ROOT / "unified").is_mount():  # beside version 1: crun knows one version at a time
        subprocess.run(["umount", ROOT / "unified"], check=True)
    for hierarchy, file, one in ((ROOT, "cpu.weight", 100), (ROOT / "cpu", "cpu.shares", 1024)):
        if (hierarchy / "cgroup.procs").exists():
            (hierarchy / name).mkdir(exist_ok=True)
            with suppress(FileNotFoundError):  # version 2, with a root that does not share out CPUs
                (hierarchy / name / file).open("r+").write(str(NODE_WEIGHT * one))
    return True


def remove(name: str) -> None:
    """Remove a group and those below it, which have no processes."""
    for hierarchy in [ROOT, *ROOT.iterdir()]:  # the one of version 2, or those of version 1
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            with suppress(OSError):
                os.rmdir(folder)
