"""A job as seen by a client."""

import time
from collections.abc import Callable, Collection, Generator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from service.client.connection import ServiceConnection
from service.client.errors import ClientError, Unreachable
from service.client.resource import POLL_INTERVAL_S, Resource
from service.client.stream import Patience, follow
from service.wire.states import OVER

if TYPE_CHECKING:
    from moe.plan import Plan
    from moe.records import Ending
    from service.client.download import Download
    from service.wire.events import Event
    from service.wire.verification import CheckpointVerification

METRICS_PAGE_SIZE = 10_000
VERIFICATION_TIMEOUT_S = 6 * 3600.0
"""Enough to read terabytes."""


class Job(Resource):
    """A job at a control plane, with its last known data."""

    collection = "/v1/jobs"

    def __init__(self, connection: ServiceConnection, patience: Patience, data: dict[str, Any]) -> None:
        super().__init__(connection, data)
        self._patience = patience

    @property
    def step(self) -> int:
        return int(self._data.get("step") or 0)

    @property
    def attempt(self) -> int:
        """Newest attempt, from 1; 0 before the first."""
        return int(self._data.get("attempt") or 0)

    @property
    def num_steps(self) -> int:
        return int(self._data.get("num_steps") or 0)

    @property
    def storage(self) -> str:
        return str(self._data["storage"])

    @property
    def ended(self) -> bool:
        """Whether it has ended, or is being deleted."""
        return self.state in OVER

    @property
    def report(self) -> dict[str, Any] | None:
        """Evaluation of the finished model on the held-out sets; None before that."""
        report = (self._data.get("result") or {}).get("report")
        return report if isinstance(report, dict) else None

    def run_status(self) -> dict[str, Any] | None:
        """Last status of each rank of the running attempt, with its age; None if unknown."""
        run = self._connection.get(self._path()).get("run")
        return run if isinstance(run, dict) else None

    def events(
        self, last_id: int | None = None, on_lost: Callable[[ClientError], None] | None = None, *, redone: bool = False
    ) -> "Generator[Event]":
        """Every event after `last_id` (default: from the first kept one), live, until the job has ended. Survives
        broken connections without lost or duplicate events. Raises ApiError (410) if events after `last_id` are no
        longer kept; `events()` starts over.

        The last metric yielded for a step is the newest: late ones of older attempts are skipped, unless `redone`.
        Other late metrics are marked `superseded`: the last unmarked metric is the newest of all.
        """
        with closing(follow(self._connection, self.id, last_id or 0, self._patience, on_lost)) as events:
            for event in events:
                if redone or event.superseded != "step":
                    yield event

    def wait(self, timeout_s: float | None = None) -> "Job":
        """Wait until the job has ended, and return it. Raises TimeoutError; survives restarts of the control plane."""
        start_s = heard_s = time.monotonic()
        while True:
            try:
                if self.refresh().ended:
                    return self
                heard_s = time.monotonic()
            except Unreachable:
                if time.monotonic() - heard_s > self._patience.away_s:
                    raise
            if timeout_s is not None and time.monotonic() - start_s > timeout_s:
                raise TimeoutError(f"{self.id} is still {self.state} after {timeout_s:g} s")
            time.sleep(POLL_INTERVAL_S)

    def metrics(
        self, name: str | None = None, since_step: int | None = None, max_points: int | None = None
    ) -> list[dict[str, Any]]:
        """Records of each step, in order; the newest of repeated steps. `name`: only this value. `max_points` (at
        most 10,000): thinned evenly; a number of one `name` including its extremes."""
        limit = METRICS_PAGE_SIZE if max_points is None else None
        return self._all_pages("/metrics", name=name, since_step=since_step, max_points=max_points, limit=limit)

    def logs(
        self,
        follow: bool = False,
        *,
        tail: int | None = None,
        since: str | None = None,
        grep: str | None = None,
        worker: str | None = None,
        attempt: int | None = None,
        raw: bool = False,
    ) -> Generator[dict[str, Any]]:
        """Log lines of the driver and all workers: `attempt`, `worker`, `message`, `time`.

        Filters: `since` a time or duration ago (`10m`), literal text `grep`, `worker`, `attempt`, the newest `tail`.
        With `follow`, continues until the job has ended. Control characters are removed, unless `raw`.
        """
        from service.client.log_lines import LogQuery, log_lines

        query = LogQuery(tail, since, grep, worker, attempt, raw or None)
        return log_lines(self._connection, self.id, follow, self._patience, query)

    def checkpoints(self) -> list[dict[str, Any]]:
        """Committed checkpoints, oldest first."""
        return self._all_pages("/checkpoints")

    def verify_checkpoint(self, checkpoint: int | str) -> "CheckpointVerification":
        """Compare the files of a checkpoint, by step or name, with its marker's sizes and checksums. The control plane
        reads all of them first. Raises ApiError (404) for one that is not committed, or is removed meanwhile."""
        from service.wire.verification import CheckpointVerification

        path = self._path(f"/checkpoints/{quote(str(checkpoint), safe='')}/verification")
        return CheckpointVerification.read(self._connection.post(path, timeout_s=VERIFICATION_TIMEOUT_S))

    def plan(self) -> "Plan":
        """Plan of this job."""
        from moe.plan import Plan

        return Plan.model_validate(self._connection.get(self._path("/plan")))

    def download(self, folder: str | Path, kinds: Collection[str] | None = None, latest: bool = False) -> "Download":
        """Download the job's files of the `kinds` `spec`, `result`, `checkpoints`, `logs` to `folder`/<job id>; with
        `latest`, only the newest checkpoint.

        A file gets its name when it is complete and matches its marker's checksum. Calling again continues an
        interrupted download. Raises ClientError.
        """
        from service.client.download import Downloader

        if self.id in ("", ".", "..") or "/" in self.id or "\\" in self.id:
            raise ClientError(f"the control plane sent the job id {self.id!r}, which is not a folder name")
        downloader = Downloader(self._connection, self._path(), Path(folder, self.id), patience=self._patience)
        return downloader.fetch_all(kinds, latest)

    def generate(self, prompt: str, **options: Any) -> "Generator[str, None, Ending]":
        """Continue `prompt` with a language model's newest checkpoint: yields pieces of text, returns the ending.
        `options`: fields of `GenerationSpec`, such as `max_tokens`, `temperature`, `stop`.

        Raises ApiError: 422 for another kind of model or invalid options, 409 without a checkpoint, 503 if the turn
        or the text takes too long.
        """
        from service.client.generated import stream_generation

        return stream_generation(self._connection, self.id, {**options, "prompt": prompt})

    def cancel(self) -> "Job":
        """Request the job's end at a step boundary. Raises ApiError (409) if it has ended."""
        return self._ask("/cancel")

    def pause(self) -> "Job":
        """Request a checkpoint and the release of the workers."""
        return self._ask("/pause")

    def resume(self) -> "Job":
        """Queue a paused, failed or cancelled job again, to continue from its last checkpoint. Raises ApiError (409)
        if a failed or cancelled job has none."""
        return self._ask("/resume")

    def move(self, to: Literal["first", "last"]) -> "Job":
        """Move a queued job to the front or end of the queue. Raises ApiError (409) if not queued."""
        return self._ask(f"/move?to={to}")

    def delete(self) -> dict[str, Any]:
        """Delete an ended or paused job with all its files, and wait until done; returns the deletion's record.
        Raises ApiError (409) for a job that may still run, ClientError if something cannot be removed (the control
        plane retries)."""
        self._delete()
        return dict(self._connection.delete(self._path()))  # the record of it

    def _ask(self, action: str) -> "Job":
        self._connection.post(self._path(action))
        return self.refresh()

    def _all_pages(self, part: str, **query: Any) -> list[dict[str, Any]]:
        items, cursor = list[dict[str, Any]](), None
        while True:
            page = self._connection.get(self._path(part), cursor=cursor, **query)
            items += page["items"]
            cursor = page.get("next_cursor")
            if not cursor:
                return items
