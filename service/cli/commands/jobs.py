"""`submit`, `ls`, `show`, `logs`, `checkpoints`: jobs in, and what is known of them out."""

from typing import Annotated

import typer

from service.cli.options import AsJson, JobFile, JobId, Url

DEFAULT_ROWS = 20


def submit(
    file: JobFile,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow the job to its end.")] = False,
    idempotency_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Sent twice with the same file, it still makes one job."),
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Submits the job in FILE, or on standard input where FILE is -."""
    from service.cli.job_file import plain_job
    from service.cli.server import connect
    from service.cli.view.output import print_json

    with connect(url) as client:
        job = client.submit(plain_job(file), idempotency_key)
        if watch:
            from service.cli.commands.watch import follow

            if not as_json:
                print(f"submitted {job.id}")
            raise typer.Exit(follow(client, job, as_json))
        if as_json:
            print_json(job.data)
            return
        print(job.id)
        typer.echo(f"follow it with 'shardyard watch {job.id}'", err=True)


def ls(
    state: Annotated[str | None, typer.Option(metavar="STATE", help="Only jobs in this state.")] = None,
    label: Annotated[str | None, typer.Option(metavar="KEY=VALUE", help="Only jobs with this label.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="At most so many jobs.")] = DEFAULT_ROWS,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Lists jobs, newest first."""
    from service.cli.server import connect
    from service.cli.view.jobs import job_table
    from service.cli.view.output import console, print_json

    with connect(url) as client:
        jobs = list(client.jobs(state, label, limit))
    if as_json:
        print_json({"items": [job.data for job in jobs]})
    elif jobs:
        console().print(job_table(jobs))
    else:
        print("no jobs" if state or label else "no jobs yet; 'shardyard submit FILE' makes one")


def show(job: JobId, url: Url = None, as_json: AsJson = False) -> None:
    """Shows one job: state, reason, figures, result."""
    from service.cli.server import connect, find_job
    from service.cli.view.jobs import job_details
    from service.cli.view.output import console, print_json

    with connect(url) as client:
        found = find_job(client, job)
    if as_json:
        print_json(found.data)
    else:
        console().print(job_details(found))


def logs(
    job: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Prints what the driver and the workers logged."""
    from service.cli.server import connect, find_job
    from service.cli.view.jobs import log_line
    from service.cli.view.output import console, print_json

    out = console()
    with connect(url) as client:
        for line in find_job(client, job).logs(follow):
            if as_json:
                print_json(line, lines=True)
            else:
                out.print(log_line(line), soft_wrap=True)


def checkpoints(job: JobId, url: Url = None, as_json: AsJson = False) -> None:
    """Lists committed checkpoints, oldest first."""
    from service.cli.server import connect, find_job
    from service.cli.view.jobs import checkpoint_table
    from service.cli.view.output import console, print_json

    with connect(url) as client:
        found = find_job(client, job).checkpoints()
    if as_json:
        print_json({"items": found})
    elif found:
        console().print(checkpoint_table(found))
    else:
        print("no committed checkpoint yet")
