"""A job whose storage is removed while it runs says so, and can be recovered afterwards."""

import shutil
from pathlib import Path

import pytest

from moe.spec import JobSpec
from service.control.jobs.roots import StorageRoots
from service.control.jobs.stored_jobs import read_stored_job
from service.control.scheduling import spec_keeper
from service.control.store.events import events_after
from tests.processes import await_that
from tests.service.control_plane import NODE, spec
from tests.service.local_launcher import LocalLauncher
from tests.service.test_crashes import controller_on


def test_a_removed_spec_is_written_again_and_the_job_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_keeper, "LOOK_S", 0.0)
    cluster = LocalLauncher(tmp_path / "cluster")
    cluster.set_nodes(NODE)
    services = controller_on(tmp_path, cluster)
    try:
        job = services.requests.submit(JobSpec.parse(spec(labels={"silent": "yes", "step_ms": "60000"})), "me")[0]
        await_that(lambda: services.controller.step() and cluster.process(f"{job.id}-a1") is not None)
        shutil.rmtree(job.storage)

        def told() -> list[str]:
            services.controller.step()
            with services.database.read() as tx:
                events = events_after(tx, job.number, 0, 1000)
            return [event.data for event in events if event.kind == "log" and job.storage in event.data]

        await_that(lambda: bool(told()))
        assert len(told()) == 1
        assert read_stored_job(StorageRoots([str(Path(job.storage).parent)]), job.storage).spec.name == "small"
    finally:
        cluster.end_all()
        services.database.close()
