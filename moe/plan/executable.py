"""Checks whether a plan can be run: features without an executor, and pipeline schedules that do not fit."""

from collections.abc import Sequence
from dataclasses import replace

from moe.plan.candidate import Candidate, Options
from moe.plan.degrees import Degrees
from moe.plan.plan import Plan
from moe.plan.profile import ProfileName
from moe.plan.schedule import micro_batches_problem
from moe.spec import JobSpec, Problem, SpecError
from moe.spec.errors import RuleError
from moe.spec.parallel import check_virtual_stages
from moe.spec.stages import format_stages

_PEER_LAYOUT = "the layout of a peer"


def check_requested_features(spec: JobSpec) -> None:
    """Raise SpecError if the job asks for a feature without an executor."""
    parallel = spec.parallel
    degrees = Degrees(fsdp=parallel.fsdp or 1, expert_fsdp=parallel.expert_fsdp or 1)
    options = Options(overlap=bool(parallel.overlap), sharding=parallel.sharding or "optimizer")  # unset, it can be any
    if features := (*_without_executor(Candidate(degrees, options)), *_arithmetic_features(spec)):
        raise SpecError(cannot_be_run(features))


def not_yet(spec: JobSpec, candidate: Candidate, profile: ProfileName) -> tuple[str, ...]:
    """Features of a job and its layout that cannot be run yet; a peer's layout is always one."""
    layout = (_PEER_LAYOUT,) if profile != "ours" else ()
    graphs = _graph_features(candidate) if spec.train.cuda_graphs else []
    return (*layout, *_without_executor(candidate), *_arithmetic_features(spec), *graphs)


def _arithmetic_features(spec: JobSpec) -> list[str]:
    """Dtypes of a job without an executor."""
    features = ["fp8"] if spec.train.dtype == "fp8" else []
    return features + ["rows that travel in 8 bits"] * (spec.train.dispatch_dtype is not None)


def _graph_features(candidate: Candidate) -> list[str]:
    """CUDA graphs, if micro-batches of the layout communicate."""
    degrees = candidate.degrees
    axes = (degrees.expert, degrees.expert_tensor, degrees.tensor, degrees.context, degrees.pipeline)
    communicates = candidate.is_sharded or max(axes) > 1
    return ["CUDA graphs of micro-batches that communicate"] * communicates


def refusal(plan: Plan) -> Problem | None:
    """Return why a plan, even one written by hand, cannot be run; None if it can."""
    features = dict.fromkeys((*plan.not_yet, *_without_executor(plan.candidate)))
    if plan.profile != "ours":
        features[_PEER_LAYOUT] = None
    return cannot_be_run(tuple(features), "plan") if features else _schedule_problem(plan.candidate)


def _schedule_problem(candidate: Candidate) -> Problem | None:
    """Problem of a pipeline whose stages or micro-batches do not fit its schedule."""
    pipeline, options = candidate.degrees.pipeline, candidate.options
    if pipeline == 1:
        return None
    try:
        check_virtual_stages(options.pipeline_schedule, options.virtual_stages)
    except RuleError as error:
        return Problem(error.code, "options", None, error.rule, error.remedy)
    num_stages = pipeline * options.virtual_stages
    if options.stages is not None and len(options.stages) != num_stages:
        return Problem("mismatch", "options.stages", format_stages(options.stages),
                       f"must list the layers of {num_stages} stages, {options.virtual_stages} on each rank",
                       "list a number for each stage, or omit it")  # fmt: skip
    problem = micro_batches_problem(options.pipeline_schedule, pipeline, options.num_micro_batches)
    return None if problem is None else replace(problem, path="options.schedule")


def cannot_be_run(features: Sequence[str], path: str = "parallel") -> Problem:
    """Problem of a plan, or of a job with no runnable layout."""
    return Problem("not_runnable", path, None, f"uses features that cannot be run yet: {', '.join(features)}",
                   "omit it, or only plan it: shardyard plan")  # fmt: skip


def _without_executor(candidate: Candidate) -> list[str]:
    """Degrees and options without an executor."""
    if candidate.options.overlap and candidate.gathers:  # one micro-batch would free what the other has gathered
        return ["micro-batches side by side under FSDP"]
    return []
