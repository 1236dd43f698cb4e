"""The lease: a control plane that was slow or stopped changes no cluster by decisions of before another one acted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.control.api.services import Services
from service.control.jobs import lease as lease_module
from service.control.jobs.lease import Lease, LeaseLost
from service.control.launcher.launcher import Observation
from service.control.report.hub import Hub
from service.control.store.database import Database
from tests.service.control_plane import NODE
from tests.service.controllers import controller_on, stored_job, submit_job
from tests.service.local_launcher import LocalLauncher

LEASE_S = 5.0


class Clock:
    """Time of the leases, which a test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._time_us = 1_700_000_000_000_000
        monkeypatch.setattr(lease_module, "now_us", lambda: self._time_us)

    def advance(self, seconds: float) -> None:
        self._time_us += int(seconds * 1e6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'shardyard.db'}")
    database.migrate()
    yield database
    database.close()


def lease(database: Database, holder: str) -> Lease:
    return Lease(database, Hub(), holder, LEASE_S)


def test_a_long_step_keeps_the_lease_that_it_renews(database: Database, clock: Clock) -> None:
    first, second = lease(database, "first"), lease(database, "second")
    assert first.take()
    for _ in range(5):
        clock.advance(LEASE_S * 0.6)
        first.require()
        assert not second.take()


def test_a_lease_that_ran_out_unnoticed_is_renewed(database: Database, clock: Clock) -> None:
    first, second = lease(database, "first"), lease(database, "second")
    assert first.take()
    clock.advance(LEASE_S * 100)
    first.require()
    assert not second.take()


@pytest.mark.parametrize("ends", ["holds", "expired"])
def test_decisions_of_before_anothers_lease_are_void(database: Database, clock: Clock, ends: str) -> None:
    """Also once the other one is gone, too: it may have decided differently."""
    first, second = lease(database, "first"), lease(database, "second")
    assert first.take()
    clock.advance(LEASE_S * 2)
    assert second.take()
    if ends == "expired":
        clock.advance(LEASE_S * 2)
    for _ in range(2):
        with pytest.raises(LeaseLost):
            first.require()
    assert not first.is_held
    assert first.take() == (ends == "expired"), "with another step, which decides anew"


class Slow(LocalLauncher):
    """A cluster that answers so late that another control plane has taken over."""

    rival: Lease | None = None

    def observe(self, submission_id: str) -> Observation:
        observation = super().observe(submission_id)
        if self.rival is not None:
            self.rival.take()
        return observation


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Slow]:
    cluster = Slow(tmp_path / "cluster")
    yield cluster
    cluster.end_all()


def test_a_controller_that_was_overtaken_launches_and_stops_nothing(tmp_path: Path, cluster: Slow) -> None:
    cluster.set_nodes(NODE)
    services: Services = controller_on(tmp_path, cluster, lease_s=0.001, cancel_deadline_s=0.001)
    other = Database(services.settings.database_url)
    rival = Lease(other, Hub(), "rival", 0.001)
    try:
        job_id = submit_job(services, labels={"silent": "yes", "step_ms": "100000"}).id
        cluster.rival = rival
        for _ in range(3):
            services.controller.step()  # which admits it, and learns that it may not launch it
            assert cluster.launches() == []
        cluster.rival = None
        services.controller.step()
        assert cluster.launches() == [f"{job_id}-a1"]
        services.controller.step()
        services.requests.cancel(job_id, "tester")
        cluster.rival = rival
        for _ in range(3):
            services.controller.step()
        assert cluster.process(f"{job_id}-a1") is not None, "its driver was not killed"
        assert stored_job(services, job_id).stopped_at is None
    finally:
        other.close()
        services.database.close()
