"""A Ray head of one's own: beside others, out of the way of others, and gone without a trace."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import psutil

from service.launch.local_head import LocalHead

START = (
    "import sys; from service.launch.local_head import LocalHead; LocalHead.start(sys.argv[1], num_cpus=1)"
)


def test_a_second_head_lives_beside_the_first_and_ends_alone(head: LocalHead, tmp_path: Path) -> None:
    state_dir = tmp_path / ("a-long-name-" * 10)  # longer than a socket's path may be
    environment = {**os.environ, "SHARDYARD_TOKEN": "the API's, of no use to a driver"}
    subprocess.run([sys.executable, "-c", START, str(state_dir)], check=True, timeout=120, env=environment)
    second = LocalHead.find(state_dir)  # its starter is gone
    assert second is not None
    try:
        assert LocalHead.start(state_dir, num_cpus=1) == second
        assert second.address != head.address
        token = second.token_path.read_text()
        assert stat.S_IMODE(second.token_path.stat().st_mode) == 0o600
        assert stat.S_IMODE(second.folder.stat().st_mode) == 0o700
        version = f"{second.dashboard_url}/api/version"
        assert httpx.get(version, trust_env=False).status_code == 401
        assert httpx.get(version, trust_env=False, headers=_bearer(token)).status_code == 200
        foreign = _bearer(head.token_path.read_text())
        assert httpx.get(version, trust_env=False, headers=foreign).status_code in (401, 403)
        roots = [psutil.Process(process.pid) for node in second.nodes for process in node.processes]
        processes = [*roots, *(child for root in roots for child in root.children(recursive=True))]
        assert not [name for root in roots for name in root.environ() if name.startswith("SHARDYARD_")]
    finally:
        second.stop()
    assert not any(_lives(process) for process in processes)
    assert not second.folder.exists()
    assert LocalHead.find(state_dir) is None
    assert head.running()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}
