"""Delays after which a run of a tracker is opened again."""

import time

import pytest

from moe.spec import JobSpec
from service.control.store.tracked_runs import TrackedRunRow
from service.control.tracking.followed_run import RETRY_FIRST_S, RETRY_MOST_S, FollowedRun
from tests.service.control_plane import spec


def test_a_run_that_always_fails_is_opened_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    row = TrackedRunRow(job_number=1, tracker="wandb", written_to=0, place=None, trouble=None)
    run = FollowedRun.of_row(row, "job-1", JobSpec.parse(spec(track={"wandb": {"mode": "offline"}})))
    delays_s = []
    for _ in range(8):
        run.delay_retry()
        delays_s.append(run.retry_at - 1000.0)
    assert delays_s == [RETRY_FIRST_S * 2**number for number in range(6)] + [RETRY_MOST_S] * 2
    run.confirm(5)
    run.delay_retry()
    assert (run.written_to, run.retry_at) == (5, 1000.0 + RETRY_FIRST_S)
