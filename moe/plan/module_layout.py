"""Sharding of a user's module in a plan: plain values, as this package imports no torch."""

from typing import Any

from pydantic import Field

from moe.spec.base import Count, Frozen


class ModuleLayout(Frozen):
    """Sharding plan of one module, made from its captured computation."""

    mesh: dict[str, Count]
    """Ranks along each mesh axis, outermost first."""
    plan: dict[str, Any]
    """JSON form of the `moe.sharding` plan."""
    explained: str = Field(max_length=1_000_000)
    """The same plan in words."""
