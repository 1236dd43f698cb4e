"""`delete`: removes a job with all its files."""

from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.options import AsJson, JobId, Url, Yes

if TYPE_CHECKING:
    from service.client import Job


def delete(
    job: JobId,
    yes: Yes = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Cancel the job first if it is still running, and wait for its end.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Delete a finished or paused job with all its files, or a sweep that has ended with all its jobs.

    Its checkpoints, logs and metrics are removed irrevocably. Asks for confirmation on a terminal; elsewhere requires
    --yes.
    """
    from service.cli.commands.sweep import delete_sweep, find_sweep, is_sweep
    from service.cli.failures import CommandError
    from service.cli.options import confirm
    from service.cli.server import connect, find_job
    from service.cli.view.output import print_json
    from service.wire.states import State, sources

    with connect(url) as client:
        if is_sweep(job):
            delete_sweep(find_sweep(client, job), yes, as_json)
            return
        handle = find_job(client, job)
        goes_on = handle.state not in sources(State.DELETING) | {State.DELETING}
        if goes_on and not cancel:
            raise CommandError(
                f"{job} is {handle.state}; only a finished or paused job can be deleted; use --cancel "
                "to cancel it first"
            )
        confirm(_question(handle, goes_on), yes)
        if goes_on:
            _end(handle)
        deletion = handle.delete()
    if as_json:
        print_json(deletion)
    else:
        print(f"{job} is {deletion['state']}")


def _end(job: "Job") -> None:
    """Cancel a job and wait until it has ended."""
    from service.client import ApiError

    try:
        job.cancel().wait()
    except ApiError as error:
        if error.status not in (409, 410):  # it has ended or was deleted meanwhile
            raise


def _question(job: "Job", goes_on: bool) -> str:
    first = "Cancel and delete" if goes_on else "Delete"
    contents = f"{_checkpoints(job)}, its logs and its metrics"
    return f"{first} {job.id} ({job.name}, {job.state}) with {contents}? This cannot be undone."


def _checkpoints(job: "Job") -> str:
    """Number of checkpoints, in words; unreadable storage does not prevent the deletion."""
    from service.client import ApiError

    try:
        count = len(job.checkpoints())
    except ApiError:
        return "its checkpoints"
    return f"{count} checkpoint{'' if count == 1 else 's'}"
