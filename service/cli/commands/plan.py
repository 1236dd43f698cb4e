"""`plan` and `schema`: how a job would be laid out, and what a job file may say. Nothing is run."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.options import AsJson, Url

if TYPE_CHECKING:
    from moe.plan import Cluster, PlanRequest, Pools
    from moe.plan.named import Name


def plan(
    of: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE | JOB | diff PLAN PLAN",
            show_default=False,
            help="A job file, YAML or JSON (- for standard input; one named diff is ./diff); a job's id; or two kept "
            "plans to compare.",
        ),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="In place of FILE: what makes a module of your own."),
    ] = None,
    sample: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="With --module: what gives one batch.")
    ] = None,
    hints: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --module: placements to keep to.", dir_okay=False),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to keep the plan, as JSON.", dir_okay=False),
    ] = None,
    draw: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Where to draw the best layouts, or a module.", dir_okay=False),
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Facts of a cluster: YAML or JSON.", dir_okay=False)
    ] = None,
    num_nodes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Nodes of an imagined cluster.")
    ] = None,
    devices_per_node: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Devices of each of its nodes.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="What the devices are: cpu, v100, a100-40, a100-80, h100, h200, b200, gb200, b300, gb300, tpu-v3.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of one device, such as 80GB; the type's own if left out."),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(metavar="AMOUNT", help="What one device costs an hour, in any currency."),
    ] = None,
    num_workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Workers, instead of what the file says.")
    ] = None,
    goal: Annotated[
        str | None,
        typer.Option(
            metavar="time|cost",
            help="Choose the number of workers, of the job's range, and the pool by the fastest or the cheapest step.",
        ),
    ] = None,
    software: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What runs it, for host times: ours-eager, megatron-graphs, ..."),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=100, help="How many layouts to tell of; 5 if left out."),
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option(metavar="GRID", help="A table over other values: experts=128,256,nodes=32,64."),
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="The smallest cluster of this kind that would do.")
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(metavar="PLAN", help="A plan kept as JSON: what differs from what it was made for."),
    ] = None,
    explain_against: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT",
            help="Why not this one: tensor=2,expert=8 as parallel has them, or a plan kept as JSON.",
        ),
    ] = None,
    sensitive: Annotated[
        bool,
        typer.Option("--sensitivity", help="What changes with slower links and kernels, or less memory."),
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Shows how a job would be laid out, or is, and why.

    Nothing is run. FILE is a job file, or one that holds a job as `spec` and the facts of a `cluster`. Where the file
    or an option tells of a cluster the plan is made here, for that one; otherwise the control plane makes it for its
    own. In place of FILE the id of a job: its plan, with what was measured beside what was predicted; or diff and two
    plans that --save or --json wrote: what differs. With --module the plan of a module of your own, which is imported
    from here: --module mypackage.model:build --sample mypackage.model:sample.
    """
    from moe.interchange.expand import expand_request
    from moe.plan import Pools, plan_request
    from moe.plan.cluster.cluster import of_several_kinds
    from moe.plan.goal import GOALS
    from moe.plan.software import SOFTWARE
    from moe.plan.stored import load
    from moe.spec import SpecError
    from service.cli.failures import Misuse
    from service.cli.job_file import plain_job
    from service.cli.job_plan import Written, depends, explain, fitted, give, of_job, planned

    imagined, words = (num_nodes, devices_per_node, device), of or []
    if draw is not None and draw.suffix != ".svg":
        raise Misuse(f"--draw {draw} writes an SVG picture; name a file that ends in .svg")
    here = (
        *imagined,
        cluster,
        memory,
        price,
        num_workers,
        goal,
        software,
        top,
        what_if,
        against,
        explain_against,
    )
    if module is not None:
        others = (num_workers, goal, software, top, what_if, against, explain_against, url)
        if words or fit or sensitive or any(each is not None for each in others):
            raise Misuse("--module goes with --sample, a cluster, --hints, --save, --draw and --json alone")
        if sample is None:
            raise Misuse("--module needs --sample, the function that gives one batch")
        found_cluster = _cluster_of(cluster, imagined, memory, price)
        if found_cluster is None:
            raise Misuse("--module needs the facts of a cluster; add --cluster, or --num-nodes and --device")
        if isinstance(found_cluster, Pools):
            raise SpecError(of_several_kinds())
        from service.cli.module_plan import ModuleOptions, plan_module

        plan_module(module, sample, found_cluster, ModuleOptions(hints, save, draw, as_json))
        return
    if sample is not None or hints is not None:
        raise Misuse("--sample and --hints belong to --module")
    if words[:1] == ["diff"]:
        if len(words) != 3:
            raise Misuse(
                "diff compares two kept plans; write plan diff PLAN PLAN (a job file of that name is ./diff)"
            )
        if fit or sensitive or any(each is not None for each in (*here, save, draw, url)):
            raise Misuse("diff goes with --json alone")
        _diff(Path(words[1]), Path(words[2]), as_json)
        return
    if not words:
        raise Misuse("give FILE, the id of a job, diff and two plans, or --module")
    if len(words) > 1:
        raise Misuse(
            f"give one FILE or one job, not {len(words)}; two kept plans are compared by plan diff PLAN PLAN"
        )
    file, written = Path(words[0]), Written(save, draw, as_json)
    if _is_job(file):
        if fit or sensitive or any(each is not None for each in here):
            raise Misuse(
                f"{file} is planned already: a job's id goes with --save, --draw, --url and --json alone"
            )
        give(*of_job(file, url), written)
        return
    if what_if is not None and (
        fit or sensitive or any(each is not None for each in (against, explain_against, save, draw))
    ):
        raise Misuse(
            "--what-if makes a table of plans; leave --fit, --against, --explain-against, --sensitivity, --save and "
            "--draw out"
        )
    if sensitive and explain_against is not None:
        raise Misuse("--sensitivity and --explain-against each print a table; ask for one at a time")
    asked = plan_request(expand_request(plain_job(file), None))
    updates = {
        "num_workers": num_workers, "top": top, "goal": _named("--goal", goal, GOALS),
        "software": _named("--software", software, SOFTWARE),
    }  # fmt: skip
    asked = asked.model_copy(update={name: value for name, value in updates.items() if value is not None})
    given = _cluster_of(cluster, imagined, memory, price) or asked.cluster

    if what_if is not None or fit:
        if given is None:
            raise Misuse(
                "--what-if and --fit need the facts of a cluster; add --cluster, or --num-nodes and --device"
            )
        if what_if is not None:
            _show_grid(asked, given, what_if, as_json)
            return
        asked, given, (found, where) = fitted(asked, given)
    else:
        found, where = planned(asked, given, url)
    if against is not None:
        load(against, found)
    if explain_against is not None:
        explain(explain_against, asked, given, url, (found, where), written)
    elif sensitive:
        if given is None:
            raise Misuse(
                "--sensitivity needs the facts of a cluster; add --cluster, or --num-nodes and --device"
            )
        depends(asked, given, (found, where), written)
    else:
        give(found, where, written)


def _show_grid(asked: "PlanRequest", given: "Cluster | Pools", what_if: str, as_json: bool) -> None:
    """Prints a plan for each cell, and ends with status 2 where there is none at all. Raises SpecError."""
    from moe.plan.search.what_if import grid, parse_axes
    from service.cli.view.output import console, print_json
    from service.cli.view.plan import what_if_view

    cells = grid(asked, given, parse_axes(what_if))
    if as_json:
        print_json([{"values": dict(cell.values), "why_not": cell.why_not or None,
                     "plan": cell.plan and cell.plan.model_dump(mode="json")} for cell in cells])  # fmt: skip
    else:
        console().print(what_if_view(cells))
    if all(cell.plan is None for cell in cells):
        raise typer.Exit(2)


def _diff(first: Path, second: Path, as_json: bool) -> None:
    """Prints what differs between two kept plans. Raises SpecError for what is none, OSError."""
    from moe.plan.stored import load
    from service.cli.view.comparison import diff_json, diff_view
    from service.cli.view.output import console, print_json

    plans = load(first), load(second)
    if as_json:
        print_json(diff_json(*plans))
    else:
        console().print(diff_view(*plans, str(first), str(second)))


def _is_job(file: Path) -> bool:
    """Whether this is to be taken for a job's id: no file is there, and ids have no dots."""
    return str(file).startswith("job-") and not file.suffix and not file.exists()


def schema() -> None:
    """Prints the JSON Schema of job files."""
    from moe.spec import json_schema
    from service.cli.view.output import print_json

    print_json(json_schema())


def _named(option: str, text: str | None, names: "Collection[Name]") -> "Name | None":
    """The name that an option gives. Raises Misuse."""
    from moe.plan.named import one_of
    from moe.spec import SpecError
    from service.cli.failures import Misuse

    try:
        return one_of(option, text, names)
    except SpecError as error:
        raise Misuse(str(error.problems[0])) from None


def _cluster_of(
    file: Path | None,
    imagined: tuple[int | None, int | None, str | None],
    memory: str | None,
    price: str | None,
) -> "Cluster | Pools | None":
    """The cluster that options tell of; None where they tell of none."""
    from service.cli.failures import Misuse

    is_imagined = any(each is not None for each in imagined)
    if file is not None:
        if is_imagined or memory is not None or price is not None:
            raise Misuse("--cluster says all of a cluster; leave --num-nodes and its like out")
        from moe.plan import read_cluster

        return read_cluster(file)
    for option, given in (("--memory", memory), ("--price", price)):
        if given is not None and not is_imagined:
            raise Misuse(f"{option} belongs to an imagined cluster; add --num-nodes and --device")
    return _imagined(*imagined, memory, price) if is_imagined else None


def _imagined(
    num_nodes: int | None,
    devices_per_node: int | None,
    device: str | None,
    memory: str | None,
    price: str | None,
) -> "Cluster":
    from moe.plan import DEVICES, Cluster
    from service.cli.failures import Misuse

    type = device or "cpu"
    if type not in DEVICES:
        raise Misuse(
            f"--device (={type!r}) must be a device type known here; use one of {', '.join(DEVICES)}"
        )
    memory_bytes = _num_bytes(memory) if memory else DEVICES[type].memory_bytes
    return Cluster(
        num_nodes=num_nodes or 1,
        devices_per_node=devices_per_node or 1,
        device=type,
        memory_bytes=memory_bytes,
        price_per_hour=None if price is None else _amount(price),
    )


def _amount(text: str) -> float:
    """`2.50`. Raises Misuse for anything but an amount above nothing."""
    from math import inf

    from service.cli.failures import Misuse

    try:
        amount = float(text)
    except ValueError:
        amount = 0.0
    if not 0 < amount < inf:
        raise Misuse(f"--price (={text!r}) must be an amount of money above 0; write it as 2.50")
    return amount


def _num_bytes(text: str) -> int:
    """`80GB`, `141 GiB`, `512MiB`, `1000000`. Raises Misuse for anything else."""
    import re

    from service.cli.failures import Misuse

    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
             "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in units or float(match[1]) <= 0:
        raise Misuse(f"--memory (={text!r}) must be an amount of memory; write it as 80GB or 80GiB")
    return int(float(match[1]) * units[match[2].upper()])
