"""`watch`: follows a run until it ends."""

from typing import TYPE_CHECKING

import typer

from service.cli.failures import DETACHED
from service.cli.options import AsJson, JobId, Url

if TYPE_CHECKING:
    from service.client import Client, Job


def watch(job: JobId, url: Url = None, as_json: AsJson = False) -> None:
    """Follow a job or a sweep until it ends.

    Shows step, loss, tokens/s, time left, and the load of every expert. Ctrl-C stops watching, not the job. Exits
    with 0 if the job succeeded, else 1.
    """
    from service.cli.commands.sweep import find_sweep, follow_sweep, is_sweep
    from service.cli.server import connect, find_job

    with connect(url) as client:
        if is_sweep(job):
            raise typer.Exit(follow_sweep(find_sweep(client, job), as_json))
        raise typer.Exit(follow(client, find_job(client, job), as_json))


def follow(client: "Client", job: "Job", as_json: bool = False) -> int:
    """Show `job` until it ends or Ctrl-C; returns the exit code."""
    from contextlib import closing

    from service.cli.view.details import outcome
    from service.cli.view.follow import follower
    from service.cli.view.kinds import words_of
    from service.cli.view.output import console
    from service.cli.view.progress import RunProgress

    out = console()
    progress = RunProgress(job.id, job.name, job.num_steps, words_of(job).last_work)
    display = follower(progress, out, as_json, job.run_status)
    try:
        with closing(job.events(on_lost=display.on_disconnect, redone=as_json)) as events:
            display.show(events)
        job.refresh()
    except KeyboardInterrupt:
        typer.echo(
            f"\nno longer watching; {job.id} continues. Follow it with 'shardyard watch {job.id}', "
            f"end it with 'shardyard cancel {job.id}'.",
            err=True,
        )
        return DETACHED
    if not as_json:
        out.print(outcome(job))
    return 0 if job.state == "succeeded" else 1
