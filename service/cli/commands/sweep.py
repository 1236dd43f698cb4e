"""`sweep`: submits, lists and follows sweeps; what `show`, `watch`, `cancel` and `delete` do for a sweep's id."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.failures import DETACHED
from service.cli.options import AsJson, Url, confirm

if TYPE_CHECKING:
    from service.client import Client, Sweep

PREFIX = "sweep-"
FOLLOW_INTERVAL_S = 1.0
DEFAULT_ROWS = 20


def sweep(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", show_default=False, help="A job file with `sweep`; - for standard input."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow the sweep until it ends.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override a field, as sweep.max_parallel=2.")
    ] = None,
    idempotency_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Idempotency key: the same key and file create only one sweep.")
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=200, help="Without FILE: maximum number.")] = 20,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Submit a family of jobs that differ in some fields, or list sweeps.

    FILE is a job with `sweep`: a grid, random values or successive halving. `show`, `watch`, `cancel` and `delete`
    take a sweep's id too.
    """
    from service.cli.job_file import plain_job
    from service.cli.overrides import apply_overrides
    from service.cli.server import connect
    from service.cli.view.output import print_json

    with connect(url) as client:
        if file is None:
            _list(client, limit, as_json)
            return
        handle = client.submit_sweep(apply_overrides(plain_job(file), set_ or []), idempotency_key)
        if watch:
            if not as_json:
                print(f"submitted {handle.id}: {len(handle.members)} jobs")
            raise typer.Exit(follow_sweep(handle, as_json))
        if as_json:
            print_json(handle.data)
            return
        print(handle.id)
        typer.echo(f"{len(handle.members)} jobs; follow them with 'shardyard watch {handle.id}'", err=True)


def is_sweep(id: str) -> bool:
    """Whether an id is a sweep's, not a job's."""
    return id.startswith(PREFIX)


def find_sweep(client: "Client", id: str) -> "Sweep":
    """The sweep with this id. Raises Misuse if there is none."""
    from service.cli.failures import Misuse
    from service.client import ApiError

    try:
        return client.sweep(id)
    except ApiError as error:
        if error.status != 404:
            raise
        raise Misuse(f"there is no sweep {id!r} at {client.url}; 'shardyard sweep' lists the sweeps") from None


def show_sweep(handle: "Sweep", as_json: bool) -> None:
    """Print a sweep: its state, the decisions at its rungs, and its members, the best first."""
    from rich.text import Text

    from service.cli.view.listing import print_listing
    from service.cli.view.output import columns_of, console, print_json, say
    from service.cli.view.printable import printable
    from service.cli.view.sweep import member_columns

    if as_json:
        print_json(handle.data)
        return
    data, out = handle.data, console()
    counts = ", ".join(f"{count} {state}" for state, count in sorted(data["members_by_state"].items()))
    for line in (
        f"{handle.id}  {data['name']}  {handle.state}: {handle.reason}",
        f"{data['num_members']} jobs by {data['method']}: {counts}; compared by {data['metric']}, {data['mode']}",
        *(f"  {decision['reason']}" for decision in data["decisions"]),
    ):
        out.print(Text(printable(line)))  # wrapped on a terminal
    print()
    hidden = print_listing(member_columns(data), out, columns_of(out))
    if hidden:
        say(f"not shown for lack of room: {', '.join(hidden)}; --json has all")


def follow_sweep(handle: "Sweep", as_json: bool) -> int:
    """Print what happens to a sweep until it ends or Ctrl-C, then its table; returns the exit code."""
    from service.cli.view.output import print_json
    from service.cli.view.printable import printable

    known: dict[int, str] = {}
    num_decisions = 0
    try:
        while True:
            if as_json:
                print_json(handle.data, lines=True)
            else:
                for decision in handle.data["decisions"][num_decisions:]:
                    print(printable(decision["reason"]), flush=True)
                num_decisions = len(handle.data["decisions"])
                _print_changes(handle.members, known, handle.data["metric"])
            if handle.ended:
                break
            time.sleep(FOLLOW_INTERVAL_S)
            handle.refresh()
    except KeyboardInterrupt:
        typer.echo(
            f"\nno longer watching; {handle.id} continues. Follow it with 'shardyard watch {handle.id}', "
            f"end it with 'shardyard cancel {handle.id}'.",
            err=True,
        )
        return DETACHED
    if not as_json:
        print()
        show_sweep(handle, as_json=False)
    return 0 if handle.state == "succeeded" else 1


def print_sweep(handle: "Sweep", as_json: bool) -> None:
    from service.cli.view.output import print_json

    if as_json:
        print_json(handle.data)
    else:
        print(f"{handle.id}: {handle.reason}")


def delete_sweep(handle: "Sweep", yes: bool, as_json: bool) -> None:
    """Delete a sweep with all its jobs, after confirmation."""
    from service.cli.failures import CommandError
    from service.cli.view.output import print_json

    if not handle.ended:
        raise CommandError(f"{handle.id} is running; only a sweep that has ended can be deleted; cancel it first")
    num_jobs = sum(member["state"] != "deleted" for member in handle.members)
    confirm(f"Delete {handle.id} with its {num_jobs} jobs, their checkpoints, logs and metrics? This cannot be undone.",
            yes)  # fmt: skip
    handle.delete()
    if as_json:
        print_json({"id": handle.id, "state": "deleted"})
    else:
        print(f"{handle.id} is deleted")


def _list(client: "Client", limit: int, as_json: bool) -> None:
    from service.cli.view.listing import print_listing
    from service.cli.view.output import columns_of, console, print_json
    from service.cli.view.sweep import sweep_columns

    sweeps = client.sweeps(limit)
    if as_json:
        print_json({"items": sweeps})
    elif not sweeps:
        print("no sweeps yet; create one with 'shardyard sweep FILE'")
    else:
        out = console()
        print_listing(sweep_columns(sweeps), out, columns_of(out))


def _print_changes(members: list[dict[str, Any]], known: dict[int, str], metric: str) -> None:
    """Lines about members whose states have changed."""
    from service.cli.view.printable import printable
    from service.cli.view.sweep import value_text

    for member in sorted(members, key=lambda member: int(member["number"])):
        if member["is_held"] or known.get(member["number"]) == member["state"]:
            continue
        known[member["number"]] = member["state"]
        value = "" if member["value"] is None else f", {metric} {value_text(member['value'])}"
        print(f"{member['job']}  {printable(member['name'] or '')}  {member['state']} at step {member['step'] or 0:,}"
              f"{value}", flush=True)  # fmt: skip
