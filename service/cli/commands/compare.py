"""`compare`: results of several jobs, and the fields in which their specs differ."""

from typing import Annotated

import typer

from service.cli.options import AsJson, Url


def compare(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB JOB...", help="Ids of two or more jobs, or of a sweep.")],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Compare jobs: their last losses, speed and scores, and the fields in which their specs differ."""
    from service.cli.commands.sweep import find_sweep, is_sweep
    from service.cli.failures import Misuse
    from service.cli.server import connect, find_job
    from service.cli.view.job_comparison import comparison_json, difference_columns, result_columns, results
    from service.cli.view.listing import print_listing
    from service.cli.view.output import columns_of, console, print_json, say

    with connect(url) as client:
        ids = [
            job_id
            for id in jobs
            for job_id in (
                [member["job"] for member in find_sweep(client, id).members if member["state"] != "deleted"]
                if is_sweep(id)
                else [id]
            )
        ]
        if len(set(ids)) < 2 or len(set(ids)) < len(ids):
            raise Misuse("give the ids of two or more different jobs; 'shardyard ls' lists the jobs")
        handles = [find_job(client, id) for id in ids]
        values = [results(handle) for handle in handles]
    if as_json:
        print_json(comparison_json(handles, values))
        return
    out = console()
    hidden = print_listing(result_columns(handles, values), out, columns_of(out))
    print()
    if columns := difference_columns(handles):
        hidden += print_listing(columns, out, columns_of(out))
    else:
        print("their specs are the same")
    if hidden:
        say(f"not shown for lack of room: {', '.join(hidden)}; --json has all")
