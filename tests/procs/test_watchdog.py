"""Who of a worker group is frozen, who is waited for, and when a group is stuck: judged by what ranks say."""

from dataclasses import replace

import pytest

from service.run.watchdog import Judgement, RankFacts, WatchdogLimits, judge

LIMITS = WatchdogLimits()
AT_WORK = RankFacts(0, "step", "step 7", in_collective=False, silent_s=1.0, idle_s=0.0, step_s=2.0)
WAITING = RankFacts(1, "step", "all-reduce of gradients", in_collective=True, silent_s=1.0, idle_s=500.0)


def test_a_slow_rank_that_works_is_left_alone_however_long_others_wait_for_it() -> None:
    assert judge([AT_WORK, WAITING, replace(WAITING, rank=2, idle_s=86_400.0)], LIMITS) == Judgement()


@pytest.mark.parametrize("phase", ["start", "preparation", "trials", "loading", "step", "checkpoint", "evaluation"])
@pytest.mark.parametrize("in_collective", [False, True])
def test_a_rank_that_does_not_beat_is_looked_at_in_every_phase(phase: str, in_collective: bool) -> None:
    frozen = replace(AT_WORK, rank=3, phase=phase, in_collective=in_collective, silent_s=20.0)
    assert judge([AT_WORK, frozen], LIMITS).silent == (3,)
    assert judge([AT_WORK, replace(frozen, silent_s=19.9)], LIMITS).silent == ()


def test_a_rank_that_beats_and_does_nothing_while_others_wait_is_named_and_not_ended() -> None:
    hanging = replace(AT_WORK, rank=2, idle_s=25.0)
    assert judge([WAITING, hanging], LIMITS) == Judgement(idle=(2,))
    assert judge([AT_WORK, WAITING, hanging], LIMITS) == Judgement(idle=(2,))
    assert judge([WAITING, replace(hanging, idle_s=19.0)], LIMITS) == Judgement()


def test_a_group_in_which_nobody_does_anything_is_stuck_by_those_who_came_to_no_collective() -> None:
    hanging = replace(AT_WORK, rank=2, idle_s=301.0)
    assert judge([WAITING, hanging], LIMITS).stuck == (2,)
    assert judge([replace(WAITING, idle_s=299.0), hanging], LIMITS).stuck == ()
    assert "rank 2 (step 7)" in judge([WAITING, hanging], LIMITS).reason


def test_ranks_that_all_wait_in_collectives_are_all_named_and_all_ended() -> None:
    other = replace(WAITING, rank=2, doing="all-to-all of rows", idle_s=400.0)
    assert judge([WAITING, other], LIMITS) == Judgement(
        idle=(1, 2),
        stuck=(1, 2),
        reason="all ranks idle for 400 s; rank 1 (all-reduce of gradients), rank 2 (all-to-all of rows)",
    )


def test_a_group_has_the_time_of_twenty_steps() -> None:
    hanging = replace(AT_WORK, rank=2, idle_s=1000.0, step_s=60.0)
    assert judge([hanging], LIMITS).stuck == ()
    assert judge([replace(hanging, idle_s=1200.0)], LIMITS).stuck == (2,)


@pytest.mark.parametrize("phase", ["checkpoint", "loading"])
def test_storage_may_take_its_time(phase: str) -> None:
    waiting = replace(AT_WORK, phase=phase, idle_s=1799.0)
    assert judge([waiting], LIMITS).stuck == ()
    assert judge([replace(waiting, idle_s=1800.0)], LIMITS).stuck == (0,)


def test_a_rank_that_prepares_may_wait_for_another_job_that_prepares_the_same() -> None:
    preparing = replace(AT_WORK, phase="preparation", idle_s=1e6)
    assert judge([preparing, replace(WAITING, phase="start", idle_s=1e6)], LIMITS) == Judgement()


def test_no_ranks_are_no_trouble() -> None:
    assert judge([], LIMITS) == Judgement()
