"""`submit`, `ls`, `show`, `logs`, `checkpoints`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.options import AsJson, JobId, Url

if TYPE_CHECKING:
    from moe.records import PreparationRecord
    from service.client import Client, Job

DEFAULT_ROWS = 20
EVENTS_LOOKED_AT = 20
"""Newest events that `show` searches for data preparation."""


def submit(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", show_default=False, help="A job file, YAML or JSON; - for standard input."),
    ] = None,
    like: Annotated[
        str | None, typer.Option(metavar="JOB", help="Instead of FILE: submit the spec of this job again.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="PATH=VALUE", help="Override a field, as train.num_steps=4000; repeat for several."
        ),
    ] = None,
    from_step: Annotated[
        str | None,
        typer.Option(
            metavar="STEP",
            help=("With --like: start from that job's checkpoint of this step, or 'newest'. [from scratch]"),
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow the job until it ends.")] = False,
    idempotency_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Idempotency key: the same key and file create only one job.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Submit the job in FILE, or one like an earlier job.

    A checkpoint to start from is copied before this returns.
    """
    from service.cli.overrides import apply_overrides, fork_spec
    from service.cli.server import connect
    from service.cli.view.output import print_json

    with connect(url) as client:
        job_fields = _requested_spec(client, file, like, from_step)
        spec = (apply_overrides if like is None else fork_spec)(job_fields, set_ or [])
        job = client.submit(spec, idempotency_key)
        if watch:
            from service.cli.commands.watch import follow

            if not as_json:
                print(f"submitted {job.id}")
            raise typer.Exit(follow(client, job, as_json))
        if as_json:
            print_json(job.data)
            return
        print(job.id)
        if like is not None and not job.data["spec"].get("start_from"):
            typer.echo(f"starts from scratch; --from-step newest starts from the last checkpoint of {like}", err=True)
        typer.echo(f"follow it with 'shardyard watch {job.id}'", err=True)


def _requested_spec(client: "Client", file: Path | None, like: str | None, from_step: str | None) -> "dict[str, Any]":
    """The plain spec of FILE or another job, starting from `--from-step`."""
    from service.cli.failures import Misuse
    from service.cli.job_file import plain_job
    from service.cli.server import find_job

    if (file is None) == (like is None):
        raise Misuse("give either FILE or --like JOB")
    if file is not None:
        if from_step is not None:
            raise Misuse("--from-step requires --like JOB; with a file, use --set start_from.job=JOB")
        return plain_job(file)
    assert like is not None
    spec = dict(find_job(client, like).data["spec"])
    if from_step is None:
        return spec
    if from_step != "newest" and not (from_step.isascii() and from_step.isdecimal()):
        raise Misuse(f"--from-step (={from_step!r}) must be a step or 'newest'")
    return spec | {"start_from": {"job": like, "step": None if from_step == "newest" else int(from_step)}}


def ls(
    state: Annotated[str | None, typer.Option(metavar="STATE", help="Only jobs in this state.")] = None,
    label: Annotated[str | None, typer.Option(metavar="KEY=VALUE", help="Only jobs with this label.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of jobs.")] = DEFAULT_ROWS,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    from service.cli.server import connect
    from service.cli.view.output import print_json

    with connect(url) as client:
        jobs = list(client.jobs(state, label, limit))
        total = len(jobs) if len(jobs) < limit else client.count_jobs(state, label)
    if as_json:
        print_json({"items": [job.data for job in jobs], "total": total})
        return
    if not jobs:
        print("no jobs" if state or label else "no jobs yet; create one with 'shardyard submit FILE'")
        return

    from service.cli.view.jobs import job_columns
    from service.cli.view.listing import print_listing
    from service.cli.view.output import columns_of, console, say

    out = console()
    print_listing(job_columns(jobs), out, columns_of(out))
    if total > len(jobs):
        say(f"showing {len(jobs):,} of {total:,}; --limit N shows more")


def show(job: JobId, url: Url = None, as_json: AsJson = False) -> None:
    """Show a job or a sweep: state, reason, figures, result."""
    from service.cli.commands.sweep import find_sweep, is_sweep, show_sweep
    from service.cli.server import connect, find_job
    from service.cli.view.details import job_details
    from service.cli.view.output import console, print_json

    with connect(url) as client:
        if is_sweep(job):
            show_sweep(find_sweep(client, job), as_json)
            return
        handle = find_job(client, job)
        preparation = None if as_json else _preparation(handle)
        samples = [] if as_json else _last_samples(handle)
    if as_json:
        print_json(handle.data)
    else:
        console().print(job_details(handle, preparation, samples))


def _last_samples(job: "Job") -> list[dict[str, Any]]:
    """Metric with the newest completions of `train.evaluation.prompts`, if the job has any."""
    evaluation = job.data.get("spec", {}).get("train", {}).get("evaluation", {})
    return job.metrics("samples", max_points=1) if evaluation.get("prompts") and job.data.get("last_metric") else []


def _preparation(job: "Job") -> "PreparationRecord | None":
    """Data preparation of a job before its first step, if that is its last event."""
    if job.ended or not job.attempt or job.data.get("last_metric"):
        return None
    from service.cli.view.progress import RunProgress

    newest = int(job.data.get("last_event_id") or 0)
    first = max(0, int(job.data.get("first_event_id") or 1) - 1, newest - EVENTS_LOOKED_AT)
    progress = RunProgress(job.id, job.name, job.num_steps)
    for event in job.events(first) if newest > first else ():
        progress.take(event)
        if event.id >= newest:
            break  # what comes later is for 'watch'
    return progress.preparation


def logs(
    job: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until the job ends.")] = False,
    tail: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=10_000, help="Only the newest N lines, in order of time.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="WHEN", help="Only lines since a time, or since 90s, 10m or 1h30m ago.")
    ] = None,
    grep: Annotated[str | None, typer.Option(metavar="TEXT", help="Only lines that contain TEXT literally.")] = None,
    worker: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this writer: driver, g0.rank-1, a2.g0.rank-1.")
    ] = None,
    attempt: Annotated[int | None, typer.Option(metavar="N", min=1, help="Only this attempt.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Print lines unchanged, with escape codes; not for a terminal.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Print the logs of the driver and the workers."""
    from service.cli.failures import Misuse
    from service.cli.server import connect, find_job
    from service.cli.view.jobs import log_line
    from service.cli.view.output import console, print_json

    out = console()
    with connect(url) as client:
        handle = find_job(client, job)
        if attempt is not None and attempt > handle.attempt and (handle.ended or not follow):
            attempts_text = f"it had {handle.attempt or 'none'}"
            raise Misuse(f"{job} has no attempt {attempt}: {attempts_text}; use a lower number, or omit --attempt")
        lines = handle.logs(follow, tail=tail, since=since, grep=grep, worker=worker, attempt=attempt, raw=raw)
        for line in lines:
            if as_json:
                print_json(line, lines=True)
            elif raw:
                print(line["message"])
            else:
                out.print(log_line(line), soft_wrap=True)


def checkpoints(
    job: JobId,
    verify: Annotated[
        str | None,
        typer.Option(
            metavar="STEP", help="Instead: compare the files of this step's checkpoint with their sizes and checksums."
        ),
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List committed checkpoints, oldest first, or verify one.

    With --verify, exits with 1 if a file is missing or differs.
    """
    from service.cli.server import connect, find_job
    from service.cli.view.output import columns_of, console, print_json

    with connect(url) as client:
        if verify is not None:
            raise typer.Exit(_verify(find_job(client, job), verify, as_json))
        items = find_job(client, job).checkpoints()
    if as_json:
        print_json({"items": items})
    elif items:
        from moe.records import StoredCheckpoint
        from service.cli.view.jobs import checkpoint_columns
        from service.cli.view.listing import print_listing

        out = console()
        rows = [StoredCheckpoint.read(checkpoint) for checkpoint in items]
        print_listing(checkpoint_columns(rows), out, columns_of(out))
    else:
        print("no committed checkpoint yet")


def _verify(job: "Job", checkpoint: str, as_json: bool) -> int:
    """Verify a checkpoint; returns the exit code."""
    from service.cli.failures import FAILED
    from service.cli.view.checkpoints import verification_lines, verification_spinner
    from service.cli.view.output import print_json

    checkpoints = job.checkpoints() if sys.stderr.isatty() else ()
    with verification_spinner(checkpoint, checkpoints):
        verification = job.verify_checkpoint(checkpoint)
    if as_json:
        print_json(verification.to_plain())
    else:
        print("\n".join(verification_lines(verification)))
    return 0 if verification.is_intact else FAILED
