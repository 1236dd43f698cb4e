"""`metrics`: recorded values of each step, as a table, CSV or JSON."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.options import AsJson, JobId, Url

if TYPE_CHECKING:
    from service.client import Job

MAX_POINTS = 10_000
MAX_NAMED = 8
"""Most dropped columns that are named."""
SAMPLED_POINTS = 20
"""Steps that are searched for existing names."""


def metrics(
    job: JobId,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="NAME", help="Only this value and those below it; repeat for several."),
    ] = None,
    since_step: Annotated[int, typer.Option(metavar="STEP", min=0, help="Only this step and later ones.")] = 0,
    max_points: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=MAX_POINTS, help="Maximum number of steps, evenly spaced. [all]"),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, for spreadsheets and pandas.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Print metrics of each step: loss, tokens/s, expert loads.

    Repeated steps show their newest values. `--name layers` shows the loads of single experts.
    """
    from service.cli.failures import Misuse
    from service.cli.server import connect, find_job
    from service.cli.view.listing import print_listing
    from service.cli.view.metrics import has_column, metric_columns, metric_rows, write_csv
    from service.cli.view.output import columns_of, console, print_json, say

    if as_csv and as_json:
        raise Misuse("--csv and --json exclude each other; give one of them")
    names = name or []
    for prefix in names:
        if not all(prefix.split(".")):
            raise Misuse(f"--name (={prefix!r}) must name a value or a group of values, as in loss or held_out.seen")
    tops = {prefix.partition(".")[0] for prefix in names}
    with connect(url) as client:
        only = tops.pop() if len(tops) == 1 else None
        handle = find_job(client, job)
        points = handle.metrics(only, since_step, max_points)
        rows = metric_rows(points, names)
        _refuse_unknown(handle, [prefix for prefix in names if not has_column(rows, prefix)])
    if as_json:
        keys = {"step", "time", "attempt", *tops}
        items = [{key: value for key, value in point.items() if key in keys} for point in points] if tops else points
        print_json({"items": items})
        return
    if as_csv:
        write_csv(rows, sys.stdout)
    elif rows:
        out = console()
        if left_out := print_listing(metric_columns(rows), out, columns_of(out)):
            rest = f" and {len(left_out) - MAX_NAMED:,} more" if len(left_out) > MAX_NAMED else ""
            say(f"left out {', '.join(left_out[:MAX_NAMED])}{rest}: --name chooses columns, --csv prints all")
    else:
        print(f"no step of {job} has {' or '.join(names)}" if names else f"no step of {job} is recorded yet")


def _refuse_unknown(job: "Job", missing: Sequence[str]) -> None:
    """Raises Misuse for those of the `missing` names that no step of the job recorded."""
    from service.cli.failures import Misuse
    from service.cli.view.metrics import KEYS, columns, has_column, metric_rows

    def fetch_points(name: str | None) -> list[dict[str, Any]]:
        return job.metrics(name, 0, SAMPLED_POINTS)

    unknown = [
        name for name in missing if not has_column(metric_rows(fetch_points(name.partition(".")[0]), [name]), name)
    ]
    if not unknown or not (points := fetch_points(None)):
        return
    column_names = [name for name in columns(metric_rows(points, [])) if name not in KEYS]
    tops = [name for name in dict.fromkeys(key for point in points for key in point) if name not in KEYS]
    choices = [name for name in column_names if not name.startswith("layers.")] + ["layers"] * ("layers" in tops)
    raise Misuse(
        f"--name (={' '.join(unknown)}) must name values that {job.id} recorded; use one of {', '.join(choices)}"
    )
