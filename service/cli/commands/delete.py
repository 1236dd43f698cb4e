"""`delete`: a job with everything that it made."""

from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.options import AsJson, JobId, Url, Yes

if TYPE_CHECKING:
    from service.client import Job


def delete(
    job: JobId,
    yes: Yes = False,
    cancel: Annotated[
        bool,
        typer.Option("--cancel", help="Cancel the job first, and wait for its end, if it has not ended."),
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Deletes a job that has ended or is paused: its checkpoints, logs and metrics go too.

    Asks back on a terminal; elsewhere it needs --yes. What is deleted cannot be brought back.
    """
    from service.cli.confirm import confirm
    from service.cli.server import connect, find_job
    from service.cli.view.output import print_json

    with connect(url) as client:
        found = find_job(client, job)
        confirm(_question(found, cancel), yes)
        if cancel and not found.ended and found.state != "paused":
            found.cancel().wait()
        deletion = found.delete()
    if as_json:
        print_json(deletion)
    else:
        print(f"{job} is {deletion['state']}")


def _question(job: "Job", cancel: bool) -> str:
    checkpoints = len(job.checkpoints()) if job.state != "deleting" else 0
    made = f"{checkpoints} checkpoint{'' if checkpoints == 1 else 's'}, its logs and its metrics"
    first = "Cancel and delete" if cancel and not job.ended and job.state != "paused" else "Delete"
    return f"{first} {job.id} ({job.name}, {job.state}) with {made}? This cannot be undone."
