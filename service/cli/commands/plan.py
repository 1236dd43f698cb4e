"""`plan` and `schema`: how a job would be laid out, and what a job file may say. Nothing is run."""

from typing import Annotated

import typer

from service.cli.options import AsJson, JobFile, Url


def plan(
    file: JobFile,
    num_nodes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Nodes of an imagined cluster.")
    ] = None,
    devices_per_node: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Devices of each of its nodes.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="What the devices are: cpu, a100-80, h100, h200, b200, tpu-v3."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of one device, such as 80GB; the type's own if left out."),
    ] = None,
    num_workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Workers, instead of what the file says.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Shows how a job would be laid out, and why.

    Nothing is run. With --num-nodes, --devices-per-node or --device the plan is made here, for that cluster;
    otherwise the control plane makes it for its own.
    """
    from service.cli.failures import Misuse
    from service.cli.view.output import console, print_json
    from service.cli.view.plan import plan_view

    if num_nodes is None and devices_per_node is None and device is None:
        if memory is not None or num_workers is not None:
            raise Misuse(
                "--memory and --num-workers belong to an imagined cluster; add --num-nodes and --device"
            )
        from service.cli.server import connect

        with connect(url) as client:
            found, where = client.plan(file), f"the cluster of {client.url}"
    else:
        from moe.plan import DEVICES, Cluster, plan_job
        from moe.spec import read_job

        spec = read_job(file)
        type = device or "cpu"
        if type not in DEVICES:
            raise Misuse(
                f"--device (={type!r}) must be a device type known here; use one of {', '.join(DEVICES)}"
            )
        nodes, each = num_nodes or 1, devices_per_node or 1
        memory_bytes = _num_bytes(memory) if memory else DEVICES[type].memory_bytes
        cluster = Cluster(num_nodes=nodes, devices_per_node=each, device=type, memory_bytes=memory_bytes)
        found = plan_job(spec, cluster, num_workers)
        where = f"{nodes:,} nodes of {each:,} {type}" if nodes > 1 else f"one node of {each:,} {type}"
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        console().print(plan_view(found, where))


def schema() -> None:
    """Prints the JSON Schema of job files."""
    from moe.spec import json_schema
    from service.cli.view.output import print_json

    print_json(json_schema())


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
