"""Plans of jobs: made here or by a control plane, written, printed, and explained against another layout."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from moe.plan import Cluster, Plan, PlanRequest, Pools, plan_anywhere
from moe.plan.asked_layout import Layout, asking_for, layout_to_ask, parse_layout
from moe.plan.search.pools import How, fit_pools
from moe.plan.search.sensitivity import sensitivity
from moe.plan.search.what_if import smallest_cluster
from moe.plan.stored import load
from moe.spec import Problem, SpecError
from service.cli.failures import Failed, Misuse
from service.cli.view.comparison import explain_json, explained_view
from service.cli.view.output import console, print_json
from service.cli.view.plan import plan_view
from service.cli.view.sensitivity import sensitivity_view
from service.cli.view.verdict import short_plan_view
from service.cli.whole_file import write_whole

_OPTION = "--explain-against"


@dataclass(frozen=True)
class Written:
    """Files and form that a plan is written in."""

    save: Path | None = None
    draw: Path | None = None
    as_json: bool = False
    full: bool = False
    """Whether all that is known of a plan is printed, or a verdict and a short table."""


def planned(asked: PlanRequest, given: Cluster | Pools | None, url: str | None) -> tuple[Plan, str]:
    """(the plan, for what). Raises SpecError, ClientError."""
    if given is None:
        from service.cli.server import connect

        body: dict[str, Any] = {
            "spec": asked.spec.model_dump(mode="json", exclude_unset=True),
            "top": asked.top,
        }
        if asked.num_workers is not None:
            body["num_workers"] = asked.num_workers
        for name in ("profile", "software", "goal"):
            if (value := getattr(asked, name)) is not None:
                body[name] = value
        with connect(url) as client:
            return client.plan(body), f"the cluster of {client.url}"
    plan = plan_anywhere(asked.spec, given, asked.num_workers, _how(asked))
    return plan, _where(plan, given)


def depends(asked: PlanRequest, given: Cluster | Pools, made: tuple[Plan, str], written: Written) -> None:
    """Prints a plan, and what it depends on: as JSON, `{"plan": ..., "sensitivity": [...]}`. Raises SpecError."""
    plan, where = made
    changes = sensitivity(asked, _pool_of(plan, given), plan)
    _write(plan, written)
    if not written.as_json:
        parts = (
            _view(plan, where, written),
            "",
            Text("what it depends on", "bold"),
            sensitivity_view(plan, changes),
        )
        console().print(Group(*parts))
        return
    items = [{"what": change.what, "step_s": change.step_s, "why_not": change.why_not or None,
             "best": change.best and change.best.model_dump(mode="json")} for change in changes]  # fmt: skip
    print_json({"plan": plan.model_dump(mode="json"), "sensitivity": items})


def fitted(asked: PlanRequest, given: Cluster | Pools) -> tuple[PlanRequest, Cluster, tuple[Plan, str]]:
    """(the request, for a worker on each device, the smallest cluster of the kind that can run the job, the plan and
    what it is for); of pools, of the kind of one of them. Raises SpecError where none holds it."""
    if isinstance(given, Pools):
        plan, smallest = fit_pools(asked.spec, given, _how(asked))
        plan_and_where = plan, f"pool {plan.pool}, {_nodes(smallest)}"
    else:
        smallest, fewest = smallest_cluster(asked.spec, given, asked.profile)
        plan, where = planned(_on_all_of(asked, smallest), smallest, None)
        plan_and_where = plan.model_copy(update={"fewest": fewest}), where
    return _on_all_of(asked, smallest), smallest, plan_and_where


def _on_all_of(request: PlanRequest, cluster: Cluster) -> PlanRequest:
    """The request for a worker on each device, which leaves a goal nothing to choose."""
    return request.model_copy(update={"num_workers": cluster.num_devices, "goal": None})


def _how(request: PlanRequest) -> How:
    return How(request.goal, top=request.top, profile=request.profile, software=request.software)


def _pool_of(plan: Plan, hardware: Cluster | Pools) -> Cluster:
    """The nodes, of one kind, that a plan lies on. Raises SpecError where it lies on several."""
    if isinstance(hardware, Cluster):
        return hardware.at_least(plan.num_workers)
    if plan.pool is None:
        raise SpecError(
            Problem(
                "unsupported",
                "cluster.pools",
                " and ".join(plan.pools),
                "are several that the plan's stages lie on, and layouts are compared on one kind of nodes",
                "leave out cluster.between, or give one pool as the cluster",
            )
        )
    return hardware.cluster(plan.pool)


def _where(plan: Plan, hardware: Cluster | Pools) -> str:
    if isinstance(hardware, Cluster):
        cluster = hardware.at_least(plan.num_workers)
        return (
            _nodes(cluster)
            if cluster == hardware
            else f"{_nodes(cluster)}; {_nodes(hardware)} has too few devices"
        )
    pools = [f"pool {name}, {_nodes(hardware.cluster(name))}" for name in plan.pools]
    return " and ".join(pools)


def _nodes(cluster: Cluster) -> str:
    nodes, node_words = cluster.num_nodes, f"{cluster.devices_per_node:,} {cluster.device}"
    return f"{nodes:,} nodes of {node_words}" if nodes > 1 else f"one node of {node_words}"


def of_job(job_id: Path, url: str | None) -> tuple[Plan, str]:
    """(the plan that a job has, for what). Raises Misuse, Failed, ClientError."""
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
            raise Failed(str(error)) from None  # the job is there, and has no plan yet


def give(plan: Plan, where: str, written: Written) -> None:
    """Writes the files that were asked for, and prints the plan. Raises SpecError, OSError."""
    _write(plan, written)
    if written.as_json:
        print(_text(plan))
    else:
        console().print(_view(plan, where, written))


def _view(plan: Plan, where: str, output: Written) -> RenderableType:
    in_full = output.full or plan.module is not None
    return plan_view(plan, where) if in_full else short_plan_view(plan, where)


def _write(plan: Plan, output: Written) -> None:
    if output.draw is not None:
        from moe.plan.picture import drawn

        write_whole(output.draw, drawn(plan))
    if output.save is not None:
        write_whole(output.save, _text(plan) + "\n")


def _text(plan: Plan) -> str:
    """JSON; keys are sorted but where their order says something: axes of a module's mesh."""
    is_sorted = plan.module is None
    return json.dumps(plan.model_dump(mode="json"), indent=2, ensure_ascii=False, sort_keys=is_sorted)


def explain(
    layout: Layout,
    asked: PlanRequest,
    given: Cluster | Pools | None,
    url: str | None,
    chosen: tuple[Plan, str],
    written: Written,
) -> None:
    """Prints why the chosen plan, and not the `layout`. Raises SpecError where that does not fit; OSError,
    ClientError."""
    plan, where = chosen
    if plan.module is not None:
        raise Misuse(
            "--explain-against compares layouts of this library's models; a module's job has one layout alone"
        )
    asked = asked.model_copy(update={"goal": None})  # which chose the workers that both have
    given = None if given is None else _pool_of(plan, given)
    try:
        alternative, _ = planned(asking_for(asked, layout, plan.num_workers), given, url)
    except SpecError as error:
        raise SpecError(
            replace(problem, path=f"{_OPTION}: {problem.path}") for problem in error.problems
        ) from None
    _write(plan, written)
    if written.as_json:
        print_json(explain_json(plan, alternative, given))
    else:
        console().print(explained_view(plan, alternative, where, given))


def read_layout(text: str) -> Layout:
    """The layout that `text` asks for, or that of the plan in the file that it names. Raises SpecError, OSError."""
    if os.path.isfile(text):  # a layout may be longer than a file's name, which `Path` raises for
        return layout_to_ask(load(text))
    if "=" not in text:
        raise SpecError(
            Problem("not_found", _OPTION, text, "is neither a layout nor a file that is there",
                    "write it as tensor=2,expert=8, or name a plan that --save wrote")
        )  # fmt: skip
    return parse_layout(text, _OPTION)
