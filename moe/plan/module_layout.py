"""Layout of a user's module in a plan: what `moe.sharding` has planned, as plain values, since no torch is here."""

from typing import Any

from pydantic import Field

from moe.spec.base import Count, Frozen


class ModuleLayout(Frozen):
    """Plan of one module's tensors, made from what it computes."""

    mesh: dict[str, Count]
    """Ranks along each of its axes, outermost first."""
    plan: dict[str, Any]
    """The plan of `moe.sharding`, as its JSON has it."""
    explained: str = Field(max_length=1_000_000)
    """The plan in words."""
