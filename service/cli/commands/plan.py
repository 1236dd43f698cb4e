"""`plan` and `schema`: a job's layout, and the fields of a job file. Runs nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.cluster_options import ClusterOptions
from service.cli.failures import Misuse
from service.cli.options import AsJson, Url

if TYPE_CHECKING:
    from moe.plan import Cluster, Plan, PlanRequest, Pools
    from service.cli.job_plan import PlanOutput

_CLUSTER = {field.name for field in fields(ClusterOptions)}
_FORM = {"save", "draw", "as_json"}
_WITH_MODULE = {"module", "sample", "hints", *_CLUSTER, *_FORM}
_WITH_DIFF = {"targets", "as_json"}
_WITH_JOB = {"targets", "url", "full", *_FORM}
_WITH_GRID = {"targets", "url", "what_if", "num_workers", "goal", "software", "top", "as_json", *_CLUSTER}


def plan(
    context: typer.Context,
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE | JOB | diff PLAN PLAN",
            show_default=False,
            help="A job file, YAML or JSON (- for standard input; ./diff for a file named diff); a "
            "job's id; or two saved plans to compare.",
        ),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Instead of FILE: function that builds your own module."),
    ] = None,
    sample: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="With --module: function that returns one batch.")
    ] = None,
    hints: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --module: placements to respect.", dir_okay=False)
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the plan here, as JSON.", dir_okay=False)
    ] = None,
    draw: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Draw the best layouts, or a module's plan, here.", dir_okay=False),
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Description of a cluster, YAML or JSON.", dir_okay=False)
    ] = None,
    num_nodes: Annotated[int | None, typer.Option(metavar="N", min=1, help="Nodes of a hypothetical cluster.")] = None,
    devices_per_node: Annotated[int | None, typer.Option(metavar="N", min=1, help="Devices per node.")] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE | FACTS",
            help="Device type: cpu, v100, a10g, a100-40, a100-80, l40s, rtx-4090, rtx-5090, h20, h800, "
            "h100, h200, b200, gb200, b300, gb300, mi300x, mi355x, tpu-v3; or a description: "
            "{name: x, memory_bytes: ...}.",
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory per device, such as 80GB. [the type's]")
    ] = None,
    price: Annotated[
        str | None, typer.Option(metavar="AMOUNT", help="Price per device and hour, in any currency.")
    ] = None,
    billing_unit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Devices billed together: 1 if rented singly. [a node's]")
    ] = None,
    num_workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1_000_000, help="Number of workers, instead of the file's.")
    ] = None,
    goal: Annotated[
        str | None,
        typer.Option(
            metavar="time|cost",
            help=(
                "Choose the number of workers, within the job's range, and the pool by the fastest or cheapest step."
            ),
        ),
    ] = None,
    software: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Software to predict host times for: ours-eager, megatron-graphs, ..."),
    ] = None,
    top: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=100, help="Number of layouts to report. [5]")
    ] = None,
    what_if: Annotated[
        str | None, typer.Option(metavar="GRID", help="Table over other values: experts=128,256,nodes=32,64.")
    ] = None,
    fit: Annotated[bool, typer.Option("--fit", help="Find the smallest sufficient cluster of this kind.")] = False,
    against: Annotated[Path | None, typer.Option(metavar="PLAN", help="Compare with a plan saved as JSON.")] = None,
    explain_against: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT",
            help="Why not this layout: tensor=2,expert=8 (keys as in parallel), or a plan saved as JSON.",
        ),
    ] = None,
    sensitive: Annotated[
        bool, typer.Option("--sensitivity", help="Effect of slower links and kernels, or less memory.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="All details: reasons, placements, memory and time by kind.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show the layout of a job and the reasons for it.

    Nothing is run. FILE is a job file, or a file with a job as `spec` and a `cluster`. If the file or an option
    describes a cluster, the plan is made here for that cluster, otherwise by the control plane for its own. A job's id
    instead of FILE shows its plan, with measurements next to predictions; diff compares two plans written by --save or
    --json. --module plans a module of your own, imported from the current folder: --module mypackage.model:build
    --sample mypackage.model:sample.
    """
    from service.cli.job_plan import PlanOutput, fetch_plan, output_plan

    words, output, options = (targets or [], PlanOutput(save, draw, as_json, full), _command_line_parameters(context))
    clusters = ClusterOptions(cluster, num_nodes, devices_per_node, device, memory, price, billing_unit)
    if draw is not None and draw.suffix != ".svg":
        raise Misuse(f"--draw {draw} writes an SVG picture; use a name that ends in .svg")
    if draw is not None and draw == save:
        raise Misuse(f"--save {save} and --draw each write a file; give them different names")
    if draw is not None:
        from moe.plan.svg import require_matplotlib

        require_matplotlib("--draw")
    if module is not None:
        if options - _WITH_MODULE:
            raise Misuse("--module accepts only --sample, cluster options, --hints, --save, --draw and --json")
        _answer_module(module, sample, hints, clusters, output)
        return
    if sample is not None or hints is not None:
        raise Misuse("--sample and --hints require --module")
    if words[:1] == ["diff"]:
        if len(words) != 3:
            raise Misuse(
                "diff compares two saved plans; write plan diff PLAN PLAN (or ./diff for a job file of that name)"
            )
        if options - _WITH_DIFF:
            raise Misuse("diff accepts only --json")
        _diff(Path(words[1]), Path(words[2]), as_json)
        return
    file = _one_of(words)
    if _is_job(file):
        if options - _WITH_JOB:
            raise Misuse(f"{file} already has a plan: a job's id accepts only --full, --save, --draw, --url and --json")
        output_plan(*fetch_plan(file, url), output)
        return
    if what_if is not None and options - _WITH_GRID:
        raise Misuse(
            "--what-if prints a table of plans; omit --fit, --against, --explain-against, "
            "--sensitivity, --save and --draw"
        )
    if sensitive and explain_against is not None:
        raise Misuse("--sensitivity and --explain-against each print a table; give one at a time")
    if fit and num_workers is not None:
        raise Misuse("--fit chooses the number of workers; omit --num-workers")
    request = _request(file, num_workers, top, goal, software)
    hardware = clusters.read() or request.cluster
    if what_if is not None:
        _show_grid(request, _require_cluster(hardware, "--what-if"), what_if, as_json)
        return
    _answer(request, hardware, url, Questions(fit, against, explain_against, sensitive), output)


def _command_line_parameters(context: typer.Context) -> set[str]:
    """Names of the parameters given on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _one_of(words: Sequence[str]) -> Path:
    """The single argument. Raises Misuse for none or several."""
    if not words:
        raise Misuse("give FILE, a job's id, diff and two plans, or --module")
    if len(words) > 1:
        raise Misuse(f"give one FILE or one job, not {len(words)}; compare two saved plans with plan diff PLAN PLAN")
    return Path(words[0])


def _request(
    file: Path, num_workers: int | None, top: int | None, goal: str | None, software: str | None
) -> "PlanRequest":
    """The file's request, overridden by options. Raises Misuse, SpecError, OSError."""
    from moe.interchange.expand import expand_request
    from moe.plan import plan_request
    from moe.plan.named_option import require_one_of
    from moe.plan.query import GOALS
    from moe.plan.software import SOFTWARE
    from service.cli.job_file import plain_job

    request = plan_request(expand_request(plain_job(file), None))
    updates: dict[str, Any] = {
        "num_workers": num_workers, "top": top, "goal": require_one_of("--goal", goal, GOALS),
        "software": require_one_of("--software", software, SOFTWARE),
    }  # fmt: skip
    query = replace(request.query, **{name: value for name, value in updates.items() if value is not None})
    return replace(request, query=query)


@dataclass(frozen=True)
class Questions:
    """Questions about a plan."""

    fit: bool
    against: Path | None
    explain_against: str | None
    sensitive: bool


def _answer(
    request: "PlanRequest",
    hardware: "Cluster | Pools | None",
    url: str | None,
    questions: Questions,
    output: "PlanOutput",
) -> None:
    """Make a plan, by the control plane without a given cluster, and answer the questions about it. Raises Misuse,
    SpecError, ClientError, OSError."""
    from moe.plan.plan_file import load, require_same
    from service.cli.job_plan import explain, make_plan, output_plan, plan_on_smallest, read_layout, show_sensitivity

    # Report invalid questions before a slow search or request.
    layout = None if questions.explain_against is None else read_layout(questions.explain_against)
    old_plan = None if questions.against is None else load(questions.against)
    if questions.sensitive and not questions.fit:
        hardware = _require_cluster(hardware, "--sensitivity")
    if questions.fit:
        request, hardware, plan_and_location = plan_on_smallest(request, _require_cluster(hardware, "--fit"))
    else:
        plan_and_location = make_plan(request, hardware, url)
    if hardware is not None:  # a control plane has noted it
        plan_and_location = _add_notes(request, *plan_and_location)
    if questions.against is not None and old_plan is not None:
        require_same(old_plan, plan_and_location[0], questions.against.name)
    if layout is not None:
        explain(layout, request, hardware, url, plan_and_location, output)
    elif questions.sensitive:
        show_sensitivity(request, _require_cluster(hardware, "--sensitivity"), plan_and_location, output)
    else:
        output_plan(*plan_and_location, output)


def _add_notes(request: "PlanRequest", plan: "Plan", location: str) -> tuple["Plan", str]:
    """(plan with notes on its job, description of its cluster)."""
    from moe.plan.notes import add_notes
    from moe.tasks.requirements import training_requirements

    return add_notes(plan, request.spec, training_requirements(request.spec, None)), location


def _require_cluster(cluster: "Cluster | Pools | None", option: str) -> "Cluster | Pools":
    """The given cluster. Raises Misuse without one."""
    if cluster is None:
        raise Misuse(f"{option} needs a cluster; add --cluster, or --num-nodes and --device")
    return cluster


def _answer_module(
    module: str, sample: str | None, hints: Path | None, clusters: ClusterOptions, output: "PlanOutput"
) -> None:
    """Plan a user's module and print the plan. Raises Misuse, SpecError, OSError."""
    from moe.plan import Pools
    from moe.plan.cluster.cluster import pools_problem
    from moe.spec import SpecError

    if sample is None:
        raise Misuse("--module requires --sample, the function that returns one batch")
    cluster = _require_cluster(clusters.read(), "--module")
    if isinstance(cluster, Pools):
        raise SpecError(pools_problem())
    from service.cli.job_plan import plan_module

    plan_module(module, sample, cluster, hints, output)


def _show_grid(request: "PlanRequest", hardware: "Cluster | Pools", what_if: str, as_json: bool) -> None:
    """Print a plan for each cell; exit with status 2 if there is none at all. Raises SpecError."""
    from moe.plan.search.what_if import grid, parse_axes
    from service.cli.view.output import console, print_json
    from service.cli.view.plan import what_if_view

    cells = grid(request, hardware, parse_axes(what_if))
    if as_json:
        print_json([{"values": dict(cell.values), "why_not": cell.why_not or None,
                     "plan": cell.plan and cell.plan.model_dump(mode="json")} for cell in cells])  # fmt: skip
    else:
        console().print(what_if_view(cells))
    if all(cell.plan is None for cell in cells):
        raise typer.Exit(2)


def _diff(first: Path, second: Path, as_json: bool) -> None:
    """Print the differences of two saved plans. Raises SpecError, OSError."""
    from moe.plan.plan_file import load
    from service.cli.view.comparison import diff_json, diff_view
    from service.cli.view.output import console, print_json

    plans = load(first), load(second)
    if as_json:
        print_json(diff_json(*plans))
    else:
        console().print(diff_view(*plans, str(first), str(second)))


def _is_job(file: Path) -> bool:
    """Whether the argument is a job's id: there is no such file, and ids have no dots."""
    return str(file).startswith("job-") and not file.suffix and not file.exists()


def schema(
    sweep: Annotated[bool, typer.Option("--sweep", help="Of files with `sweep`, for `shardyard sweep`.")] = False,
) -> None:
    """Print the JSON Schema of job files."""
    from moe.spec import json_schema
    from service.cli.view.output import print_json

    print_json(json_schema(with_sweep=sweep))
