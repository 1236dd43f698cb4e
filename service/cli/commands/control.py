"""`cancel`, `pause`, `resume`: requests, obeyed at the run's next step boundary."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.options import AsJson, JobId, Url, Yes

if TYPE_CHECKING:
    from service.client import Client, Job

MAX_NAMED = 10


def cancel(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="The job's id, as shown by `shardyard ls`.")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label", metavar="KEY=VALUE", help="Every job with this label instead; repeat to require several."
        ),
    ] = None,
    yes: Yes = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Cancel a job, a sweep, or every unfinished job with a label.

    A running job commits a checkpoint first if the service's deadline allows. Cancelling several asks for
    confirmation, and exits with 1 if one could not be cancelled.
    """
    from service.cli.commands.sweep import find_sweep, is_sweep, print_sweep
    from service.cli.failures import Misuse
    from service.cli.server import connect, find_job

    if (job is None) == (not label):
        raise Misuse("give a JOB, or --label KEY=VALUE for all jobs with that label")
    with connect(url) as client:
        if job is not None and is_sweep(job):
            print_sweep(find_sweep(client, job).cancel(), as_json)
        elif job is not None:
            _print_job(find_job(client, job).cancel(), as_json)
        else:
            raise typer.Exit(_cancel_all(client, label or [], yes, as_json))


def _cancel_all(client: "Client", labels: Sequence[str], yes: bool, as_json: bool) -> int:
    """Cancel active jobs with these labels; returns the exit code."""
    from service.cli.failures import FAILED
    from service.cli.options import confirm
    from service.cli.view.output import print_json
    from service.client import ApiError
    from service.wire.states import OVER, State

    jobs = list(client.jobs(sorted(set(State) - OVER), labels))
    label_text = " and ".join(labels)
    if not jobs and not as_json:
        print(f"no unfinished job has {label_text}")
    if jobs:
        names = ", ".join(f"{job.id} ({job.name}, {job.state})" for job in jobs[:MAX_NAMED])
        rest = f" and {len(jobs) - MAX_NAMED:,} more" if len(jobs) > MAX_NAMED else ""
        noun = "job" if len(jobs) == 1 else "jobs"
        confirm(f"Cancel {len(jobs):,} {noun} with {label_text}: {names}{rest}?", yes)
    items, num_failed = list[dict[str, Any]](), 0
    for job in jobs:
        try:
            job.cancel()
            items.append({"id": job.id, "state": job.state, "error": None})
            if not as_json:
                _print_job(job, as_json)
        except ApiError as error:  # go on with the others
            num_failed += error.status not in (409, 410)  # it has ended meanwhile
            items.append({"id": job.id, "state": None, "error": str(error)})
            if not as_json:
                print(f"{job.id}: {error}")
    if as_json:
        print_json({"items": items})
    return FAILED if num_failed else 0


def pause(job: JobId, url: Url = None, as_json: AsJson = False) -> None:
    """Commit a checkpoint, then release the workers. Of a sweep: of all its jobs."""
    from service.cli.commands.sweep import find_sweep, is_sweep, print_sweep
    from service.cli.server import connect, find_job

    with connect(url) as client:
        if is_sweep(job):
            print_sweep(find_sweep(client, job).pause(), as_json)
            return
        _print_job(find_job(client, job).pause(), as_json, f"continue it with 'shardyard resume {job}'")


def move(
    job: JobId,
    first: Annotated[bool, typer.Option("--first", help="Move it to the front of the queue.")] = False,
    last: Annotated[bool, typer.Option("--last", help="Move it to the end of the queue.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Move a queued job to the front or end of the queue."""
    from service.cli.failures import Misuse
    from service.cli.server import connect, find_job

    if first == last:
        raise Misuse("give --first or --last")
    with connect(url) as client:
        _print_job(find_job(client, job).move("first" if first else "last"), as_json)


def resume(job: JobId, url: Url = None, as_json: AsJson = False) -> None:
    """Queue a paused, failed or cancelled job again, or continue a paused sweep.

    Jobs continue from their last committed checkpoints.
    """
    from service.cli.commands.sweep import find_sweep, is_sweep, print_sweep
    from service.cli.server import connect, find_job

    with connect(url) as client:
        if is_sweep(job):
            print_sweep(find_sweep(client, job).resume(), as_json)
            return
        _print_job(find_job(client, job).resume(), as_json)


def _print_job(job: "Job", as_json: bool, hint: str = "") -> None:
    from service.cli.view.output import print_json
    from service.cli.view.printable import printable

    if as_json:
        print_json(job.data)
        return
    because = f" ({printable(job.reason)})" if job.reason else ""
    print(f"{job.id} is {job.state}{because}" + (f"; {hint}" if hint else ""))
