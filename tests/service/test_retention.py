"""Old jobs lose their log lines and states, but no metric; streams say which events are gone."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.client import ApiError, Client
from service.control.api.services import Services
from service.control.jobs.changes import set_state
from service.control.report.history import metric_history
from service.control.retention import retention
from service.control.retention.retention import Retention
from service.control.store.clock import now_us
from service.control.store.events import NewEvent, append_events, events_after
from service.control.store.jobs import JobRow
from service.wire.states import State
from tests.processes import DEADLINE_S, await_that
from tests.service.control_plane import ControlPlane
from tests.service.controllers import controller_on, stored_job, submit_job


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Any:
    services = controller_on(tmp_path_factory.mktemp("plane"))
    services.controller.step()
    yield services
    services.database.close()


def ended_job(services: Services, kinds: list[str]) -> JobRow:
    """A job with events of these kinds between its first state and its end."""
    job = submit_job(services, resources={"num_workers": 900})
    with services.database.write() as tx:
        events = [
            NewEvent(kind, now_us(), 1, "group-0", f'{{"step":{step}}}', step if kind == "metric" else None)
            for step, kind in enumerate(kinds)
        ]
        append_events(tx, job.number, events)
    services.requests.cancel(job.id, "tester")
    return stored_job(services, job.id)


def kept_events(services: Services, job: JobRow) -> list[tuple[int, str]]:
    with services.database.read() as tx:
        return [(row.id, row.kind) for row in events_after(tx, job.number, 0, 1000)]


def stream_ids(services: Services, job: JobRow, last_id: int) -> list[int]:
    async def follow() -> list[int]:
        return [event.id async for events in services.streams.follow(job, last_id) for event in events]

    return asyncio.run(asyncio.wait_for(follow(), DEADLINE_S))


def make_retention(services: Services, keep_days: float | None = 1e-9) -> Retention:
    return Retention(services.database, services.controller._lease, keep_days)


KINDS = st.lists(st.sampled_from(["log", "metric", "state", "checkpoint", "plan"]), max_size=20)


@pytest.mark.slow
@given(kinds=KINDS, steps=st.integers(0, 12), max_events=st.integers(1, 4))
def test_metrics_stay_and_streams_have_no_hole(
    services: Services, kinds: list[str], steps: int, max_events: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retention, "STEP_EVENTS", max_events)
        while make_retention(services).step():
            pass  # what earlier examples left
        job = ended_job(services, kinds)
        before = kept_events(services, job)
        history = metric_history(services.database, services.curves, job.number, None, 0, 100)
        for _ in range(steps):  # and then the controller dies, or has other things to do
            make_retention(services).step()
            thinned_job = stored_job(services, job.id)
            ids = stream_ids(services, thinned_job, thinned_job.first_event_id - 1)
            assert ids == list(range(thinned_job.first_event_id, thinned_job.last_event_id + 1))
            late_ids = stream_ids(services, job, 1)  # of a client that has event 1, and gets what is still kept
            assert late_ids == list(range(2, 2 + len(late_ids)))
            lost_kinds = [kind for id, kind in before if (id, kind) not in kept_events(services, job)]
            assert (
                lost_kinds == []
                or "log" not in {kind for _, kind in kept_events(services, job)}
                or set(lost_kinds) == {"log"}
            )
        while make_retention(services).step():
            pass
    thinned_job = stored_job(services, job.id)
    assert kept_events(services, job) == [
        (id, kind) for id, kind in before if kind in ("metric", "checkpoint") or id == thinned_job.last_event_id
    ]
    assert metric_history(services.database, services.curves, job.number, None, 0, 100) == history
    assert stream_ids(services, thinned_job, thinned_job.first_event_id - 1) == [thinned_job.last_event_id]


def test_for_ever_unless_it_is_set_and_only_what_ended_long_ago(services: Services) -> None:
    while make_retention(services).step():
        pass
    job = ended_job(services, ["log", "log"])
    assert not make_retention(services, None).step()
    assert not make_retention(services, 1.0).step()
    with services.database.write() as tx:  # resumed after the decision
        set_state(tx, job, State.QUEUED, "resumed", "test")
    make_retention(services)._thin(job)
    assert stored_job(services, job.id).first_event_id == 1
    assert not make_retention(services).step()
    assert len(kept_events(services, job)) == 5


def test_a_stream_that_asks_for_what_is_no_longer_kept_gets_410(own_plane: ControlPlane) -> None:
    job_id = own_plane.start().finished_job()["id"]
    own_plane.terminate()
    own_plane.start(keep_jobs_days=1e-9)  # it looks for old jobs at once, and then each minute
    await_that(lambda: own_plane.job(job_id)["first_event_id"] > 1)
    job = own_plane.job(job_id)
    assert job["first_event_id"] == job["last_event_id"]
    for query in ({"headers": {"last-event-id": "3"}}, {"params": {"last_event_id": 3}}):
        answer = own_plane.http.get(f"/v1/jobs/{job_id}/events", **query)
        assert answer.status_code == 410
        assert answer.json()["detail"].startswith(f"events of {job_id} before {job['first_event_id']} are no longer")
    with Client(own_plane.url) as client:
        client_job = client.job(job_id)
        with pytest.raises(ApiError, match=r"events of .* are no longer kept") as error:
            list(client_job.events(last_id=3))
        assert error.value.status == 410
        events = list(client_job.events())
        assert [event.data["state"] for event in events] == ["succeeded"]
        assert list(client_job.events(last_id=events[0].id - 1)) == events
        assert [point["step"] for point in client_job.metrics()] == [1, 2, 3, 4, 5]
