"""How a job will be laid out: cluster facts, memory and time models, and the plan. Arithmetic only: no torch."""

from moe.plan.cluster import DEVICES, Cluster, Device
from moe.plan.degrees import Degrees
from moe.plan.fit import fit_problems
from moe.plan.plan import MemoryEstimate, Plan, RunnerUp, TimeEstimate
from moe.plan.search import plan_job

__all__ = [
    "DEVICES",
    "Cluster",
    "Degrees",
    "Device",
    "MemoryEstimate",
    "Plan",
    "RunnerUp",
    "TimeEstimate",
    "fit_problems",
    "plan_job",
]
