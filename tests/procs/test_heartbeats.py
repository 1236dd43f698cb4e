"""Heartbeats of real worker processes: one that is stopped is found and ended, one that works or waits is not."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import psutil
import pytest

from service.run.examine import ATTEMPT_VARIABLE, Ending, ProcessSample, end_stopped, examine
from service.run.group_watch import GroupWatch
from service.run.heartbeat import Beat, Heartbeat, Introduction
from service.run.heartbeat_server import HeartbeatServer
from service.run.status import status_of
from service.run.watchdog import WatchdogLimits
from tests.processes import DEADLINE_S, await_that

LIMITS = WatchdogLimits(silent_s=4.0, idle_s=4.0, stuck_s=12.0, storage_s=12.0)
"""Twice the time between two heartbeats, so that a busy machine is not taken for a frozen one for long."""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def server() -> Iterator[HeartbeatServer]:
    server = HeartbeatServer("127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def start(server: HeartbeatServer) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(rank: int, phase: str, how: str) -> subprocess.Popen[str]:
        address = server.address
        command = [sys.executable, "-m", "tests.procs.beating", address.host, str(address.port), address.secret]
        process = subprocess.Popen([*command, str(rank), phase, how], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        await_that(lambda: rank in {state.rank for state in server.ranks() if state.beat.phase == phase})
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def here(_node: str, processes: Sequence[tuple[int, float]], ending: Ending) -> list[ProcessSample]:
    return [examine(pid, created_at, ending) for pid, created_at in processes]


@pytest.mark.sample(2)
@pytest.mark.parametrize("phase", ["preparation", "loading", "step", "collective", "checkpoint", "evaluation"])
def test_a_stopped_rank_is_named_with_its_stack_and_ended_whatever_it_does(
    phase: str, server: HeartbeatServer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    honest, frozen = start(0, "collective", "waits"), start(1, phase, "waits")
    watch = GroupWatch(server, here, LIMITS)
    frozen.send_signal(signal.SIGSTOP)
    with caplog.at_level(logging.WARNING):
        await_that(lambda: (watch.look(), frozen.poll() is not None)[1])
    assert frozen.returncode == -signal.SIGKILL
    assert honest.poll() is None
    reason = watch.take_reason()
    assert reason.startswith("rank 1 was killed: no heartbeat for ")
    assert f"last in {phase} of a test" in reason
    assert "is stopped by a signal (SIGSTOP)" in reason
    assert watch.take_reason() == ""
    assert "wait_for_nobody" in caplog.text
    await_that(lambda: [state.rank for state in server.ranks()] == [0])


@pytest.mark.slow
def test_a_rank_that_works_is_left_alone_while_others_wait_for_it(server: HeartbeatServer, start: Start) -> None:
    slow, waiting = start(0, "step", "computes"), start(1, "collective", "waits")
    watch = GroupWatch(server, here, LIMITS)
    await_that(lambda: max(_idle_s(server, 1), 0.0) > LIMITS.stuck_s)
    watch.look()
    assert (slow.poll(), waiting.poll(), watch.take_reason()) == (None, None, "")


def test_a_rank_that_waits_while_others_wait_for_it_says_where_and_is_ended_in_the_end(
    server: HeartbeatServer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    waiting, hanging = start(0, "collective", "waits"), start(1, "step", "waits")
    watch = GroupWatch(server, here, LIMITS)

    def is_ended() -> bool:
        if (
            "killed; restarting the worker group" not in caplog.text
        ):  # the one that is left alone would be stuck by itself
            watch.look()
        return hanging.poll() is not None

    with caplog.at_level(logging.WARNING):
        await_that(is_ended)
    assert waiting.poll() is None
    assert caplog.text.count("while 1 other ranks wait in collectives") == 1
    assert "rank 1 (step of a test)" in watch.take_reason()
    assert hanging.stdout is not None
    said = hanging.stdout.read()
    assert "stacks of this process, rank 1" in said
    assert "in wait_for_nobody" in said


def test_a_process_that_is_resumed_before_anybody_looks_is_left_alone(server: HeartbeatServer, start: Start) -> None:
    process = start(0, "step", "computes")
    process.send_signal(signal.SIGSTOP)
    await_that(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    look = examine(process.pid, psutil.Process(process.pid).create_time(), "never")
    assert (look.state, look.ended) == ("stopped", False)
    process.send_signal(signal.SIGCONT)
    look = examine(process.pid, psutil.Process(process.pid).create_time(), "if_stopped")
    assert look.ended is False
    assert look.cpu_share > 0.05
    assert "compute" in look.stack


def test_a_worker_that_is_stopped_before_it_beats_is_found_by_its_attempt() -> None:
    ours, others = ({**os.environ, ATTEMPT_VARIABLE: name} for name in ("job-a-a1", "job-a-a2"))
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    processes = [subprocess.Popen(command, env=variables) for variables in (ours, ours, others)]
    try:
        for process in (processes[0], processes[2]):
            process.send_signal(signal.SIGSTOP)
            await_that(partial(_is_stopped, process.pid))
        assert [(look.pid, look.state) for look in end_stopped("job-a-a1")] == [(processes[0].pid, "stopped")]
        assert processes[0].wait(DEADLINE_S) == -signal.SIGKILL
        assert [process.poll() for process in processes[1:]] == [None, None]
        assert end_stopped("job-a-a1") == []
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_silent_rank_that_works_is_left_alone_however_long_it_is_silent(server: HeartbeatServer) -> None:
    """As one whose heartbeat thread cannot get the interpreter lock."""
    command = [sys.executable, "-c", "while True: pass"]
    watch = GroupWatch(server, here, WatchdogLimits(silent_s=0.1, idle_s=0.1, stuck_s=0.2))
    with subprocess.Popen(command) as process:
        try:
            with introduced(server, rank=0, pid=process.pid):
                await_that(lambda: server.ranks()[0].silent_s(time.monotonic()) > 0.2)
                watch.look()
            assert (process.poll(), watch.take_reason()) == (None, "")
        finally:
            process.kill()


def test_a_node_that_cannot_be_reached_keeps_no_rank_of_another_from_being_examined(
    server: HeartbeatServer, start: Start
) -> None:
    def examine_on(node: str, processes: Sequence[tuple[int, float]], ending: Ending) -> list[ProcessSample]:
        if node == "lost-node":
            raise TimeoutError(node)
        return here(node, processes, ending)

    frozen = start(1, "step", "computes")
    watch = GroupWatch(server, examine_on, LIMITS)
    with introduced(server, rank=0, pid=frozen.pid, node="lost-node"):
        frozen.send_signal(signal.SIGSTOP)
        await_that(lambda: all(state.silent_s(time.monotonic()) > LIMITS.silent_s for state in server.ranks()))
        with pytest.raises(TimeoutError):
            watch.look()
        assert frozen.wait(DEADLINE_S) == -signal.SIGKILL
    assert watch.take_reason().startswith("rank 1 was killed")


def test_a_worker_knows_for_how_long_its_driver_has_not_answered(server: HeartbeatServer) -> None:
    heartbeat = Heartbeat(server.address, 0, "this-node")
    assert heartbeat.unanswered_s() == 0.0, "never answered: perhaps no heartbeat gets through"
    heartbeat.start()
    await_that(lambda: heartbeat.unanswered_s() > 0.0)
    heartbeat.stop()
    await_that(lambda: heartbeat.unanswered_s() > 0.3)


def test_a_rank_that_is_ended_after_its_group_died_is_no_reason_for_a_later_death(server: HeartbeatServer) -> None:
    with subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"]) as frozen:
        try:
            watch = GroupWatch(server, here, WatchdogLimits(silent_s=0.0))
            with introduced(server, rank=1, pid=frozen.pid):
                assert watch.take_reason() == "", "rank 0 died of something else"
                frozen.send_signal(signal.SIGSTOP)
                await_that(partial(_is_stopped, frozen.pid))
                watch.look()
                assert frozen.wait(DEADLINE_S) == -signal.SIGKILL
            assert watch.take_reason() == ""
        finally:
            frozen.kill()


def test_a_rank_that_begins_on_another_node_replaces_the_one_of_a_lost_node(server: HeartbeatServer) -> None:
    with (
        introduced(server, rank=0, node="lost-node"),
        introduced(server, rank=1, node="lost-node"),
        introduced(server, rank=0, node="new-node"),
    ):
        nodes = [(state.rank, state.introduction.node) for state in server.ranks()]
        assert nodes == [(0, "new-node"), (1, "lost-node")]


def test_another_process_with_the_same_number_is_not_touched() -> None:
    created_at = psutil.Process().create_time()
    assert examine(os.getpid(), created_at - 60.0, "if_idle") == ProcessSample(state="gone")


def test_nobody_is_heard_who_does_not_know_the_secret(
    server: HeartbeatServer, caplog: pytest.LogCaptureFixture
) -> None:
    address = server.address
    stranger = b'{"secret": "", "rank": 0, "pid": 1, "created_at": 0, "node": "", "host": ""}\n{}\n'
    for sent in (stranger, stranger.replace(b'""', b'"\\u00e9"', 1), b"\xff\xfe\n", b"[1]\n", b"x" * (1 << 17)):
        with socket.create_connection((address.host, address.port), DEADLINE_S) as connection:
            connection.settimeout(DEADLINE_S)
            answer = b""
            with suppress(OSError):  # it may be hung up on before it has said all
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(100)
            assert answer == b""
    assert server.ranks() == []
    assert caplog.text == ""  # a stranger cannot fill the driver's log


@contextmanager
def introduced(server: HeartbeatServer, rank: int, pid: int | None = None, node: str = "this-node") -> Iterator[None]:
    """Within: a connection over which a process sent one heartbeat and then nothing."""
    process = psutil.Process(pid)
    introduction = Introduction(
        secret=server.address.secret, rank=rank, pid=process.pid, created_at=process.create_time(),
        node=node, host="host",
    )  # fmt: skip
    with socket.create_connection((server.address.host, server.address.port), DEADLINE_S) as connection:
        beat = Beat(phase="step", doing="step 1")
        connection.sendall(f"{introduction.model_dump_json()}\n{beat.model_dump_json()}\n".encode())
        assert connection.recv(100) == b'{"stacks": false}\n'
        yield


def _is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def _idle_s(server: HeartbeatServer, rank: int) -> float:
    return next(state.beat.idle_s for state in server.ranks() if state.rank == rank)


def test_a_status_has_the_last_heartbeat_of_each_rank(server: HeartbeatServer, start: Start) -> None:
    processes = [start(0, "collective", "waits"), start(1, "step", "waits")]
    status = status_of(server.ranks())
    assert (status.pid, status.num_ranks) == (os.getpid(), 2)
    assert [(rank.rank, rank.phase, rank.pid) for rank in status.ranks] == [
        (0, "collective", processes[0].pid), (1, "step", processes[1].pid),
    ]  # fmt: skip
    assert all(0.0 <= rank.silent_s < DEADLINE_S and rank.device is None for rank in status.ranks)
