"""Watches a worker group: passes heartbeats to the watchdog and acts on its judgement."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from service.run.examine import Ending, ProcessSample, end_stopped_on, examine_on
from service.run.heartbeat_server import HeartbeatServer, RankState
from service.run.placement import nodes_of_gang
from service.run.watchdog import RankFacts, WatchdogLimits, judge

MAX_LOOK_S = 30.0
LOOK_AGAIN_S = 10.0
"""Interval of examinations of a silent process."""

ExamineOn = Callable[[str, Sequence[tuple[int, float]], Ending], list[ProcessSample]]

_log = logging.getLogger("service.run.driver")


class GroupWatch:
    """Watches all ranks of a heartbeat server, by calls of `look`."""

    def __init__(
        self, server: HeartbeatServer, examine_on: ExamineOn = examine_on, limits: WatchdogLimits = WatchdogLimits()
    ) -> None:
        self._server, self._examine_on, self._limits = server, examine_on, limits
        self._examined_at: dict[tuple[str, int], float] = {}
        """Time of the last examination of a process, by node and pid."""
        self._reported_ranks: set[tuple[str, int, str]] = set()
        """(node, pid, activity) of ranks reported as idle."""
        self._dead_group_processes: set[tuple[str, int]] = set()
        """Processes of dead groups, whose killing explains no later death."""
        self._reason = ""
        self._looking = threading.Lock()

    def take_reason(self) -> str:
        """Return why ranks of the dead group were killed, or "". Called once per group, from any thread. Waits for a
        running `look`, since Ray may report a death before the `look` that caused it returns."""
        has_lock = self._looking.acquire(timeout=MAX_LOOK_S)
        try:
            self._dead_group_processes |= {_process(state) for state in self._server.ranks()}
            reason, self._reason = self._reason, ""
            return reason
        finally:
            if has_lock:
                self._looking.release()

    def look(self) -> None:
        """Judge the group once and act. Raises the last error of a node that could not be examined, after all others
        were."""
        with self._looking:
            self._look()

    def end_stopped_starts(self, attempt: str) -> None:
        """Kill workers of an attempt that were stopped before their first heartbeat: Ray would wait for minutes."""
        with self._looking:
            for look in end_stopped_on(nodes_of_gang(), attempt):
                _log.warning("a worker that has not started (process %d) %s: killed; restarting the worker group; "
"its stack:\n%s", look.pid, look, look.stack)  # fmt: skip
                self._reason = self._reason or f"a worker that had not started was killed: its process {look}"

    def _look(self) -> None:
        now_s = time.monotonic()
        states = self._server.ranks()
        judgement = judge([_facts(state, now_s) for state in states], self._limits)
        if judgement.stuck:
            stuck_states = [state for state in states if state.rank in judgement.stuck and self._is_due(state, now_s)]
            self._end(stuck_states, "if_idle", judgement.reason)
            return
        for state in states:
            if state.rank in judgement.idle:
                self._name(state, states)
        silent = [state for state in states if state.rank in judgement.silent and self._is_due(state, now_s)]
        self._end(silent, "if_stopped", "")

    def _is_due(self, state: RankState, now_s: float) -> bool:
        return now_s - self._examined_at.get(_process(state), -LOOK_AGAIN_S) >= LOOK_AGAIN_S

    def _name(self, state: RankState, states: Iterable[RankState]) -> None:
        """Log an idle rank once, and request its stacks."""
        activity = (*_process(state), state.beat.doing)
        if activity in self._reported_ranks:
            return
        self._reported_ranks.add(activity)
        state.wants_stacks = True
        waiting = sum(rank_state.beat.in_collective for rank_state in states if rank_state is not state)
        waiting_note = f", while {waiting} other ranks wait in collectives" if waiting else ""
        _log.warning(
            "%s has been idle for %.0f s (%s)%s; its log has its stacks",
            _name(state), state.beat.idle_s, state.beat.doing, waiting_note,
        )  # fmt: skip

    def _end(self, states: Sequence[RankState], ending: Ending, reason: str) -> None:
        """Examine processes, node by node, and kill those that `ending` selects."""
        failure: Exception | None = None
        now_s = time.monotonic()
        for state in states:
            self._examined_at[_process(state)] = now_s
        for node in dict.fromkeys(state.introduction.node for state in states):
            on_node = [state for state in states if state.introduction.node == node]
            processes = [(state.introduction.pid, state.introduction.created_at) for state in on_node]
            try:
                looks = self._examine_on(node, processes, ending)
            except Exception as error:  # such as a node that was lost; processes elsewhere are looked at all the same
                failure = error
                continue
            for state, look in zip(on_node, looks, strict=True):
                self._tell(state, look, reason, now_s)
        if failure is not None:
            raise failure

    def _tell(self, state: RankState, look: ProcessSample, reason: str, now_s: float) -> None:
        if look.state == "gone":
            return  # Ray reports it, with the cause
        cause = reason or f"no heartbeat for {state.silent_s(now_s):.0f} s, last in {state.beat.doing}"
        verdict = "killed; restarting the worker group" if look.ended else "left running"
        _log.warning("%s: %s; its process %s: %s; its stack:\n%s", _name(state), cause, look, verdict, look.stack)
        if look.ended and not self._reason and _process(state) not in self._dead_group_processes:
            self._reason = f"rank {state.rank} was killed: {cause}; its process {look}"


def _facts(state: RankState, now_s: float) -> RankFacts:
    beat = state.beat
    return RankFacts(
        rank=state.rank, phase=beat.phase, doing=beat.doing, in_collective=beat.in_collective,
        silent_s=state.silent_s(now_s), idle_s=beat.idle_s, step_s=beat.step_s,
    )  # fmt: skip


def _process(state: RankState) -> tuple[str, int]:
    return state.introduction.node, state.introduction.pid


def _name(state: RankState) -> str:
    return f"rank {state.rank} (process {state.introduction.pid} on {state.introduction.host})"
