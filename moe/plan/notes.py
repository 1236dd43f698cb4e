"""Notes on a planned job: unset values that matter, and inputs that a run would lack."""

from collections.abc import Sequence
from dataclasses import replace

from moe.plan.plan import Plan
from moe.plan.search.remedies import unwritten_float32
from moe.spec import JobSpec, ModuleModelSpec, Problem


def add_notes(plan: Plan, spec: JobSpec, missing: Sequence[Problem] = ()) -> Plan:
    """Return the plan with the job's relevant defaults and `missing` inputs filled in."""
    is_module = isinstance(spec.model, ModuleModelSpec)
    defaults = {} if is_module else dict.fromkeys(unwritten_float32(spec), "float32")
    needs = tuple(str(replace(problem, remedy="")) for problem in missing)
    return plan.model_copy(update={"missing": needs, "defaults": defaults})
