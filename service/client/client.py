"""Python client of the control plane."""

import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from service.client.connection import ANSWER_TIMEOUT_S, ServiceConnection
from service.client.errors import Unreachable
from service.client.job import Job
from service.client.settings import ClientSettings
from service.client.stream import Patience
from service.client.sweep import Sweep
from service.client.uploads import Uploads
from service.client.webhooks import Webhooks

if TYPE_CHECKING:  # imported only by requests that need them, so that 'ls' is fast
    from moe.plan import Calibration, Plan
    from moe.spec import JobSpec

PAGE_SIZE = 200
CALIBRATION_TIMEOUT_S = 600.0
COPY_TIMEOUT_S = 3600.0
"""Longest wait for a submission that first copies a checkpoint."""
MODULE_TIMEOUT_S = 1800.0
"""Longest wait for a submission that first plans a user's module, after earlier ones."""
CHOICE_TIMEOUT_S = 1800.0
"""Longest wait for a plan by a goal or on pools, which is many plans."""


class Client:
    """Client of the control plane at `url`. `url` and `token` default to `SHARDYARD_URL` and `SHARDYARD_TOKEN`.
    Failures raise `ClientError`: `Unreachable`, or `ApiError` with the control plane's problems."""

    def __init__(self, url: str | None = None, token: str | None = None, *, patience: Patience = Patience()) -> None:
        settings = ClientSettings()
        self._connection = ServiceConnection(url or settings.url, settings.token if token is None else token)
        self._patience = patience

    @property
    def url(self) -> str:
        return self._connection.url

    def submit(self, spec: "JobSpec | dict[str, Any] | str | Path", idempotency_key: str | None = None) -> Job:
        """Submit a job from `spec` or from the YAML or JSON file it names. The same `idempotency_key` and spec give
        the same job; the default is a new key, with which the request is repeated if no response comes."""
        headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        body = _plain(spec)
        copies = isinstance(body, dict) and body.get("start_from")
        timeout_s = max(COPY_TIMEOUT_S if copies else 0.0, _planning_timeout_s(body))
        try:
            answer = self._connection.post("/v1/jobs", body, headers, timeout_s)
        except Unreachable as error:
            if error.is_refused:
                raise  # the request never arrived
            answer = self._connection.post("/v1/jobs", body, headers, timeout_s)
        return self._job(answer)

    def job(self, id: str) -> Job:
        """The job with this id. Raises ApiError (404) if there is none."""
        job = Job(self._connection, self._patience, {"id": id})
        return job.refresh()

    def jobs(
        self,
        state: str | Sequence[str] | None = None,
        label: str | Sequence[str] | None = None,
        limit: int | None = None,
    ) -> Iterator[Job]:
        """Jobs, newest first, in one of the states and with all labels (`key=value`, or `key`). Fetched in pages."""
        left, cursor = limit, None
        while left is None or left > 0:
            page_size = PAGE_SIZE if left is None else min(left, PAGE_SIZE)
            page = self._connection.get("/v1/jobs", state=state, label=label, limit=page_size, cursor=cursor)
            for item in page["items"][:left]:
                yield self._job(item)
            cursor = page.get("next_cursor")
            if not cursor:
                return
            left = None if left is None else left - len(page["items"])

    def count_jobs(self, state: str | Sequence[str] | None = None, label: str | Sequence[str] | None = None) -> int:
        """Number of jobs in one of the states and with all labels."""
        page = self._connection.get("/v1/jobs", state=state, label=label, limit=1, count=True)
        return int(page["total"])

    def submit_sweep(self, body: "dict[str, Any] | str | Path", idempotency_key: str | None = None) -> Sweep:
        """Submit a family of jobs: a job with `sweep`, or the YAML or JSON file with it. Keys as in `submit`."""
        headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        plain = _plain(body)
        try:
            answer = self._connection.post("/v1/sweeps", plain, headers, COPY_TIMEOUT_S)
        except Unreachable as error:
            if error.is_refused:
                raise  # the request never arrived
            answer = self._connection.post("/v1/sweeps", plain, headers, COPY_TIMEOUT_S)
        return Sweep(self._connection, answer)

    def sweep(self, id: str) -> Sweep:
        """The sweep with this id. Raises ApiError (404) if there is none."""
        return Sweep(self._connection, {"id": id}).refresh()

    def sweeps(self, limit: int = PAGE_SIZE) -> list[dict[str, Any]]:
        """Sweeps, newest first, without their members."""
        return list(self._connection.get("/v1/sweeps", limit=limit)["items"])

    def plan(self, spec: "JobSpec | dict[str, Any] | str | Path") -> "Plan":
        """Plan `spec` for the current cluster; nothing is stored or launched."""
        from moe.plan import Plan

        body = _plain(spec)
        return Plan.model_validate(self._connection.post("/v1/plans", body, timeout_s=_planning_timeout_s(body)))

    def calibrate(self) -> "Calibration":
        """Measure the cluster for future plans, in seconds to minutes. Raises ApiError (409) without free resources
        or during another measurement."""
        from moe.plan import Calibration

        answer = self._connection.post("/v1/cluster/calibration", timeout_s=CALIBRATION_TIMEOUT_S)
        return Calibration.model_validate(answer)

    def cluster(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """Nodes of the cluster, their calibration, and the resources that jobs hold."""
        facts: dict[str, Any] = self._connection.get("/v1/cluster", timeout_s)
        return facts

    def service(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """Version of the control plane, and where it keeps its state."""
        setup: dict[str, Any] = self._connection.get("/v1/service", timeout_s)
        return setup

    @property
    def webhooks(self) -> Webhooks:
        """Webhooks of the control plane."""
        return Webhooks(self._connection)

    @property
    def uploads(self) -> Uploads:
        """Files uploaded to the control plane."""
        return Uploads(self._connection, self._patience)

    def healthy(self) -> None:
        """Check that a control plane responds at the URL. Raises ClientError if not."""
        self._connection.get("/healthz")

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def _job(self, data: dict[str, Any]) -> Job:
        return Job(self._connection, self._patience, data)


def _planning_timeout_s(body: Any) -> float:
    """Longest time to plan the job of a request body."""
    spec = body.get("spec", body) if isinstance(body, dict) else None
    model = spec.get("model") if isinstance(spec, dict) else None
    is_module = isinstance(model, dict) and model.get("kind") == "module"
    if is_module:
        return MODULE_TIMEOUT_S
    cluster = body.get("cluster") if isinstance(body, dict) and "spec" in body else None
    in_pools = isinstance(cluster, dict) and "pools" in cluster
    has_goal = isinstance(body, dict) and body.get("goal") is not None
    return CHOICE_TIMEOUT_S if in_pools or has_goal else ANSWER_TIMEOUT_S


def _plain(spec: "JobSpec | dict[str, Any] | str | Path") -> Any:
    """Request body for a spec, which the control plane validates."""
    if isinstance(spec, dict):
        return spec
    from moe.spec import JobSpec
    from moe.spec.files import read_plain

    if isinstance(spec, JobSpec):
        return spec.model_dump(mode="json")
    return read_plain(spec)
