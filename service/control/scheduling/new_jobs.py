"""New jobs: checks and plans them, writes their folders, and stores them within the caller's transaction."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection

from moe.plan.plan_file import with_spec
from moe.spec import JobSpec, Problem, SpecError, spec_error
from moe.storage.folder import Folder
from moe.storage.store_errors import is_temporary
from service.control.errors import Full, Unavailable
from service.control.jobs.changes import record_new_job, warn
from service.control.jobs.roots import StorageRoots
from service.control.report.event_text import WireEvent
from service.control.report.saves import saves_of_copy
from service.control.retention.draft_folder import DraftFolder
from service.control.retention.full_roots import FullRoots
from service.control.scheduling.job_plans import JobPlans, PlanForecast
from service.control.scheduling.warm_starts import WarmStarts
from service.control.store.clock import now_us
from service.control.store.database import REMEDY, Database, is_full
from service.control.store.drafts import finish_draft
from service.control.store.jobs import JobRow, insert_job
from service.control.store.tracked_runs import insert_tracked_runs
from service.control.store.webhooks import list_webhooks
from service.control.uploads.uploads import Uploads
from service.wire.states import State


@dataclass(frozen=True)
class CheckedJob:
    """A valid job that is not stored yet; nothing of it exists."""

    id: str
    owner: str
    spec: JobSpec
    spec_text: str
    storage: str
    """fsspec URL of its folder."""
    warnings: tuple[str, ...]
    forecast: PlanForecast


@dataclass
class DraftJob:
    """A checked job with its folder, which is removed unless the job is stored."""

    job: CheckedJob
    values: dict[str, Any] = field(default_factory=dict)
    """Columns of its row."""
    is_stored: bool = False


class NewJobs:
    """Checks, drafts and stores jobs."""

    def __init__(
        self, database: Database, roots: StorageRoots, plans: JobPlans, full_roots: FullRoots,
        warm_starts: WarmStarts, uploads: Uploads,
    ) -> None:  # fmt: skip
        self._database, self._roots, self._plans, self._uploads = database, roots, plans, uploads
        self._full_roots, self._warm_starts = full_roots, warm_starts

    def check(
        self, spec: JobSpec, job_id: str, owner: str, forecasts: dict[str, PlanForecast] | None = None
    ) -> CheckedJob:
        """Check and plan a job. `forecasts` caches the plans of jobs checked before: jobs that differ only in fields
        that planning does not read share one. Raises SpecError for a job that could not run anywhere, Unavailable."""
        storage = self._roots.job_folder(spec.storage, job_id)
        warnings = tuple(self._plans.check(spec))
        self._check_webhooks(spec)
        if spec.start_from is not None:
            self._warm_starts.look_up(spec, owner)
        forecast = self._forecast(spec, {} if forecasts is None else forecasts)
        return CheckedJob(job_id, owner, spec, spec.model_dump_json(), storage, warnings, forecast)

    def _forecast(self, spec: JobSpec, forecasts: dict[str, PlanForecast]) -> PlanForecast:
        key = _planning_key(spec)
        if (forecast := forecasts.get(key)) is None:
            forecasts[key] = forecast = self._plans.forecast(spec)
        return forecast if forecast.plan is None else replace(forecast, plan=with_spec(forecast.plan, spec))

    @contextmanager
    def draft(self, job: CheckedJob) -> Iterator[DraftJob]:
        """Write the job's folder, with the checkpoint it starts from; removed on exit unless the job is stored.
        Raises SpecError, Full, Unavailable."""
        time_us, spec, spec_text = now_us(), job.spec, job.spec_text
        folder = DraftFolder(self._database, self._roots, job.id, job.storage)
        folder.note(time_us)
        draft = DraftJob(job)
        try:
            self._put_spec(job.storage, spec_text, spec.storage, folder.mark_created)
            forecast = job.forecast
            draft.values = {
                "id": job.id, "owner": job.owner, "name": spec.name, "spec": spec_text, "storage": job.storage,
                "plan": forecast.plan and forecast.plan.model_dump_json(), "unfit_for": forecast.unfit_for,
                "unreachable_since": forecast.unreachable_since, "state": State.QUEUED, "reason": forecast.reason,
                "num_steps": spec.train.num_steps, "created_at": time_us, "updated_at": time_us, "queued_at": time_us,
            }  # fmt: skip
            if spec.start_from is not None:
                marker = self._warm_starts.copy(spec, job.owner, job.storage)
                draft.values["step"] = marker.step
                draft.values["saves"] = saves_of_copy(marker, datetime.now(UTC)).model_dump_json()
                draft.values["reason"] = (
                    f"starts from step {marker.step} of {spec.start_from.job}; {draft.values['reason']}"
                )
            yield draft
        finally:
            if not draft.is_stored:
                folder.give_up()

    def write(self, draft: DraftJob, write: Callable[[Folder], None]) -> None:
        """Write a further file into a draft's folder. Raises Unavailable."""
        try:
            write(self._roots.folder(draft.job.storage))
        except OSError as error:
            raise Unavailable(
                f"cannot write the job's storage {draft.job.storage} ({error}); try again later"
            ) from None

    def store(
        self, tx: Connection, draft: DraftJob, actor: str, values: Mapping[str, Any] = {}
    ) -> tuple[JobRow, list[WireEvent]]:
        """Insert the job with its first events; `values` replace columns. Raises Unavailable if its folder was removed
        meanwhile, and Conflict if an upload that it names was removed. The caller sets `is_stored` after the commit."""
        job = draft.job
        if not finish_draft(tx, job.id):
            raise Unavailable("copying took too long and was cancelled; repeat the request")
        self._uploads.require_present(tx, job.spec_text)
        row = insert_job(tx, {**draft.values, **values}, job.spec.labels)
        insert_tracked_runs(tx, row.number, [tracker for tracker, _ in job.spec.track.trackers()])
        return row, [*record_new_job(tx, row, actor), *warn(tx, row, job.warnings, actor)]

    def _check_webhooks(self, spec: JobSpec) -> None:
        """Raises SpecError for names in `notify` that no webhook has."""
        if not spec.notify:
            return
        with self._database.read() as tx:
            names = [row.name for row in list_webhooks(tx)]
        remedy = f"use {', '.join(names)}" if names else "add it first: shardyard webhooks add"
        problems = [
            Problem("not_found", f"notify[{index}]", name, "is not the name of a webhook of this service", remedy)
            for index, name in enumerate(spec.notify)
            if name not in names
        ]
        if problems:
            raise SpecError(problems)

    def _put_spec(
        self, storage: str, spec_text: str, requested_storage: str | None, on_created: Callable[[], None]
    ) -> None:
        try:
            _write_spec(self._roots, storage, spec_text, requested_storage, on_created)
        except Full as error:
            self._full_roots.record_refusal(storage, error, len(spec_text))
            raise
        self._full_roots.record_write(storage, len(spec_text))


_NOT_PLANNED = {"seed", "schedule", "label_smoothing"}
_NOT_PLANNED_OF_OPTIMIZER = {"peak_lr", "weight_decay", "beta1", "beta2", "eps", "momentum"}
"""Fields of `train` and of its optimizer that change neither a plan nor its predictions."""


def _planning_key(spec: JobSpec) -> str:
    """JSON of all fields that planning may read."""
    return spec.model_dump_json(exclude={
        "name": True, "labels": True, "storage": True,
        "train": {**dict.fromkeys(_NOT_PLANNED, True), "optimizer": _NOT_PLANNED_OF_OPTIMIZER},
    })  # fmt: skip


def digest_of(body: Any) -> str:
    """Fingerprint of a request body, to recognize a repeated request."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _write_spec(
    roots: StorageRoots,
    storage: str,
    spec_text: str,
    requested_storage: str | None,
    on_created: Callable[[], None] = lambda: None,
) -> None:
    """Write the spec, which shows that storage is writable; calls `on_created` once its folder exists. Raises
    SpecError, Full."""
    try:
        folder = roots.folder(storage)
        folder.make()
        on_created()
        folder.write("spec.json", json.dumps(json.loads(spec_text), indent=2).encode())
    except (OSError, ValueError, ImportError) as error:
        cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, OSError) and is_full(error):
            raise Full(
                f"no space left in the job's storage ({cause}: {storage}); free some with 'shardyard delete'; {REMEDY}"
            ) from None
        if isinstance(error, OSError) and is_temporary(error):
            raise Unavailable(f"cannot write the job's storage {storage} ({cause}); try again later") from None
        remedy = "choose a folder that the service can write, or ask its operator"
        raise spec_error(
            "not_writable", "storage", requested_storage or storage, f"cannot be written: {cause}", remedy
        ) from None
