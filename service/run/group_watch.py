"""Watch over a worker group: has the watchdog judge its heartbeats, and carries out what that decides."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from service.run.examine import Ending, Look, examine_on
from service.run.heartbeat_server import HeartbeatServer, RankState
from service.run.watchdog import Limits, RankFacts, judge

LOOK_AGAIN_S = 10.0
"""A silent process that is not to be ended is looked at again after so long."""

ExamineOn = Callable[[str, Sequence[tuple[int, float]], Ending], list[Look]]

_log = logging.getLogger("service.run.driver")


class GroupWatch:
    """Looks at all ranks whose heartbeats a server takes; `look` is called every second or so."""

    def __init__(
        self, server: HeartbeatServer, examine_on: ExamineOn = examine_on, limits: Limits = Limits()
    ) -> None:
        self._server, self._examine_on, self._limits = server, examine_on, limits
        self._looked_at: dict[tuple[str, int], float] = {}
        """When a process was last looked at, by node and pid."""
        self._named: set[tuple[str, int, str]] = set()
        """(node, pid, activity) of what was named as idle."""
        self._reason = ""

    def take_reason(self) -> str:
        """Why ranks were ended since this was last asked; empty where none were."""
        reason, self._reason = self._reason, ""
        return reason

    def look(self) -> None:
        """Judge the group once, and act on it. Raises what looking at another node raises."""
        now = time.monotonic()
        states = self._server.ranks()
        judgement = judge([_facts(state, now) for state in states], self._limits)
        if judgement.stuck:
            stuck = [state for state in states if state.rank in judgement.stuck]
            self._end(stuck, "always", judgement.reason)
            return
        for state in states:
            if state.rank in judgement.idle:
                self._name(state, states)
        silent = [
            state
            for state in states
            if state.rank in judgement.silent
            and now - self._looked_at.get(_process(state), -LOOK_AGAIN_S) >= LOOK_AGAIN_S
        ]
        if silent:
            self._end(silent, "if_stopped", "")

    def _name(self, state: RankState, states: Iterable[RankState]) -> None:
        """Say once which rank does nothing, and have it write its stacks to its log."""
        what = (*_process(state), state.beat.doing)
        if what in self._named:
            return
        self._named.add(what)
        state.wants_stacks = True
        waiting = sum(each.beat.in_collective for each in states if each is not state)
        others = f", while {waiting} other ranks wait in collectives" if waiting else ""
        _log.warning(
            "%s has done nothing for %.0f s (%s)%s; its log has its stacks",
            _name(state), state.beat.idle_s, state.beat.doing, others,
        )  # fmt: skip

    def _end(self, states: Sequence[RankState], ending: Ending, reason: str) -> None:
        """Look at processes, node by node, and end those of which `ending` says so."""
        now = time.monotonic()
        for state in states:
            self._looked_at[_process(state)] = now
        for node in dict.fromkeys(state.introduction.node for state in states):
            here = [state for state in states if state.introduction.node == node]
            looks = self._examine_on(
                node, [(state.introduction.pid, state.introduction.created_at) for state in here], ending
            )
            for state, look in zip(here, looks, strict=True):
                self._tell(state, look, reason, now)

    def _tell(self, state: RankState, look: Look, reason: str, now: float) -> None:
        if look.state == "gone":
            return  # Ray tells of it, and why
        told = reason or f"no heartbeat for {state.silent_s(now):.0f} s, last in {state.beat.doing}"
        verdict = "ended, and the group is made anew" if look.ended else "left alone"
        _log.warning(
            "%s: %s; its process %s: %s; its stack:\n%s", _name(state), told, look, verdict, look.stack
        )
        if look.ended and not self._reason:
            self._reason = f"rank {state.rank} was ended: {told}; its process {look}"


def _facts(state: RankState, now: float) -> RankFacts:
    beat = state.beat
    return RankFacts(
        rank=state.rank, phase=beat.phase, doing=beat.doing, in_collective=beat.in_collective,
        silent_s=state.silent_s(now), idle_s=beat.idle_s, step_s=beat.step_s,
    )  # fmt: skip


def _process(state: RankState) -> tuple[str, int]:
    return state.introduction.node, state.introduction.pid


def _name(state: RankState) -> str:
    return f"rank {state.rank} (process {state.introduction.pid} on {state.introduction.host})"
