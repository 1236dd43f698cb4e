"""One job as a client sees it."""

import time
from collections.abc import Callable, Collection, Generator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from service.client.connection import ServiceConnection
from service.client.errors import ApiError, ClientError, Unreachable
from service.client.stream import Patience, follow
from service.wire.states import OVER, STUCK

if TYPE_CHECKING:
    from moe.plan import Plan
    from moe.records import Ending
    from service.client.download import Download
    from service.wire.events import Event

POLL_INTERVAL_S = 0.5
METRICS_PAGE_SIZE = 10_000


class Job:
    """A job at a control plane: what was last heard of it, and what can be asked of it."""

    def __init__(self, connection: ServiceConnection, patience: Patience, data: dict[str, Any]) -> None:
        self._connection, self._patience, self._data = connection, patience, data

    @property
    def data(self) -> dict[str, Any]:
        """All that `GET /v1/jobs/{id}` said when this job was last refreshed."""
        return self._data

    @property
    def id(self) -> str:
        return str(self._data["id"])

    @property
    def name(self) -> str:
        return str(self._data["name"])

    @property
    def state(self) -> str:
        return str(self._data["state"])

    @property
    def reason(self) -> str:
        return str(self._data.get("reason") or "")

    @property
    def step(self) -> int:
        return int(self._data.get("step") or 0)

    @property
    def attempt(self) -> int:
        """Number of the newest attempt, counted from 1; 0 before the first."""
        return int(self._data.get("attempt") or 0)

    @property
    def num_steps(self) -> int:
        return int(self._data.get("num_steps") or 0)

    @property
    def storage(self) -> str:
        return str(self._data["storage"])

    @property
    def ended(self) -> bool:
        """Whether it goes on no more, unless somebody resumes it."""
        return self.state in OVER

    @property
    def report(self) -> dict[str, Any] | None:
        """Measurements of the finished model on the held-out sets; None before that."""
        report = (self._data.get("result") or {}).get("report")
        return report if isinstance(report, dict) else None

    def refresh(self) -> "Job":
        """This job, with what the control plane says now."""
        self._data = self._connection.get(self._path())
        return self

    def run_status(self) -> dict[str, Any] | None:
        """Last status of each rank of the running attempt, with its age now; None if the control plane has none."""
        run = self._connection.get(self._path()).get("run")
        return run if isinstance(run, dict) else None

    def events(
        self,
        last_id: int | None = None,
        on_lost: Callable[[ClientError], None] | None = None,
        *,
        redone: bool = False,
    ) -> "Generator[Event]":
        """Every event after `last_id` (from the first that is kept when left out), live, until the job has ended.

        Connections that break are opened again where they broke off: no event is lost or doubled. Raises ApiError
        (410) where events after `last_id` are no longer kept; `events()` then starts over with what there is.

        Of each step the metric that is given last is the newest: one of an older attempt that comes after it is left
        out, unless `redone`. What else an older attempt recorded and comes late is marked `superseded`: of the metrics
        without that mark, the last is the newest of all.
        """
        with closing(follow(self._connection, self.id, last_id or 0, self._patience, on_lost)) as events:
            for event in events:
                if redone or event.superseded != "step":
                    yield event

    def wait(self, timeout_s: float | None = None) -> "Job":
        """This job, once it has ended. Raises TimeoutError; rides out a control plane that restarts."""
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
        """Records of each step, in order; the newest where steps were redone.

        With `name` only that value. With `max_points` (at most 10,000) a longer run is thinned evenly to so many.
        """
        limit = METRICS_PAGE_SIZE if max_points is None else None
        return self._all_pages(
            "/metrics", name=name, since_step=since_step, max_points=max_points, limit=limit
        )

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

        Of those `since` a time or so long ago (`10m`), that contain the text `grep`, of one `worker` or `attempt`, the
        newest `tail` in order of time. With `follow`, it goes on until the job has ended, over as many connections as
        it takes. Escape codes and other controls are left out of messages, unless they are asked for `raw`.
        """
        from service.client.log_lines import LogQuery, log_lines

        query = LogQuery(tail, since, grep, worker, attempt, raw or None)
        return log_lines(self._connection, self.id, follow, self._patience, query)

    def checkpoints(self) -> list[dict[str, Any]]:
        """Committed checkpoints, oldest first."""
        return self._all_pages("/checkpoints")

    def plan(self) -> "Plan":
        """Layout of this job."""
        from moe.plan import Plan

        return Plan.model_validate(self._connection.get(self._path("/plan")))

    def download(
        self, folder: str | Path, kinds: Collection[str] | None = None, latest: bool = False
    ) -> "Download":
        """Fetches the job's files through the API, as they lie on its storage: `spec`, `result`, `checkpoints`, `logs`,
        or only some kinds; of checkpoints only the newest with `latest`. They go into a folder of the job's id in
        `folder`, so that jobs are kept apart.

        A file has its name only when it is whole and, of a checkpoint, has the checksum of its marker. Called again,
        it goes on where it was broken off. Raises ClientError.
        """
        from service.client.download import Downloader

        if self.id in ("", ".", "..") or "/" in self.id or "\\" in self.id:
            raise ClientError(f"the control plane names the job {self.id!r}, which is no name of a folder")
        return Downloader(self._connection, self._path(), Path(folder, self.id)).fetch_all(kinds, latest)

    def generate(self, prompt: str, **options: Any) -> "Generator[str, None, Ending]":
        """Continuation of a text by the newest checkpoint of a language model's job, in pieces as it is made; at
        last how it ended. `options` are fields of `GenerationSpec`: `max_tokens`, `temperature`, `stop` and others.

        Raises ApiError: (422) for a job that is not of a language model and for what cannot be asked, (409) without a
        checkpoint, (503) where others' turns come first or the text takes longer than it may.
        """
        from service.client.generated import stream_generation

        return stream_generation(self._connection, self.id, {**options, "prompt": prompt})

    def cancel(self) -> "Job":
        """Asks for the end of the job, at a step boundary. Raises ApiError (409) when it has ended."""
        return self._ask("/cancel")

    def pause(self) -> "Job":
        """Asks for a checkpoint and the release of the workers; `resume` goes on from there."""
        return self._ask("/pause")

    def resume(self) -> "Job":
        """Queues a paused, failed or cancelled job again; it goes on from its last committed checkpoint. Raises
        ApiError (409) where a job that failed or was cancelled has none."""
        return self._ask("/resume")

    def move(self, to: Literal["first", "last"]) -> "Job":
        """Moves a job that waits in the queue to its front or its end. Raises ApiError (409) for one that does not."""
        return self._ask(f"/move?to={to}")

    def delete(self) -> dict[str, Any]:
        """Deletes the job with all that it made, once it has ended or is paused; who asked for that, and when.

        Waits until all is gone. Raises ApiError (409) for a job that may still run, ClientError when something cannot
        be removed, with the reason: the control plane goes on trying.
        """
        self._connection.delete(self._path())
        while True:
            try:
                self.refresh()
            except ApiError as error:
                if error.status != 410:
                    raise
                return dict(self._connection.delete(self._path()))  # the record of it
            if self.reason.startswith(STUCK):
                raise ClientError(f"{self.id} {self.reason}")
            time.sleep(POLL_INTERVAL_S)

    def __repr__(self) -> str:
        return f"Job({self.id!r}, {self._data.get('state', 'unknown')})"

    def _ask(self, action: str) -> "Job":
        self._connection.post(self._path(action))
        return self.refresh()

    def _path(self, part: str = "") -> str:
        return f"/v1/jobs/{quote(self.id, safe='')}{part}"

    def _all_pages(self, part: str, **query: Any) -> list[dict[str, Any]]:
        items, cursor = list[dict[str, Any]](), None
        while True:
            page = self._connection.get(self._path(part), cursor=cursor, **query)
            items += page["items"]
            cursor = page.get("next_cursor")
            if not cursor:
                return items
