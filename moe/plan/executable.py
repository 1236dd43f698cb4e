"""Refuses plans that can be made but not run yet."""

from collections.abc import Sequence

from moe.plan.candidate import Candidate, Options
from moe.plan.degrees import Degrees
from moe.plan.plan import Plan
from moe.plan.profile import ProfileName
from moe.spec import JobSpec, Problem, SpecError

_OF_A_PEER = "the layout of a peer"


def check_requested_features(spec: JobSpec) -> None:
    """Raise SpecError if the job asks for a feature without an executor."""
    parallel = spec.parallel
    candidate = Candidate(
        Degrees(pipeline=max(parallel.pipeline or 1, parallel.virtual_stages or 1)),
        Options(overlap=bool(parallel.overlap)),
    )
    if features := (*_without_executor(candidate), *_of_arithmetic(spec)):
        raise SpecError(cannot_be_run(features))


def not_yet(spec: JobSpec, candidate: Candidate, profile: ProfileName) -> tuple[str, ...]:
    """Features of a job and its layout that cannot be run yet; a peer's layout is always one."""
    layout = (_OF_A_PEER,) if profile != "ours" else ()
    graphs = _of_graphs(candidate) if spec.train.cuda_graphs else []
    return (*layout, *_without_executor(candidate), *_of_arithmetic(spec), *graphs)


def _of_arithmetic(spec: JobSpec) -> list[str]:
    features = ["fp8"] if spec.train.dtype == "fp8" else []
    return features + ["rows that travel in 8 bits"] * (spec.train.dispatch_dtype is not None)


def _of_graphs(candidate: Candidate) -> list[str]:
    """Why micro-batches of the layout cannot be CUDA graphs."""
    degrees = candidate.degrees
    communicates = candidate.is_sharded or max(degrees.expert, degrees.expert_tensor, degrees.tensor) > 1
    return ["CUDA graphs of micro-batches that communicate"] * communicates


def refusal(plan: Plan) -> Problem | None:
    """Return why a plan, even one written by hand, cannot be run; None if it can."""
    features = dict.fromkeys((*plan.not_yet, *_without_executor(plan.candidate)))
    if plan.profile != "ours":
        features[_OF_A_PEER] = None
    return cannot_be_run(tuple(features), "plan") if features else None


def cannot_be_run(features: Sequence[str], path: str = "parallel") -> Problem:
    """Problem of a plan, or of a job with no runnable layout."""
    return Problem("not_runnable", path, None, f"uses features that cannot be run yet: {', '.join(features)}",
                   "omit it, or only plan it: shardyard plan")  # fmt: skip


def _without_executor(candidate: Candidate) -> list[str]:
    """Degrees and options without an executor."""
    degrees, options, features = candidate.degrees, candidate.options, []
    if degrees.pipeline > 1:
        features.append("pipeline stages")
    if options.overlap:
        features.append("micro-batches side by side")
    return features
