"""Plans of jobs and of user modules, made locally or by a control plane: saved, printed, compared."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from moe.plan import Cluster, Plan, PlanRequest, Pools, plan_on_cluster
from moe.plan.plan_file import load
from moe.plan.requested_layout import Layout, parse_layout, pinned_layout, request_layout
from moe.plan.search.pools import fit_pools
from moe.plan.search.sensitivity import sensitivity
from moe.plan.search.what_if import smallest_cluster
from moe.spec import SpecError, spec_error
from moe.spec.files import read_plain
from moe.spec.module import CODE_REMEDY, is_code
from service.cli.failures import CommandError, Misuse
from service.cli.job_file import write_atomically
from service.cli.view.comparison import explain_json, explained_view
from service.cli.view.output import console, print_json
from service.cli.view.plan import plan_view
from service.cli.view.sensitivity import sensitivity_view
from service.cli.view.verdict import short_plan_view
from service.planner.planning_process import PlanningLimits, ask
from service.planner.request import ModuleRequest

_OPTION = "--explain-against"


@dataclass(frozen=True)
class PlanOutput:
    """Output options of a plan."""

    save: Path | None = None
    draw: Path | None = None
    as_json: bool = False
    full: bool = False
    """Print everything instead of a verdict and a short table."""


def make_plan(request: PlanRequest, cluster: Cluster | Pools | None, url: str | None) -> tuple[Plan, str]:
    """(plan, description of its cluster). Raises SpecError, ClientError."""
    if cluster is None:
        from service.cli.server import connect

        body: dict[str, Any] = {"spec": request.spec.model_dump(mode="json", exclude_unset=True)}
        for name in ("top", "num_workers", "profile", "software", "goal"):
            if (value := getattr(request.query, name)) is not None:
                body[name] = value
        with connect(url) as client:
            return client.plan(body), f"the cluster of {client.url}"
    plan = plan_on_cluster(request.spec, cluster, request.query)
    return plan, _describe_location(plan, cluster)


def show_sensitivity(
    request: PlanRequest, cluster: Cluster | Pools, plan_and_location: tuple[Plan, str], output: PlanOutput
) -> None:
    """Print a plan and its sensitivity; JSON is `{"plan": ..., "sensitivity": [...]}`. Raises SpecError."""
    plan, location = plan_and_location
    changes = sensitivity(request, _pool_of(plan, cluster), plan)
    _write(plan, output)
    if not output.as_json:
        parts = (_view(plan, location, output), "", Text("assumptions", "bold"), sensitivity_view(plan, changes))
        console().print(Group(*parts))
        return
    items = [{"what": change.description, "step_s": change.step_s, "why_not": change.why_not or None,
             "best": change.best and change.best.model_dump(mode="json")} for change in changes]  # fmt: skip
    print_json({"plan": plan.model_dump(mode="json"), "sensitivity": items})


def plan_on_smallest(request: PlanRequest, cluster: Cluster | Pools) -> tuple[PlanRequest, Cluster, tuple[Plan, str]]:
    """(request with a worker per device, smallest cluster of this kind that can run the job, (plan, location)); for
    pools, of one pool's kind. Raises SpecError if none holds the job."""
    if isinstance(cluster, Pools):
        plan, smallest = fit_pools(request.spec, cluster, request.query)
        plan_and_location = plan, f"pool {plan.pool}, {_nodes(smallest)}"
    else:
        smallest, fewest = smallest_cluster(request.spec, cluster, request.query.profile)
        plan, location = make_plan(_on_all_of(request, smallest), smallest, None)
        plan_and_location = plan.model_copy(update={"fewest": fewest}), location
    return _on_all_of(request, smallest), smallest, plan_and_location


def _on_all_of(request: PlanRequest, cluster: Cluster) -> PlanRequest:
    """The request with a worker per device, and so without a goal."""
    query = replace(request.query, num_workers=cluster.num_devices, goal=None)
    return replace(request, query=query)


def _pool_of(plan: Plan, hardware: Cluster | Pools) -> Cluster:
    if isinstance(hardware, Cluster):
        return hardware.at_least(plan.num_workers)
    assert plan.pool is not None
    return hardware.cluster(plan.pool)


def _describe_location(plan: Plan, hardware: Cluster | Pools) -> str:
    if isinstance(hardware, Cluster):
        cluster = hardware.at_least(plan.num_workers)
        return _nodes(cluster) if cluster == hardware else f"{_nodes(cluster)}; {_nodes(hardware)} has too few devices"
    return f"pool {plan.pool}, {_nodes(_pool_of(plan, hardware))}"


def _nodes(cluster: Cluster) -> str:
    nodes, node_words = cluster.num_nodes, f"{cluster.devices_per_node:,} {cluster.device}"
    return f"{nodes:,} nodes of {node_words}" if nodes > 1 else f"one node of {node_words}"


def fetch_plan(job_id: Path, url: str | None) -> tuple[Plan, str]:
    """(plan of a job, description of its cluster). Raises Misuse, CommandError, ClientError."""
    from service.cli.server import connect, find_job
    from service.client import ApiError

    with connect(url) as client:
        try:
            job = find_job(client, str(job_id))
        except Misuse as error:
            raise Misuse(f"there is no file {job_id}, and {error}") from None
        try:
            return job.plan(), f"the cluster of {client.url} ({job_id})"
        except ApiError as error:
            if error.status != 404:
                raise
            raise CommandError(str(error)) from None  # the job exists, but has no plan yet


def output_plan(plan: Plan, location: str, output: PlanOutput) -> None:
    """Write the requested files and print the plan. Raises SpecError, OSError."""
    _write(plan, output)
    if output.as_json:
        print(_text(plan))
    else:
        console().print(_view(plan, location, output))


def _view(plan: Plan, location: str, output: PlanOutput) -> RenderableType:
    in_full = output.full or plan.module is not None
    return plan_view(plan, location) if in_full else short_plan_view(plan, location)


def _write(plan: Plan, output: PlanOutput) -> None:
    if output.draw is not None:
        from moe.plan.picture import draw_svg

        write_atomically(output.draw, draw_svg(plan))
    if output.save is not None:
        write_atomically(output.save, _text(plan) + "\n")


def _text(plan: Plan) -> str:
    """JSON with sorted keys, except for a module's plan, whose mesh axes are ordered."""
    is_sorted = plan.module is None
    return json.dumps(plan.model_dump(mode="json"), indent=2, ensure_ascii=False, sort_keys=is_sorted)


def explain(
    layout: Layout,
    request: PlanRequest,
    cluster: Cluster | Pools | None,
    url: str | None,
    plan_and_location: tuple[Plan, str],
    output: PlanOutput,
) -> None:
    """Print why the plan was preferred to `layout`. Raises SpecError if that does not fit; OSError, ClientError."""
    plan, location = plan_and_location
    if plan.module is not None:
        raise Misuse("--explain-against compares layouts of built-in models; a module's job has only one")
    # the goal has already chosen the number of workers
    request = replace(request, query=replace(request.query, goal=None))
    cluster = None if cluster is None else _pool_of(plan, cluster)
    try:
        alternative, _ = make_plan(request_layout(request, layout, plan.num_workers), cluster, url)
    except SpecError as error:
        raise SpecError(replace(problem, path=f"{_OPTION}: {problem.path}") for problem in error.problems) from None
    _write(plan, output)
    if output.as_json:
        print_json(explain_json(plan, alternative, cluster))
    else:
        console().print(explained_view(plan, alternative, location, cluster))


def read_layout(text: str) -> Layout:
    """Parse a layout, or read it from the plan file `text`. Raises SpecError, OSError."""
    if os.path.isfile(text):  # `Path` raises for layouts longer than a file name
        return pinned_layout(load(text))
    if "=" not in text:
        raise spec_error("not_found", _OPTION, text, "is neither a layout nor an existing file",
                    "write it as tensor=2,expert=8, or name a plan written by --save")  # fmt: skip
    return parse_layout(text, _OPTION)


def plan_module(build: str, sample: str, cluster: Cluster, hints: Path | None, output: PlanOutput) -> None:
    """Plan the module, write the requested files, print the plan. Raises SpecError, OSError."""
    for path, code in (("--module", build), ("--sample", sample)):
        if not is_code(code):
            raise spec_error("invalid_value", path, code, "must be module:function", CODE_REMEDY)
    request = ModuleRequest(
        build=build, sample=sample, cluster=cluster, hints=_hints(hints), picture=output.draw is not None
    )  # fmt: skip
    answer = ask(request, PlanningLimits(), shows_output=True)
    text = json.dumps(answer.plan, indent=1, sort_keys=True)
    if output.save is not None:
        write_atomically(output.save, text + "\n")
    if output.draw is not None:
        write_atomically(output.draw, answer.picture)
    typer.echo(text if output.as_json else answer.explained)


def _hints(path: Path | None) -> dict[str, object]:
    hints = {} if path is None else read_plain(path)
    if not isinstance(hints, dict) or not all(isinstance(name, str) for name in hints):
        raise spec_error("wrong_type", "--hints", str(path), "must map names to hints",
                    'write it as "*.experts.*": {split: 0}')  # fmt: skip
    return hints
