"""Heartbeats of real worker processes, and the judgement of ranks by them: a stopped rank is found and ended, one that
works or waits is not."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import pytest

from service.run.examine import ATTEMPT_VARIABLE, Ending, ProcessSample, end_stopped, examine
from service.run.group_watch import GroupWatch
from service.run.heartbeat import Beat, Heartbeat, Introduction
from service.run.heartbeat_server import HeartbeatServer
from service.run.status import status_of
from service.run.watchdog import Judgement, RankFacts, WatchdogLimits, judge
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
    processes: list[subprocess.Popen[str]] = []

    def start(rank: int, phase: str, how: str) -> subprocess.Popen[str]:
        address = server.address
        command = [
            sys.executable,
            "-m",
            "tests.procs.heartbeat_worker",
            address.host,
            str(address.port),
            address.secret,
        ]
        process = subprocess.Popen([*command, str(rank), phase, how], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "at work\n"
        await_that(lambda: rank in {state.rank for state in server.ranks() if state.beat.phase == phase})
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def examine_here(_node: str, processes: Sequence[tuple[int, float]], ending: Ending) -> list[ProcessSample]:
    return [examine(pid, created_at, ending) for pid, created_at in processes]


@pytest.mark.sample(1)
@pytest.mark.parametrize("phase", ["preparation", "loading", "step", "collective", "checkpoint", "evaluation"])
def test_a_stopped_rank_is_ended(
    phase: str, server: HeartbeatServer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    honest, frozen_process = start(0, "collective", "waits"), start(1, phase, "waits")
    watch = GroupWatch(server, examine_here, LIMITS)
    frozen_process.send_signal(signal.SIGSTOP)
    with caplog.at_level(logging.WARNING):
        await_that(lambda: (watch.look(), frozen_process.poll() is not None)[1])
    assert frozen_process.returncode == -signal.SIGKILL
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
    slow, waiting_process = start(0, "step", "computes"), start(1, "collective", "waits")
    watch = GroupWatch(server, examine_here, LIMITS)
    await_that(lambda: max(next(state.beat.idle_s for state in server.ranks() if state.rank == 1), 0) > LIMITS.stuck_s)
    watch.look()
    assert (slow.poll(), waiting_process.poll(), watch.take_reason()) == (None, None, "")


@pytest.mark.slow
def test_a_rank_that_others_wait_for_is_ended(
    server: HeartbeatServer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    waiting_process, hanging_process = start(0, "collective", "waits"), start(1, "step", "waits")
    watch = GroupWatch(server, examine_here, LIMITS)

    def is_ended() -> bool:
        # The remaining rank alone would count as stuck.
        if "killed; restarting the worker group" not in caplog.text:
            watch.look()
        return hanging_process.poll() is not None

    with caplog.at_level(logging.WARNING):
        await_that(is_ended)
    assert waiting_process.poll() is None
    assert caplog.text.count("while 1 other ranks wait in collectives") == 1
    assert "rank 1 (step of a test)" in watch.take_reason()
    output = hanging_process.stdout.read()
    assert "stacks of this process, rank 1" in output
    assert "in wait_for_nobody" in output


def test_a_process_that_is_resumed_before_anybody_looks_is_left_alone(server: HeartbeatServer, start: Start) -> None:
    process = start(0, "step", "computes")
    created_at = psutil.Process(process.pid).create_time()
    stop(process)
    look = examine(process.pid, created_at, "never")
    assert (look.state, look.ended) == ("stopped", False)
    process.send_signal(signal.SIGCONT)
    look = examine(process.pid, created_at, "if_stopped")
    assert look.ended is False
    assert look.cpu_share > 0.05
    assert "compute" in look.stack


WAIT = "import threading; threading.Event().wait()"


@contextmanager
def python(code: str = WAIT, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs `code`, killed afterwards."""
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **variables}) as process:
        try:
            yield process
        finally:
            process.kill()


def stop(process: subprocess.Popen[Any]) -> None:
    process.send_signal(signal.SIGSTOP)
    await_that(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)


def test_a_worker_that_is_stopped_before_it_beats_is_found_by_its_attempt() -> None:
    own_variables, other_variables = ({ATTEMPT_VARIABLE: name} for name in ("job-a-a1", "job-a-a2"))
    with (
        python(**own_variables) as stopped_process,
        python(**own_variables) as running_process,
        python(**other_variables) as of_another,
    ):
        stop(stopped_process)
        stop(of_another)
        assert [(look.pid, look.state) for look in end_stopped("job-a-a1")] == [(stopped_process.pid, "stopped")]
        assert stopped_process.wait(DEADLINE_S) == -signal.SIGKILL
        assert [running_process.poll(), of_another.poll()] == [None, None]
        assert end_stopped("job-a-a1") == []


def test_a_silent_rank_that_works_is_left_alone_however_long_it_is_silent(server: HeartbeatServer) -> None:
    """As one whose heartbeat thread cannot get the interpreter lock."""
    watch = GroupWatch(server, examine_here, WatchdogLimits(silent_s=0.1, idle_s=0.1, stuck_s=0.2))
    with python("while True: pass") as process, introduce(server, rank=0, pid=process.pid):
        await_that(lambda: server.ranks()[0].silent_s(time.monotonic()) > 0.2)
        watch.look()
        assert (process.poll(), watch.take_reason()) == (None, "")


@pytest.mark.slow
def test_an_unreachable_node_keeps_no_other_rank_from_being_examined(server: HeartbeatServer, start: Start) -> None:
    def examine_on(node: str, processes: Sequence[tuple[int, float]], ending: Ending) -> list[ProcessSample]:
        if node == "lost-node":
            raise TimeoutError(node)
        return examine_here(node, processes, ending)

    frozen_process = start(1, "step", "computes")
    watch = GroupWatch(server, examine_on, LIMITS)
    with introduce(server, rank=0, pid=frozen_process.pid, node="lost-node"):
        frozen_process.send_signal(signal.SIGSTOP)
        await_that(lambda: all(state.silent_s(time.monotonic()) > LIMITS.silent_s for state in server.ranks()))
        with pytest.raises(TimeoutError):
            watch.look()
        assert frozen_process.wait(DEADLINE_S) == -signal.SIGKILL
    assert watch.take_reason().startswith("rank 1 was killed")


def test_a_worker_knows_for_how_long_its_driver_has_not_answered(server: HeartbeatServer) -> None:
    heartbeat = Heartbeat(server.address, 0, "this-node")
    assert heartbeat.unanswered_s() == 0.0, "never answered: perhaps no heartbeat gets through"
    heartbeat.start()
    await_that(lambda: heartbeat.unanswered_s() > 0.0)
    heartbeat.stop()
    await_that(lambda: heartbeat.unanswered_s() > 0.3)


def test_a_rank_that_is_ended_after_its_group_died_is_no_reason_for_a_later_death(server: HeartbeatServer) -> None:
    watch = GroupWatch(server, examine_here, WatchdogLimits(silent_s=0.0))
    with python() as frozen_process, introduce(server, rank=1, pid=frozen_process.pid):
        assert watch.take_reason() == "", "rank 0 died of something else"
        stop(frozen_process)
        watch.look()
        assert frozen_process.wait(DEADLINE_S) == -signal.SIGKILL
        assert watch.take_reason() == ""


def test_a_rank_that_begins_on_another_node_replaces_the_one_of_a_lost_node(server: HeartbeatServer) -> None:
    lost_rank, new_rank = partial(introduce, server, node="lost-node"), partial(introduce, server, node="new-node")
    with lost_rank(rank=0), lost_rank(rank=1), new_rank(rank=0):
        nodes = [(state.rank, state.introduction.node) for state in server.ranks()]
        assert nodes == [(0, "new-node"), (1, "lost-node")]


def test_another_process_with_the_same_number_is_not_touched() -> None:
    created_at = psutil.Process().create_time()
    assert examine(os.getpid(), created_at - 60.0, "if_idle") == ProcessSample(state="gone")


def test_only_who_knows_the_secret_is_heard(server: HeartbeatServer, caplog: pytest.LogCaptureFixture) -> None:
    address = server.address
    stranger = b'{"secret": "", "rank": 0, "pid": 1, "created_at": 0, "node": "", "host": ""}\n{}\n'
    for message in (stranger, stranger.replace(b'""', b'"\\u00e9"', 1), b"\xff\xfe\n", b"[1]\n", b"x" * (1 << 17)):
        with socket.create_connection((address.host, address.port), DEADLINE_S) as connection:
            connection.settimeout(DEADLINE_S)
            answer = b""
            with suppress(OSError):  # the server may hang up before all is sent
                connection.sendall(message)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(100)
            assert answer == b""
    assert server.ranks() == []
    assert caplog.text == ""  # a stranger cannot fill the driver's log


@contextmanager
def introduce(server: HeartbeatServer, rank: int, pid: int | None = None, node: str = "this-node") -> Iterator[None]:
    """Hold a connection over which a process has sent one heartbeat and nothing more."""
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


def test_a_status_has_the_last_heartbeat_of_each_rank(server: HeartbeatServer, start: Start) -> None:
    processes = [start(0, "collective", "waits"), start(1, "step", "waits")]
    status = status_of(server.ranks())
    assert (status.pid, status.num_ranks) == (os.getpid(), 2)
    assert [(rank.rank, rank.phase, rank.pid) for rank in status.ranks] == [
        (0, "collective", processes[0].pid), (1, "step", processes[1].pid),
    ]  # fmt: skip
    assert all(0.0 <= rank.silent_s < DEADLINE_S and rank.device is None for rank in status.ranks)


DEFAULTS = WatchdogLimits()
AT_WORK = RankFacts(0, "step", "step 7", in_collective=False, silent_s=1.0, idle_s=0.0, step_s=2.0)
WAITING = RankFacts(1, "step", "all-reduce of gradients", in_collective=True, silent_s=1.0, idle_s=500.0)


def test_a_slow_rank_that_works_is_left_alone_however_long_others_wait_for_it() -> None:
    assert judge([AT_WORK, WAITING, replace(WAITING, rank=2, idle_s=86_400.0)], DEFAULTS) == Judgement()


@pytest.mark.parametrize("phase", ["start", "preparation", "trials", "loading", "step", "checkpoint", "evaluation"])
@pytest.mark.parametrize("in_collective", [False, True])
def test_a_rank_that_does_not_beat_is_looked_at_in_every_phase(phase: str, in_collective: bool) -> None:
    frozen_rank = replace(AT_WORK, rank=3, phase=phase, in_collective=in_collective, silent_s=20.0)
    assert judge([AT_WORK, frozen_rank], DEFAULTS).silent == (3,)
    assert judge([AT_WORK, replace(frozen_rank, silent_s=19.9)], DEFAULTS).silent == ()


HANGING = replace(AT_WORK, rank=2, idle_s=25.0)


def test_a_rank_that_beats_and_does_nothing_while_others_wait_is_named_and_then_ended() -> None:
    assert judge([WAITING, HANGING], DEFAULTS) == Judgement(idle=(2,))
    assert judge([AT_WORK, WAITING, HANGING], DEFAULTS) == Judgement(idle=(2,))
    assert judge([WAITING, replace(HANGING, idle_s=19.0)], DEFAULTS) == Judgement()
    stuck_rank = replace(HANGING, idle_s=301.0)
    assert judge([WAITING, stuck_rank], DEFAULTS).stuck == (2,)
    assert judge([replace(WAITING, idle_s=299.0), stuck_rank], DEFAULTS).stuck == ()
    assert "rank 2 (step 7)" in judge([WAITING, stuck_rank], DEFAULTS).reason


def test_ranks_that_all_wait_in_collectives_are_all_named_and_all_ended() -> None:
    other_rank = replace(WAITING, rank=2, doing="all-to-all of rows", idle_s=400.0)
    assert judge([WAITING, other_rank], DEFAULTS) == Judgement(
        idle=(1, 2),
        stuck=(1, 2),
        reason="all ranks idle for 400 s; rank 1 (all-reduce of gradients), rank 2 (all-to-all of rows)",
    )


def test_a_group_has_the_time_of_twenty_steps_and_storage_may_take_its_own() -> None:
    slow = replace(HANGING, step_s=60.0)
    assert judge([replace(slow, idle_s=1000.0)], DEFAULTS).stuck == ()
    assert judge([replace(slow, idle_s=1200.0)], DEFAULTS).stuck == (2,)
    for phase in ("checkpoint", "loading"):
        saving_rank = replace(AT_WORK, phase=phase)
        assert judge([replace(saving_rank, idle_s=1799.0)], DEFAULTS).stuck == ()
        assert judge([replace(saving_rank, idle_s=1800.0)], DEFAULTS).stuck == (0,)
    preparing_rank = replace(AT_WORK, phase="preparation", idle_s=1e6)  # perhaps for another job that prepares the same
    assert judge([preparing_rank, replace(WAITING, phase="start", idle_s=1e6)], DEFAULTS) == Judgement()
    assert judge([], DEFAULTS) == Judgement()
