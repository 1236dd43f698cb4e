"""Separate Ray heads: next to others, without interfering, and gone without a trace."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import psutil
import pytest

from service.head.local_head import LocalHead
from tests.listening import listening_addresses
from tests.nameless import HOMES, NAMELESS, can_be_nameless
from tests.processes import CTRL_C_IN_THE_MIDST, DEADLINE_S, await_that, heed_ctrl_c, with_environment

START = "import sys; from service.head.local_head import LocalHead; LocalHead.start(sys.argv[1], num_cpus=1)"


@pytest.mark.slow
def test_a_second_head_lives_beside_the_first_and_ends_alone(head: LocalHead, tmp_path: Path) -> None:
    state_dir = tmp_path / ("a-long-name-" * 10)  # longer than the limit for socket paths
    environment = {**os.environ, "SHARDYARD_TOKEN": "the API's, of no use to a driver"}
    subprocess.run([sys.executable, "-c", START, str(state_dir)], check=True, timeout=DEADLINE_S, env=environment)
    second = LocalHead.find(state_dir)  # the process that started it is gone
    try:
        assert LocalHead.start(state_dir, num_cpus=1) == second
        assert second.address != head.address
        token = second.token_path.read_text()
        assert stat.S_IMODE(second.token_path.stat().st_mode) == 0o600
        assert stat.S_IMODE(second.folder.stat().st_mode) == 0o700
        version = f"{second.dashboard_url}/api/version"
        assert httpx.get(version, timeout=DEADLINE_S, trust_env=False).status_code == 401
        assert httpx.get(version, timeout=DEADLINE_S, trust_env=False, headers=_bearer(token)).status_code == 200
        foreign = _bearer(head.token_path.read_text())
        assert httpx.get(version, timeout=DEADLINE_S, trust_env=False, headers=foreign).status_code in (401, 403)
        roots = [psutil.Process(process.pid) for node in second.nodes for process in node.processes]
        processes = [*roots, *(child for root in roots for child in root.children(recursive=True))]
        assert not [name for root in roots for name in root.environ() if name.startswith("SHARDYARD_")]
        listening = listening_addresses(processes)
        assert listening  # its GCS, raylet, dashboard and agents
        assert [address for address in listening if not address.is_loopback] == []
    finally:
        second.stop()
    assert not any(_lives(process) for process in processes)
    assert not second.folder.exists()
    assert LocalHead.find(state_dir) is None
    assert head.running()


@pytest.mark.slow
def test_stopping_it_ends_the_nodes_that_were_added_to_it(tmp_path: Path) -> None:
    head = LocalHead.start(tmp_path, num_cpus=1)
    try:
        node = head.add_node(num_cpus=1).nodes[-1]
        assert node.running()
        assert LocalHead.find(tmp_path) != head
    finally:
        head.stop()  # this object knows one node only
    assert not node.running()
    assert with_environment("RAY_AUTH_TOKEN_PATH", str(head.token_path)) == []
    assert LocalHead.find(tmp_path) is None


@pytest.mark.slow
def test_a_head_whose_agent_is_late_comes_up_all_the_same(tmp_path: Path) -> None:
    """As on a busy machine: the first agent that appears is suspended."""
    command = [sys.executable, "-c", START, str(tmp_path)]
    with subprocess.Popen(command) as starter:
        await_that(lambda: any(map(_is_agent, psutil.Process(starter.pid).children(recursive=True))))
        agent = next(filter(_is_agent, psutil.Process(starter.pid).children(recursive=True)))
        agent.suspend()
        assert starter.wait(DEADLINE_S) == 0
    head = LocalHead.find(tmp_path)
    assert not _lives(agent)
    assert "Timed out" not in "".join(head.last_words("raylet"))
    head.stop()
    assert with_environment("RAY_AUTH_TOKEN_PATH", str(head.token_path)) == []


def test_a_signal_while_the_process_is_being_started_leaves_nothing(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # its own folder, with a short name
        process = subprocess.run(
            [sys.executable, "-c", CTRL_C_IN_THE_MIDST + START, str(tmp_path)],
            timeout=DEADLINE_S, capture_output=True, text=True, preexec_fn=heed_ctrl_c,
            env={**os.environ, "TMPDIR": temporary},
        )  # fmt: skip
        assert list(Path(temporary).glob("shardyard-*")) == []
    assert process.stderr.endswith("KeyboardInterrupt\n"), process.stderr
    assert with_environment("RAY_AUTH_TOKEN_PATH", str(tmp_path / "ray" / "token")) == []
    assert LocalHead.find(tmp_path) is None


def _is_agent(process: psutil.Process) -> bool:
    try:
        return any(word.endswith("/dashboard/agent.py") for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.mark.slow
@pytest.mark.parametrize("user", ["", NAMELESS], ids=["this user", "a user without home or name"])
def test_a_head_starts_where_the_temporary_folder_has_a_long_name(tmp_path: Path, user: str) -> None:
    if user and not can_be_nameless():
        pytest.skip("only root becomes a user without a name")
    long = tmp_path / ("t" * 90)
    long.mkdir()
    for folder in (tmp_path, long):
        folder.chmod(0o777)
    state_dir = tmp_path / "state"
    environment = {name: value for name, value in os.environ.items() if not user or name not in HOMES}
    process = subprocess.run(
        [*user.split(), sys.executable, "-c", START, str(state_dir)], env={**environment, "TMPDIR": str(long)},
        timeout=DEADLINE_S, capture_output=True, text=True, check=False,
    )  # fmt: skip
    try:
        assert process.returncode == 0, process.stderr
        assert LocalHead.find(state_dir) is not None
    finally:
        LocalHead.stop_recorded(state_dir)
