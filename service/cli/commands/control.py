"""`cancel`, `pause`, `resume`: requests, which a run obeys at its next step boundary."""

from typing import TYPE_CHECKING

from service.cli.options import AsJson, JobId, Url

if TYPE_CHECKING:
    from service.client import Job


def cancel(job: JobId, url: Url = None, as_json: AsJson = False) -> None:
    """Ends a job. A running one commits a checkpoint first, if the service's deadline leaves it the time."""
    from service.cli.server import connect, find_job

    with connect(url) as client:
        _say(find_job(client, job).cancel(), as_json)


def pause(job: JobId, url: Url = None, as_json: AsJson = False) -> None:
    """Commits a checkpoint, then lets the workers go."""
    from service.cli.server import connect, find_job

    with connect(url) as client:
        _say(find_job(client, job).pause(), as_json, f"'shardyard resume {job}' continues it")


def resume(job: JobId, url: Url = None, as_json: AsJson = False) -> None:
    """Queues a paused, failed or cancelled job again. It goes on from its last committed checkpoint."""
    from service.cli.server import connect, find_job

    with connect(url) as client:
        _say(find_job(client, job).resume(), as_json)


def _say(job: "Job", as_json: bool, hint: str = "") -> None:
    from service.cli.view.output import print_json
    from service.cli.view.printable import printable

    if as_json:
        print_json(job.data)
        return
    because = f" ({printable(job.reason)})" if job.reason else ""
    print(f"{job.id} is {job.state}{because}" + (f"; {hint}" if hint else ""))
