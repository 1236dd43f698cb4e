"""What can be planned, but not be run yet."""

from moe.plan.candidate import Candidate
from moe.plan.profile import EXECUTED
from moe.spec import JobSpec


def not_yet(spec: JobSpec, candidate: Candidate) -> tuple[str, ...]:
    """What of a layout cannot be run yet, in words; empty where it can be run."""
    degrees, found = candidate.degrees, []
    if spec.model.kind not in EXECUTED:
        found.append(f"{spec.model.kind} models")
    if degrees.pipeline > 1:
        found.append("pipeline stages")
    if degrees.context > 1:
        found.append("context ranks")
    if candidate.cut_up and candidate.sharding != "parameters":
        found.append(f"sharding of {candidate.sharding} alone")
    if candidate.overlap:
        found.append("micro-batches side by side")
    if spec.train.dtype == "fp8":
        found.append("fp8")
    return tuple(found)
