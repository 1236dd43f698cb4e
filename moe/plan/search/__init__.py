"""Layout search: ranks candidate layouts, and explains the best."""

from moe.plan.search.search import LayoutSearch, plan_job

__all__ = ["LayoutSearch", "plan_job"]
