"""Notes on the job that a plan was asked for: what it leaves out, and what it lacks to be run."""

from collections.abc import Sequence
from dataclasses import replace

from moe.plan.plan import Plan
from moe.spec import JobSpec, ModuleModelSpec, Problem


def noted(plan: Plan, spec: JobSpec, missing: Sequence[Problem] = ()) -> Plan:
    """The plan with notes on its job, and with what the job is `missing` to be trained."""
    defaults = {}
    if not isinstance(spec.model, ModuleModelSpec) and "dtype" not in spec.train.model_fields_set:
        defaults["train.dtype"] = spec.train.dtype
    needs = tuple(str(replace(problem, remedy="")) for problem in missing)
    return plan.model_copy(update={"missing": needs, "defaults": defaults})
