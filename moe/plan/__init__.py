"""Planner: cluster facts, memory and time models, layout search and the plan. No torch."""

from typing import Any

from moe.deprecation import resolve_alias
from moe.plan.cluster.calibration import Calibration
from moe.plan.cluster.cluster import Cluster, Link
from moe.plan.cluster.devices import DEVICES, Device
from moe.plan.cluster.facts import DeviceFacts
from moe.plan.cluster.pools import Pools, cluster_of, read_cluster
from moe.plan.degrees import Degrees
from moe.plan.fit import fit_problems, stage_problems
from moe.plan.module_layout import ModuleLayout
from moe.plan.money import MoneyEstimate
from moe.plan.plan import BlockShare, MadeFor, MemoryEstimate, Plan, RunnerUp, TimeEstimate, Trial
from moe.plan.query import PlanQuery
from moe.plan.request import PlanRequest, plan_request, read_plan_request
from moe.plan.search.pools import plan_on_cluster
from moe.plan.search.search import LayoutSearch, plan_job
from moe.plan.search.workers import largest_divisible

_ALIASES = {"plan_anywhere": "plan_on_cluster"}
"""Deprecated names and the new ones."""


def __getattr__(name: str) -> Any:
    return resolve_alias(__name__, name, _ALIASES, globals())


__all__ = [
    "DEVICES", "BlockShare", "Calibration", "Cluster", "Degrees", "Device", "DeviceFacts", "Link", "MadeFor",
    "MemoryEstimate", "ModuleLayout", "MoneyEstimate", "Plan", "PlanQuery", "PlanRequest", "Pools", "RunnerUp",
    "LayoutSearch", "TimeEstimate", "Trial", "cluster_of", "fit_problems", "largest_divisible",
    "plan_on_cluster", "plan_job", "plan_request", "read_cluster", "read_plan_request", "stage_problems",
]  # fmt: skip
