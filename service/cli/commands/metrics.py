"""`metrics`: what was recorded of each step, as a table, as CSV, as JSON."""

import sys
from typing import Annotated

import typer

from service.cli.options import AsJson, JobId, Url

MAX_POINTS = 10_000
MAX_NAMED = 8
"""Columns of a table that are named where they were left out."""


def metrics(
    job: JobId,
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--name", metavar="NAME", help="Only this value, and what lies below it; may be repeated."
        ),
    ] = None,
    since_step: Annotated[int, typer.Option(metavar="STEP", min=0, help="Only steps from this one on.")] = 0,
    max_points: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=MAX_POINTS, help="At most so many steps, spread evenly; all if left out."
        ),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, for spreadsheets and pandas.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Prints what was recorded of each step: loss, tokens/s, learning rate, what the experts took.

    Of a step that was redone, the newest. The loads of single experts are shown with `--name layers`.
    """
    from service.cli.failures import Misuse
    from service.cli.server import connect, find_job
    from service.cli.view.listing import print_listing
    from service.cli.view.metrics import metric_columns, metric_rows, write_csv
    from service.cli.view.output import columns_of, console, print_json, say

    if as_csv and as_json:
        raise Misuse("--csv and --json are two forms of the same: give one of them")
    names = name or []
    for each in names:
        if not all(each.split(".")):
            raise Misuse(
                f"--name (={each!r}) must name a value, or one below another, as in loss or held_out.seen"
            )
    tops = {each.partition(".")[0] for each in names}
    with connect(url) as client:
        only = tops.pop() if len(tops) == 1 else None
        points = find_job(client, job).metrics(only, since_step, max_points)
    if as_json:
        kept = {"step", "time", "attempt", *tops}
        items = (
            [{key: value for key, value in point.items() if key in kept} for point in points]
            if tops
            else points
        )
        print_json({"items": items})
        return
    rows = metric_rows(points, names)
    if as_csv:
        write_csv(rows, sys.stdout)
    elif rows:
        out = console()
        if left_out := print_listing(metric_columns(rows), out, columns_of(out)):
            more = f" and {len(left_out) - MAX_NAMED:,} more" if len(left_out) > MAX_NAMED else ""
            say(f"without {', '.join(left_out[:MAX_NAMED])}{more}: --name chooses columns, --csv prints all")
    else:
        print(f"no step of {job} has {' or '.join(names)}" if names else f"no step of {job} was recorded yet")
