"""Decisions as tables and as laws: from facts alone, without a cluster."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from moe.spec import RetrySpec
from service.control.launcher.launcher import Observation
from service.control.scheduling.decisions import (
    AskResize,
    Decision,
    End,
    Explain,
    Move,
    NoteReachable,
    NoteSeen,
    NoteSubmission,
    NoteUnreachable,
    NoteUnseen,
    Resize,
    Retry,
    Stop,
    Submit,
    Wait,
)
from service.control.scheduling.policies import MAX_LOST_STARTS, MAX_SETBACKS, Deadlines, JobFacts, decide
from service.wire.launch import Result
from service.wire.states import ACTIVE, ENDED, OVER, RESUMABLE, TRANSITIONS, State, sources

DEADLINES = Deadlines(cancel_s=30, pause_s=600, lost_grace_s=10)
RUNNING = JobFacts(
    state=State.RUNNING,
    now_s=1000.0,
    attempt=1,
    launch="submitted",
    failures=0,
    max_failures=3,
    observation=Observation(status="running"),
    began=True,
    group_phase="running",
    reason="its workers started",
)
GONE = Observation(status="failed", message="exit code 1\nmore")
GONE_WELL = Observation(status="succeeded")
PREEMPTED = GONE.model_copy(update={"preempted": True})
UNKNOWN = Observation(status="unknown")
FORGOTTEN: dict[str, Any] = {"observation": UNKNOWN, "unseen_since": 989.0}
"""The cluster has not known the job for longer than `lost_grace_s`."""
AWAY: dict[str, Any] = {"observation": None, "unreachable": "away"}
MADE_ROOM: dict[str, Any] = {"observation": GONE_WELL, "result": Result(outcome="paused", step=4)}
LOST = Observation(status="stopped", lost=True, message="RayJob x was deleted")
QUEUED: dict[str, Any] = {
    "observation": Observation(status="pending", waiting="in queue gpus"), "state": State.STARTING, "group_phase": None,
}  # fmt: skip
SAVED = Result(outcome="preempted", step=7, message="node n2 is being drained")
SUCCEEDED = Result(outcome="succeeded", step=9)
DIED = Result(outcome="failed", step=4)
DIED_FOR_GOOD = Result(outcome="failed", step=4, message="loss is nan", retryable=False)

TABLE: list[tuple[str, dict[str, Any], type]] = [
    ("all is well", {}, Wait),
    ("room for more, a moment after the start", {"workers": 1, "room": 2, "group_phase_at": 990.0}, Wait),
    ("room for more", {"workers": 1, "room": 2, "group_phase_at": 960.0}, AskResize),
    ("room for more, and a pause is asked for",
     {"workers": 1, "room": 2, "request": "pause", "requested_at": 999.0}, Wait),
    ("room for fewer, but all of it runs", {"workers": 2, "room": 1, "min_num_workers": 1}, Wait),
    ("room for fewer", {"workers": 2, "room": 1, "min_num_workers": 1, "group_phase": "waiting",
                        "state": State.RECOVERING}, Resize),
    ("room for too few", {"workers": 4, "room": 1, "min_num_workers": 2, "group_phase": "waiting",
                          "group_reason": "waits for room", "state": State.RECOVERING}, Explain),
    ("made room as asked", {**MADE_ROOM, "request": "resize", "workers": 1}, Resize),
    ("made room as asked, and a pause came in between",
     {**MADE_ROOM, "request": "pause", "state": State.PAUSING}, End),
    ("died when asked to make room", {"request": "resize", "observation": GONE}, Retry),
    ("the cluster is away", {"observation": None}, Wait),
    ("the cluster is away, long after a cancel", {"observation": None, "request": "cancel"}, Wait),
    ("the cluster is away for long", AWAY, NoteUnreachable),
    ("the cluster is away, as it says", {**AWAY, "reason": "away", "unreachable_since": 1.0}, Wait),
    ("the cluster is dead", {**AWAY, "runs_nothing": True}, Move),
    ("the cluster is dead, and the job recovers",
     {**AWAY, "runs_nothing": True, "state": State.RECOVERING}, NoteUnreachable),
    ("nothing is heard of it", {"heard_at": 985.0}, Explain),
    ("it was heard of a moment ago", {"heard_at": 995.0}, Wait),
    ("the cluster is away between two attempts",
     {**AWAY, "launch": None, "state": State.RECOVERING}, NoteUnreachable),
    ("cancelled between two attempts, the cluster is away",
     {**AWAY, "launch": None, "request": "cancel", "state": State.RECOVERING}, End),
    ("the cluster is there again", {"reason": "away", "unreachable_since": 1.0}, NoteReachable),
    ("the cluster answers some questions",
     {"launch": "due", "observation": UNKNOWN, "unreachable": "away", "unreachable_since": 1.0}, Submit),
    ("its checkpoints fail", {"saving_trouble": "the disk is full"}, Explain),
    ("its checkpoints fail, as it says", {"saving_trouble": "full", "reason": "its workers started; full"}, Wait),
    ("its checkpoints are committed again", {"reason": "its workers started; full"}, Explain),
    ("its checkpoints fail, and it is asked to cancel",
     {"saving_trouble": "full", "request": "cancel", "requested_at": 990.0}, Wait),
    ("not yet submitted", {"launch": "due", "observation": UNKNOWN}, Submit),
    ("submitted by a controller that died", {"launch": "due"}, NoteSubmission),
    ("cancelled before it was submitted", {"launch": "due", "observation": UNKNOWN, "request": "cancel"}, NoteUnseen),
    ("cancelled, and may yet appear",
     {"launch": "due", "observation": UNKNOWN, "request": "cancel", "unseen_since": 991.0}, Wait),
    ("cancelled, and will not appear", {**FORGOTTEN, "launch": "due", "request": "cancel"}, End),
    ("forgotten by the cluster", {"observation": UNKNOWN}, NoteUnseen),
    ("its cluster was made anew", {"observation": Observation(status="unknown", forgotten=True)}, Retry),
    ("its cluster was made anew before it was submitted",
     {"launch": "due", "observation": Observation(status="unknown", forgotten=True)}, Submit),
    ("forgotten a moment ago", {"observation": UNKNOWN, "unseen_since": 991.0}, Wait),
    ("forgotten for long", FORGOTTEN, Retry),
    ("forgotten with no failure left", {**FORGOTTEN, "failures": 3}, Retry),
    ("forgotten for the fourth time", {**FORGOTTEN, "setbacks": 3}, Retry),
    ("forgotten for the fifth time", {**FORGOTTEN, "setbacks": 4}, End),
    ("forgotten for the fifth time, while it waited for a place again",
     {**FORGOTTEN, "setbacks": 4, "group_phase": "waiting", "state": State.RECOVERING}, End),
    ("forgotten for the fifth time, this time before its workers started",
     {**FORGOTTEN, "setbacks": 4, "lost_starts": 18, "began": False, "group_phase": "waiting",
      "state": State.STARTING}, Retry),
    ("forgotten for the twentieth time before its workers started",
     {**FORGOTTEN, "lost_starts": 19, "began": False, "group_phase": None, "state": State.STARTING}, End),
    ("forgotten for the fifth time, a cancel is asked for", {**FORGOTTEN, "setbacks": 4, "request": "cancel"}, End),
    ("forgotten, its driver said that its workers died",
     {"observation": UNKNOWN, "failures": 3, "result": DIED}, Retry),
    ("forgotten, and it could not have gone on", {"observation": UNKNOWN, "result": DIED_FOR_GOOD}, End),
    ("forgotten, its workers died, and a cancel is asked for",
     {"observation": UNKNOWN, "request": "cancel", "result": DIED}, End),
    ("there again", {"unseen_since": 991.0}, NoteSeen),
    ("forgotten, but it had ended", {"observation": UNKNOWN, "result": SUCCEEDED}, End),
    ("started", {"state": State.STARTING}, Move),
    ("not yet started", {"state": State.STARTING, "group_phase": None}, Wait),
    ("lost its workers", {"group_phase": "recovering"}, Move),
    ("lost its workers, and waits for a place", {"group_phase": "waiting"}, Move),
    ("waits for a place", {"state": State.STARTING, "group_phase": "waiting", "group_reason": "waits"}, Explain),
    ("waits for a place, as it says",
     {"state": State.STARTING, "group_phase": "waiting", "group_reason": "waits", "reason": "waits"}, Wait),
    ("has new workers", {"state": State.RECOVERING}, Move),
    ("the driver died", {"observation": GONE}, Retry),
    ("the driver died, its workers live", {"observation": GONE.model_copy(update={"released": False})}, Wait),
    ("the driver's node was preempted", {"observation": PREEMPTED, "failures": 3}, Retry),
    ("the driver's node was preempted, a pause is asked for",
     {"observation": PREEMPTED, "request": "pause", "state": State.PAUSING}, End),
    ("the driver died once too often", {"observation": GONE, "failures": 3}, End),
    ("the driver was stopped by somebody", {"observation": Observation(status="stopped")}, Retry),
    ("ended well", {"observation": GONE_WELL, "result": SUCCEEDED}, End),
    ("ended well, says the driver alone", {"observation": GONE_WELL}, Retry),
    ("ended well, its exit status was bad", {"observation": GONE, "result": SUCCEEDED}, End),
    ("asked to cancel just now", {"request": "cancel", "requested_at": 990.0}, Wait),
    ("asked to cancel long ago", {"request": "cancel", "requested_at": 900.0}, Stop),
    ("stopped by force just now", {"request": "cancel", "requested_at": 900.0, "stopped_at": 995.0}, Wait),
    ("stopped by force in vain", {"request": "cancel", "requested_at": 900.0, "stopped_at": 980.0}, Stop),
    ("asked to pause a while ago", {"request": "pause", "requested_at": 900.0, "state": State.PAUSING}, Wait),
    ("waits in its cluster's queue", {**QUEUED}, Explain),
    ("waits in its cluster's queue, as it says", {**QUEUED, "reason": "in queue gpus"}, Wait),
    ("waits in its cluster's queue, and a cancel is asked for", {**QUEUED, "request": "cancel"}, Stop),
    ("waits in its cluster's queue, and a pause is asked for",
     {**QUEUED, "request": "pause", "state": State.PAUSING}, Stop),
    ("runs with a lost pod", {"observation": Observation(status="running", waiting="node n2 is gone")}, Explain),
    ("ended, its pods do not yet",
     {"observation": Observation(status="stopped", released=False, waiting="2 pods are ending")}, Explain),
    ("its cluster refuses to run it", {"observation": GONE.model_copy(update={"refused": True})}, End),
    ("its cluster was deleted", {"observation": LOST}, Retry),
    ("its cluster was lost with no failure left", {"observation": LOST, "failures": 3}, Retry),
    ("its cluster was lost for the fifth time", {"observation": LOST, "setbacks": 4}, End),
    ("its cluster was deleted after a cancel", {"observation": LOST, "request": "cancel"}, End),
    ("saved before its pods ended", {"observation": GONE_WELL, "result": SAVED, "failures": 3}, Retry),
    ("saved before its pods ended, which are gone", {"observation": UNKNOWN, "result": SAVED}, Retry),
    ("saved before its pods ended, and a pause is asked for",
     {"observation": GONE_WELL, "result": SAVED, "request": "pause", "state": State.PAUSING}, End),
    ("between two attempts", {"launch": None, "observation": None, "state": State.RECOVERING}, Wait),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "decision"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_decisions(changes: dict[str, Any], decision: type) -> None:
    assert type(decide(replace(RUNNING, **changes), DEADLINES)) is decision


ENDS: list[tuple[dict[str, Any], State]] = [
    ({"result": SUCCEEDED}, State.SUCCEEDED),
    ({"result": SUCCEEDED, "request": "cancel"}, State.SUCCEEDED),  # it was quicker
    ({"result": SUCCEEDED, "request": "pause", "state": State.PAUSING}, State.SUCCEEDED),
    ({"result": Result(outcome="cancelled", step=3), "request": "cancel"}, State.CANCELLED),
    ({"result": Result(outcome="paused", step=3), "request": "pause", "state": State.PAUSING}, State.PAUSED),
    ({"result": Result(outcome="paused", step=3), "request": "cancel", "state": State.PAUSING}, State.CANCELLED),
    ({"result": DIED_FOR_GOOD}, State.FAILED),
    ({"result": DIED, "failures": 3}, State.FAILED),
    ({"result": DIED, "request": "cancel"}, State.CANCELLED),
    ({"request": "cancel"}, State.CANCELLED),
    ({"request": "pause", "state": State.PAUSING}, State.PAUSED),
    ({"failures": 3}, State.FAILED),
]


@pytest.mark.parametrize(("changes", "state"), ENDS)
def test_how_a_job_ends_once_its_driver_has(changes: dict[str, Any], state: State) -> None:
    decision = decide(replace(RUNNING, observation=GONE, **changes), DEADLINES)
    assert isinstance(decision, End)
    assert (decision.state, bool(decision.reason)) == (state, True)


def test_a_recovered_job_gives_the_whole_message_of_its_driver_and_no_retry() -> None:
    observation = Observation(status="failed", message="exit code 1: no space; on the disk")
    decision = decide(replace(RUNNING, is_confirmed=False, observation=observation), DEADLINES)
    assert isinstance(decision, End)
    assert decision.state == State.PAUSED
    assert "no space; on the disk: 'resume' continues" in decision.reason
    assert "failure 1 of" not in decision.reason


def retry_after_s(**changes: Any) -> float:
    decision = decide(replace(RUNNING, **changes), DEADLINES)
    assert isinstance(decision, Retry)
    return decision.after_s


def test_waits_between_attempts_grow() -> None:
    failures = (*range(8), 1023, 1024, 10**6)
    waits = [retry_after_s(observation=GONE, failures=count, max_failures=2**53) for count in failures]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60]
    for began, losses in ((True, "setbacks"), (False, "lost_starts")):
        facts = {"observation": UNKNOWN, "unseen_since": 0.0, "began": began}
        assert [retry_after_s(**facts, **{losses: count}) for count in (0, 3)] == [0, 8]


observations = st.none() | st.builds(
    Observation,
    status=st.sampled_from(["unknown", "pending", "running", "succeeded", "failed", "stopped"]),
    message=st.text(max_size=20),
    waiting=st.sampled_from(["", "no node has room"]),
    released=st.booleans(),
    forgotten=st.booleans(),
    preempted=st.booleans(),
    lost=st.booleans(),
    refused=st.booleans(),
)
results = st.none() | st.builds(
    Result,
    outcome=st.sampled_from(["succeeded", "paused", "cancelled", "preempted", "failed"]),
    step=st.integers(0, 100),
    message=st.text(max_size=20),
    retryable=st.booleans(),
)
times = st.floats(0, 2000, allow_nan=False)
with_many_examples = settings(max_examples=300, deadline=None)  # some cases are rare, and none takes a millisecond
all_facts = st.builds(
    JobFacts,
    state=st.sampled_from(sorted(ACTIVE)),
    now_s=times,
    attempt=st.integers(1, 5),
    launch=st.sampled_from([None, "due", "submitted"]),
    failures=st.integers(0, 5),
    max_failures=st.integers(0, 5),
    setbacks=st.integers(0, 9),
    lost_starts=st.integers(0, 29),
    began=st.booleans(),
    observation=observations,
    result=results,
    request=st.sampled_from([None, "pause", "cancel"]),
    requested_at=times,
    unseen_since=st.none() | times,
    stopped_at=st.none() | times,
    group_phase=st.sampled_from([None, "running", "waiting", "recovering"]),
    group_reason=st.text(max_size=10),
    reason=st.text(max_size=10),
    unreachable=st.sampled_from(["", "the cluster is away"]),
    unreachable_since=st.none() | times,
    heard_at=st.none() | times,
    runs_nothing=st.booleans(),
    saving_trouble=st.sampled_from(["", "the disk is full"]),
)


@with_many_examples
@given(all_facts)
def test_every_decision_is_one_that_the_facts_allow(facts: JobFacts) -> None:
    decision, observation = decide(facts, DEADLINES), facts.observation
    if isinstance(decision, Move | End):
        assert decision.state in TRANSITIONS[facts.state]
        assert decision.reason.strip()
    if isinstance(decision, End) and decision.state == State.SUCCEEDED:
        assert facts.result.outcome == "succeeded"
    if isinstance(decision, Retry):
        assert facts.failures < facts.max_failures or decision.counts_as != "failure"
        assert facts.state == State.RECOVERING or State.RECOVERING in TRANSITIONS[facts.state]
    if isinstance(decision, Submit):
        assert (facts.launch, facts.request) == ("due", None)
        assert observation.status == "unknown"
    # An attempt that may still hold resources of the cluster is kept.
    if facts.launch == "submitted" and observation is not None and observation.status != "unknown":
        assert (observation.has_ended and observation.released) or not isinstance(decision, End | Retry)


@with_many_examples
@given(all_facts)
def test_only_what_the_cluster_knows_of_counts_as_a_failure(facts: JobFacts) -> None:
    """A cluster that was made anew knows no attempt of the one before."""
    decision = decide(replace(facts, observation=UNKNOWN), DEADLINES)
    assert not isinstance(decision, Retry) or decision.counts_as != "failure"
    assert not isinstance(decision, End) or decision.stops or facts.launch is None, "it may only be out of sight"


@with_many_examples
@given(all_facts)
def test_only_an_attempt_whose_workers_began_counts_as_a_setback(facts: JobFacts) -> None:
    """Otherwise another job may have brought the cluster down while this one waited for room."""
    lost_facts = replace(
        facts, observation=UNKNOWN, unseen_since=0.0, launch="submitted", result=None, now_s=1000.0,
        unreachable="", unreachable_since=None, state=State.STARTING, request=None,
    )  # fmt: skip
    decision = decide(lost_facts, DEADLINES)
    if isinstance(decision, End):
        assert decision.state == State.PAUSED
        before, max_count = (facts.setbacks, MAX_SETBACKS) if facts.began else (facts.lost_starts, MAX_LOST_STARTS)
        assert before + 1 >= max_count
    else:
        assert isinstance(decision, Retry)
        assert decision.counts_as == ("setback" if facts.began else "lost_start")


@with_many_examples
@given(all_facts)
def test_silence_changes_nothing(facts: JobFacts) -> None:
    if facts.launch is not None:
        news = facts.unreachable if facts.unreachable != facts.reason else ""
        expected: Decision = NoteUnreachable(news) if news else Wait()
        if facts.unreachable and facts.runs_nothing and facts.state == State.RUNNING:
            expected = Move(State.RECOVERING, facts.unreachable)
        assert decide(replace(facts, observation=None), DEADLINES) == expected


@with_many_examples
@given(all_facts)
def test_what_a_job_says_of_the_same_facts_is_said_once(facts: JobFacts) -> None:
    """Each is an event, and the controller looks twice a second."""
    for _ in range(2):
        match decide(facts, DEADLINES):
            case Explain(reason):
                facts = replace(facts, reason=reason)
            case NoteUnreachable(reason):
                facts = replace(facts, reason=reason, unreachable_since=facts.unreachable_since or facts.now_s)
            case NoteReachable(reason):
                facts = replace(facts, reason=reason, unreachable_since=None)
    assert not isinstance(decide(facts, DEADLINES), Explain | NoteUnreachable | NoteReachable)


@pytest.mark.parametrize(
    ("changes", "runs"),
    [({}, True), ({"group_phase": "waiting"}, False), ({"launch": None}, False), ({"request": "pause"}, False)],
)
def test_a_job_says_again_that_it_runs_once_its_cluster_responds(changes: dict[str, Any], runs: bool) -> None:
    facts = replace(RUNNING, reason="away", unreachable_since=1.0, group_reason="2 workers run", **changes)
    decision = decide(facts, DEADLINES)
    assert isinstance(decision, NoteReachable)
    assert (decision.reason == "2 workers run") is runs


def test_transitions_between_states() -> None:
    assert {State.SUCCEEDED, State.FAILED, State.CANCELLED} == ENDED
    assert set(TRANSITIONS) == set(State)
    assert all(sources(state) for state in State)
    assert sources(State.QUEUED) == RESUMABLE
    assert TRANSITIONS[State.SUCCEEDED] == {State.DELETING}
    assert all(state in OVER or State.CANCELLED in TRANSITIONS[state] for state in State)
    assert sources(State.DELETING) == {*ENDED, State.PAUSED}


def _died_of(kind: str, **facts: Any) -> Any:
    result = Result(outcome="failed", step=4, message="it failed", failure_kind=kind)
    return decide(replace(RUNNING, observation=GONE, result=result, **facts), DEADLINES)


def test_a_failure_kind_with_a_limit_of_its_own_counts_against_that_alone() -> None:
    retry = RetrySpec.model_validate({"kinds": {"error": {"max_failures": 0}, "lost": {"max_failures": 9}}})
    end = _died_of("error", retry=retry)
    assert isinstance(end, End)
    assert (end.state, "retry.kinds.error.max_failures (=0) is exhausted" in end.reason) == (State.FAILED, True)
    retry_decision = _died_of("lost", retry=retry, failures=3, failures_by_kind={"lost": 4})
    assert isinstance(retry_decision, Retry)
    assert (retry_decision.kind, retry_decision.after_s) == ("lost", 16.0)
    assert "failure 5 of 9 allowed of kind lost" in retry_decision.reason
    assert isinstance(_died_of("hung", retry=retry, failures=3), End)
    no_driver_retries = RetrySpec.model_validate({"kinds": {"driver": {"max_failures": 0}}})
    assert isinstance(decide(replace(RUNNING, observation=GONE, retry=no_driver_retries), DEADLINES), End)


def test_backoff_is_that_of_the_failure_kind_or_the_common_one() -> None:
    retry = RetrySpec.model_validate(
        {"backoff": {"first_s": 5.0, "factor": 3.0, "max_s": 100.0},
         "kinds": {"out_of_memory": {"backoff": {"first_s": 600.0, "factor": 1.0, "max_s": 600.0}}}}
    )  # fmt: skip
    waits = [_died_of("lost", retry=retry, failures=failures).after_s for failures in range(3)]
    assert waits == [5.0, 15.0, 45.0]
    assert _died_of("lost", retry=retry, failures=10**6, max_failures=2**53).after_s == 100.0
    decision = _died_of("out_of_memory", retry=retry, failures=2)
    assert (decision.after_s, "(out_of_memory), retrying in 600 s" in decision.reason) == (600.0, True)


@pytest.mark.parametrize(
    ("retry", "path"),
    [
        ({"backoff": {"first_s": 300.0}}, "backoff"),
        ({"kinds": {"lost": {"max_failures": 101}}}, "kinds.lost.max_failures"),
    ],
)
def test_retries_that_cannot_be_as_they_say_are_refused(retry: dict[str, Any], path: str) -> None:
    with pytest.raises(ValidationError) as failure:
        RetrySpec.model_validate(retry)
    assert [".".join(map(str, error["loc"])) for error in failure.value.errors()] == [path]
