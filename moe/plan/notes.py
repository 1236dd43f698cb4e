"""Notes on the job that a plan was asked for: what it leaves out, and what it lacks to be run."""

from collections.abc import Sequence
from dataclasses import replace

from moe.plan.plan import Plan
from moe.plan.search.remedies import unwritten_float32
from moe.spec import JobSpec, ModuleModelSpec, Problem


def with_notes(plan: Plan, spec: JobSpec, missing: Sequence[Problem] = ()) -> Plan:
    """The plan with notes on its job, and with what the job is `missing` to be trained."""
    is_module = isinstance(spec.model, ModuleModelSpec)
    defaults = {} if is_module else dict.fromkeys(unwritten_float32(spec), "float32")
    needs = tuple(str(replace(problem, remedy="")) for problem in missing)
    return plan.model_copy(update={"missing": needs, "defaults": defaults})
