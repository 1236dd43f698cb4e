"""The layouts that there are to choose from, ranked; the plan of the best, and why."""

from moe.plan.search.search import LayoutSearch, plan_job

__all__ = ["LayoutSearch", "plan_job"]
