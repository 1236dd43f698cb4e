"""Status of an attempt, from its ranks' last heartbeats."""

import os
import socket
import time
from collections.abc import Sequence
from functools import cache

import psutil

from service.run.heartbeat_server import RankState
from service.wire.run_status import MAX_TEXT, RankStatus, RunStatus, select_ranks


def status_of(states: Sequence[RankState]) -> RunStatus:
    """Status of the attempt that this process drives."""
    now_s = time.monotonic()
    host, pid, created_at = _this_process()
    ranks = select_ranks([_rank_status(state, now_s) for state in states])
    return RunStatus(host=host, pid=pid, created_at=created_at, num_ranks=len(states), ranks=ranks)


def _rank_status(state: RankState, now_s: float) -> RankStatus:
    beat = state.beat
    return RankStatus(
        rank=state.rank, host=state.introduction.host[:MAX_TEXT], pid=state.introduction.pid,
        phase=beat.phase[:MAX_TEXT], doing=beat.doing[:MAX_TEXT], for_s=round(beat.for_s, 1),
        idle_s=round(beat.idle_s, 1), silent_s=round(max(0.0, state.silent_s(now_s)), 1), device=beat.device,
    )  # fmt: skip


@cache
def _this_process() -> tuple[str, int, float]:
    return socket.gethostname()[:MAX_TEXT], os.getpid(), psutil.Process().create_time()
