"""`up` and `down`: the control plane and its Ray head, started, found again and stopped."""

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.cli.ray_jobs import unfinished_jobs
from service.client import Client, ClientError
from service.head.local_head import LocalHead
from tests.processes import DEADLINE_S, await_that, with_environment
from tests.ray.control_plane import THREE_LANGUAGES, await_checkpoint, job_spec
from tests.service_cli.command import check_refused, output_of, shardyard
from tests.service_cli.running_up import WITHOUT_RAY, up


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[Path]:
    """A state folder whose Ray head is stopped at the end, whatever happens."""
    yield tmp_path / "state"
    LocalHead.stop_recorded(tmp_path / "state")


@pytest.mark.slow
def test_two_on_one_state_folder_share_its_head(state_dir: Path) -> None:
    with up(state_dir, "--stop-ray", program=WITHOUT_RAY) as first:
        first.url()
        with up(state_dir, "--stop-ray", program=WITHOUT_RAY) as second:
            second.url()
            assert "Ray is already running" in second.log
            assert second.stop() == 0
        assert second.log.endswith("another 'shardyard up' uses Ray: it is left running\n")
        assert LocalHead.find(state_dir) is not None
        result = shardyard("down", "--force", "--state-dir", state_dir)
        assert result.stdout == "Ray stopped; a 'shardyard up' that used it is still running: end it, too\n", (
            result.stderr
        )
        first.await_text("the Ray head was stopped from outside; leaving it stopped")
        assert first.stop() == 0
    assert with_environment("RAY_AUTH_TOKEN_PATH", str(state_dir / "ray" / "token")) == []


ELSEWHERE = "--ray-dashboard-url=http://127.0.0.1:1"
"""A cluster that is not there: nothing is started, and the control plane serves all the same."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_serves_until_a_signal(tmp_path: Path, number: int) -> None:
    with up(tmp_path / "state", ELSEWHERE) as service:
        with Client(service.url()) as client:
            assert list(client.jobs()) == []
            with pytest.raises(ClientError, match="cluster has been unreachable"):
                client.cluster()
        assert service.stop(number) == 0
        assert "Traceback" not in service.log


def test_a_second_one_on_the_port_is_refused_at_once(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        words = f"cannot listen on 127.0.0.1:{port} (Address already in use): is another 'shardyard up' running?"
        check_refused(words, "up", f"--port={port}", "--state-dir", tmp_path / "state")
    assert LocalHead.find(tmp_path / "state") is None


UNUSABLE: list[tuple[dict[str, str], tuple[str, ...], str]] = [
    ({"STORAGE_ROOTS": "/data"}, (), "SHARDYARD_STORAGE_ROOTS must be"),
    ({"STORAGE_ROOTS": '["data"]'}, (), "must be absolute paths or URLs"),
    ({"HOST": "no-such-machine.invalid"}, (), "must be a name or an address of this machine"),
    ({"DATABASE_URL": "sqlite:////dev/null/shardyard.db"}, (), "SHARDYARD_DATABASE_URL say where state is kept"),
    ({"DATABASE_URL": "no URL"}, (), "cannot use the database"),
    ({"DATABASE_URL": "mysql+absent://host/jobs"}, (), "cannot use the database"),
    ({"DATABASE_URL": "postgresql+asyncpg://me:secret@host/jobs"}, (), "the package asyncpg, which is not installed"),
    ({"STORAGE_ROOTS": '["abfs://bucket/jobs"]'}, (), "storage_roots (='abfs://bucket/jobs') needs a package"),
    ({"DATA_ROOTS": '["nosuch://bucket"]'}, (), "data_roots (='nosuch://bucket') names no file system (='nosuch')"),
    ({"CACHE_DIR": "s3://bucket/cache"}, (), "cache_dir must be a local folder"),
    ({"STATE_DIR": "/dev/null/state"}, (), "SHARDYARD_STATE_DIR and"),
    ({}, ("--data-root={tmp}/no-folder",), "{tmp}/no-folder"),
    ({}, ("--data-root={tmp}/file",), "{tmp}/file"),
    ({"TOKEN": ""}, ("--host=0.0.0.0",), "requires a token; set SHARDYARD_TOKEN, or listen on 127.0.0.1"),
    ({"TOKEN": "short"}, ("--host=0.0.0.0",), "at least 16 characters"),
]
"""(settings, options, words)"""


@pytest.mark.slow
def test_it_refuses_what_it_cannot_run_on_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for settings, options, words in UNUSABLE:
        values = {"STATE_DIR": str(tmp_path / "state"), "TOKEN": "0123456789abcdef", **settings}
        variables = {f"SHARDYARD_{name}": value for name, value in values.items() if value}
        arguments = [option.format(tmp=tmp_path) for option in options]
        errors = check_refused(words.format(tmp=tmp_path), "up", "--port=0", *arguments, **variables)
        assert errors.count("\n") == 1
    assert LocalHead.find(tmp_path / "state") is None


def test_it_says_where_the_dashboards_token_is_and_what_to_set_elsewhere(tmp_path: Path) -> None:
    token = tmp_path / "ray-token"
    token.write_text("0123456789abcdef")
    with up(tmp_path / "state", ELSEWHERE, f"--ray-token-path={token}") as service:
        service.await_text("Ctrl-C stops it")
        assert f"  Ray token      in {token}\n" in service.log
        assert f"  export SHARDYARD_URL={service.url()}\n" in service.log
        assert service.stop() == 0


def test_down_where_nothing_runs(tmp_path: Path) -> None:
    output = output_of("down", "--state-dir", tmp_path / "state")
    assert output == f"no Ray head is running for {tmp_path}/state\n"


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_training_outlives_the_control_plane_and_what_dies_of_the_head_is_started_again(state_dir: Path) -> None:
    """One run throughout, from its first step to the end of its Ray."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = f"--port={free.getsockname()[1]}"
    endless = job_spec(
        data=THREE_LANGUAGES,
        train={"num_steps": 1_000_000, "batch_tokens": 1024},
        checkpoint={"every_steps": 20, "keep": 2},
        retry={"max_failures": 0},
    )
    with up(state_dir, port, "--num-cpus=2") as first, Client(first.url()) as client:
        job = client.submit(endless)
        await_that(lambda: job.refresh().step > 0, lambda: f"{job.data}\n{first.log}")
        kill_part(state_dir, "dashboard")
        first.await_text("the Ray head is running again")
        await_checkpoint(job, job.step + 20)
        assert (job.state, job.data["attempt"]) == ("running", 1)
        assert first.stop() == 0
        assert "Ray is left running" in first.log
    assert LocalHead.find(state_dir) is not None
    down_is_refused(state_dir)

    with up(state_dir, port) as second, Client(second.url()) as client:
        assert "Ray is already running, with 2 CPUs" in second.log
        before = job.step
        job = client.job(job.id)
        await_that(lambda: job.refresh().step > before, lambda: str(job.data))
        assert (job.state, job.data["attempt"]) == ("running", 1)
        await_that(lambda: any(line["worker"] == "g0.rank-1" for line in job.logs()))
        second.stop(signal.SIGKILL)
    kill_part(state_dir, "dashboard")  # while nobody looks
    down_is_refused(state_dir)
    kill_part(state_dir, "dashboard")

    with up(state_dir, port) as third, Client(third.url()) as client:
        assert "Ray's dashboard is not running: restarting it; jobs continue" in third.log
        job = client.job(job.id)
        await_checkpoint(job, job.step + 20)
        assert (job.state, job.data["attempt"]) == ("running", 1)
        quiet_so_far = len(third.log.splitlines())

        kill_part(state_dir, "raylet")
        await_that(
            lambda: "the cluster has been unreachable since 20" in job.refresh().reason,
            lambda: f"{job.data}\n{third.log}",
        )
        assert "the raylet of its Ray head died at 20" in job.reason
        assert "and is being restarted (try 1 of " in job.reason
        with pytest.raises(
            ClientError, match=r"the cluster has been unreachable since 20.* the raylet of its Ray head died at 20"
        ):
            client.cluster()
        doctor = shardyard("doctor", url=client.url)
        assert (doctor.returncode, "the raylet of its Ray head died" in doctor.stdout) == (1, True)
        third.await_text("the Ray head is running again")
        step = job.step
        await_that(
            lambda: (job.refresh().state, job.data["attempt"]) == ("running", 2) and job.step > step,
            lambda: f"{job.data}\n{third.log}",
        )
        assert job.data["failures"] == 0
        lines = third.log.splitlines()[quiet_so_far:]
        assert len([line for line in lines if "[" in line]) < 20, "\n".join(lines)
        head = LocalHead.find(state_dir)
        job.cancel().wait(DEADLINE_S)
        await_that(lambda: unfinished_jobs(head.dashboard_url, head.token_path) == [])
        assert third.stop() == 0
        assert third.log.endswith("Ray stopped\n")
    assert LocalHead.find(state_dir) is None
    assert not [process for node in head.nodes for process in node.processes if process.find()]
    assert with_environment("RAY_AUTH_TOKEN_PATH", str(state_dir / "ray" / "token")) == []


def down_is_refused(state_dir: Path) -> None:
    check_refused("use --force", "down", "--state-dir", state_dir, code=1)


def kill_part(state_dir: Path, name: str) -> None:
    """SIGKILL for one process of the head."""
    head = LocalHead.find(state_dir)
    parts = {process.name: process for process in head.nodes[0].processes}
    process = head.dashboard.process if name == "dashboard" else parts[name]
    process.find().kill()
    await_that(lambda: process.find() is None)


@pytest.mark.ray
def test_a_signal_while_ray_starts_leaves_nothing(state_dir: Path) -> None:
    with up(state_dir) as service:
        service.await_text("starting Ray")
        assert service.stop(signal.SIGINT) == 0
    assert LocalHead.find(state_dir) is None
    assert with_environment("RAY_AUTH_TOKEN_PATH", str(state_dir / "ray" / "token")) == []
