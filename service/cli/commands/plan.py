"""`plan` and `schema`: how a job would be laid out, and what a job file may say. Nothing is run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.options import AsJson, Url

if TYPE_CHECKING:
    from moe.plan import Cluster, Plan, PlanRequest


def plan(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]", show_default=False, help="A job file, YAML or JSON; - for standard input."
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
        typer.Option(metavar="FILE", help="With --module: where to keep the plan.", dir_okay=False),
    ] = None,
    draw: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="With --module: where to draw it.", dir_okay=False),
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
            help="What the devices are: cpu, a100-80, h100, h200, b200, gb200, tpu-v3.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of one device, such as 80GB; the type's own if left out."),
    ] = None,
    num_workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Workers, instead of what the file says.")
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
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Shows how a job would be laid out, or is, and why.

    Nothing is run. FILE is a job file, or one that holds a job as `spec` and the facts of a `cluster`. Where the file
    or an option tells of a cluster the plan is made here, for that one; otherwise the control plane makes it for its
    own. In place of FILE the id of a job: its plan, with what was measured beside what was predicted. With --module the
    plan of a module of your own, which is imported from here: --module mypackage.model:build --sample
    mypackage.model:sample.
    """
    from moe.interchange.expand import expand_request
    from moe.plan import plan_request
    from moe.plan.stored import load
    from service.cli.failures import Failed, Misuse
    from service.cli.job_file import plain_job
    from service.cli.view.output import console, print_json
    from service.cli.view.plan import plan_view, what_if_view

    imagined = (num_nodes, devices_per_node, device)
    if module is not None:
        others = (file, num_workers, top, what_if, against, url)
        if fit or any(each is not None for each in others):
            raise Misuse("--module goes with --sample, a cluster, --hints, --save, --draw and --json alone")
        if sample is None:
            raise Misuse("--module needs --sample, the function that gives one batch")
        found_cluster = _cluster_of(cluster, imagined, memory)
        if found_cluster is None:
            raise Misuse("--module needs the facts of a cluster; add --cluster, or --num-nodes and --device")
        from service.cli.module_plan import ModuleOptions, plan_module

        plan_module(module, sample, found_cluster, ModuleOptions(hints, save, draw, as_json))
        return
    if any(each is not None for each in (sample, hints, save, draw)):
        raise Misuse("--sample, --hints, --save and --draw belong to --module")
    if file is None:
        raise Misuse("give FILE, the id of a job, or --module")
    if _is_job(file):
        from service.cli.server import connect, find_job
        from service.client import ApiError

        with connect(url) as client:
            try:
                job = find_job(client, str(file))
            except Misuse as error:
                raise Misuse(f"there is no file {file}, and {error}") from None
            try:
                stored = job.plan()
            except ApiError as error:
                if error.status != 404:
                    raise
                raise Failed(str(error)) from None  # the job is there, and has no plan yet
            if as_json:
                print_json(stored.model_dump(mode="json"))
            else:
                console().print(plan_view(stored, f"{file} on {client.url}"))
        return
    asked = plan_request(expand_request(plain_job(file), None))
    updates = {"num_workers": num_workers, "top": top}
    asked = asked.model_copy(update={name: value for name, value in updates.items() if value is not None})
    given = _cluster_of(cluster, imagined, memory) or asked.cluster

    if what_if is not None or fit:
        if given is None:
            raise Misuse(
                "--what-if and --fit need the facts of a cluster; add --cluster, or --num-nodes and --device"
            )
        if what_if is not None:
            from moe.plan.search.what_if import grid, parse_axes

            cells = grid(asked, given, parse_axes(what_if))
            if as_json:
                print_json([{"values": dict(cell.values), "why_not": cell.why_not or None,
                             "plan": cell.plan and cell.plan.model_dump(mode="json")} for cell in cells])  # fmt: skip
            else:
                console().print(what_if_view(cells))
            return
        asked, given = _fitted(asked, given)
    found, where = _planned(asked, given, url)
    if against is not None:
        load(against, found)
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        console().print(plan_view(found, where))


def _is_job(file: Path) -> bool:
    """Whether this is to be taken for a job's id: no file is there, and ids have no dots."""
    return str(file).startswith("job-") and not file.suffix and not file.exists()


def schema() -> None:
    """Prints the JSON Schema of job files."""
    from moe.spec import json_schema
    from service.cli.view.output import print_json

    print_json(json_schema())


def _planned(asked: "PlanRequest", given: "Cluster | None", url: str | None) -> "tuple[Plan, str]":
    """(the plan, for what)."""
    if given is None:
        from service.cli.server import connect

        body: dict[str, Any] = {
            "spec": asked.spec.model_dump(mode="json", exclude_unset=True),
            "top": asked.top,
        }
        if asked.num_workers is not None:
            body["num_workers"] = asked.num_workers
        if asked.profile is not None:
            body["profile"] = asked.profile
        with connect(url) as client:
            return client.plan(body), f"the cluster of {client.url}"
    from moe.plan import plan_job

    nodes, each = given.num_nodes, given.devices_per_node
    on = (
        f"{nodes:,} nodes of {each:,} {given.device}" if nodes > 1 else f"one node of {each:,} {given.device}"
    )
    return plan_job(asked.spec, given, asked.num_workers, top=asked.top, profile=asked.profile), on


def _fitted(asked: "PlanRequest", given: "Cluster") -> "tuple[PlanRequest, Cluster]":
    """The same for the smallest cluster of this kind, with a worker on each device."""
    from moe.plan.search.what_if import smallest_cluster

    smallest = smallest_cluster(asked.spec, given, asked.profile)
    return asked.model_copy(update={"num_workers": smallest.num_devices}), smallest


def _cluster_of(
    file: Path | None, imagined: tuple[int | None, int | None, str | None], memory: str | None
) -> "Cluster | None":
    """The cluster that options tell of; None where they tell of none."""
    from service.cli.failures import Misuse

    is_imagined = any(each is not None for each in imagined)
    if file is not None:
        if is_imagined or memory is not None:
            raise Misuse("--cluster says all of a cluster; leave --num-nodes and its like out")
        from moe.plan import read_cluster

        return read_cluster(file)
    if memory is not None and not is_imagined:
        raise Misuse("--memory belongs to an imagined cluster; add --num-nodes and --device")
    return _imagined(*imagined, memory) if is_imagined else None


def _imagined(
    num_nodes: int | None, devices_per_node: int | None, device: str | None, memory: str | None
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
    )


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
