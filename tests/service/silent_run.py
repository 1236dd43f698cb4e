"""A run that reports nothing by itself; a test sends records in its place."""

import json
from pathlib import Path
from typing import Any

import httpx

from tests.processes import await_that
from tests.service.control_plane import ControlPlane
from tests.service.local_launcher import launches

TIME = "2026-01-31T12:00:00+01:00"


class Run:
    """A job whose driver is up and quiet; the test sends records in its place."""

    def __init__(self, plane: ControlPlane, **changes: Any) -> None:
        self.plane = plane
        plane.hold()
        job = plane.post(labels={"hold": "hold", "quiet": "yes"}, **changes)
        self.id, self.storage = job["id"], Path(job["storage"])
        await_that(lambda: plane.launcher.process(f"{self.id}-a1") is not None)
        self.token = self.launch(1)["token"]

    def launch(self, attempt: int) -> dict[str, Any]:
        return dict(json.loads(launches(self.storage, attempt)[0].read_text()))

    def send(
        self,
        first_seq: int,
        *records: dict[str, Any],
        writer: str = "group-0",
        attempt: int = 1,
        token: str = "",
        run: dict[str, Any] | None = None,
    ) -> httpx.Response:
        return self.plane.http.post(
            f"/internal/v1/jobs/{self.id}/records",
            json={"attempt": attempt, "writer": writer, "first_seq": first_seq, "records": records, "run": run},
            headers={"authorization": f"Bearer {token or self.token}"},
        )

    def seal(self, writer: str, *records: dict[str, Any], segment: int = 0, first_seq: int = 0) -> None:
        """Puts records on storage as a writer's segment."""
        folder = self.storage / "metrics" / writer
        folder.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"seq": seq, **record}) + "\n" for seq, record in enumerate(records, first_seq))
        (folder / f"segment-{segment:08d}.jsonl").write_text("".join(lines))

    def kill_driver(self, attempt: int = 1) -> None:
        """Kills an attempt's driver, and waits for the launch of the next."""
        await_that(lambda: self.plane.launcher.process(f"{self.id}-a{attempt}") is not None)
        self.plane.driver(self.id, attempt).kill()
        await_that(lambda: launches(self.storage, attempt + 1) != [])

    def steps(self) -> list[int]:
        """Steps of all metric events, as stored."""
        return [point["step"] for point in self.plane.metrics(self.id)]

    def num_events(self) -> int:
        return int(self.plane.job(self.id)["last_event_id"])

    def end(self) -> dict[str, Any]:
        self.plane.http.post(f"/v1/jobs/{self.id}/cancel")
        return self.plane.await_state(self.id, "cancelled")


def record(kind: str, time: str = TIME, /, **data: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time, "data": data}


def metric(step: int, **values: Any) -> dict[str, Any]:
    return record("metric", step=step, **{"loss": 1.0, **values})


def checkpoint(step: int, time: str = TIME) -> dict[str, Any]:
    return record("checkpoint", time, step=step)
