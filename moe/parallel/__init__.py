"""The only executor of a Plan: process groups, all-to-all, gradients over the mesh."""

from moe.parallel.all_to_all import AllToAll, Traffic, exchange_rows
from moe.parallel.collective import CollectiveError, collective
from moe.parallel.gradients import clip_by_global_norm, reduce_gradients
from moe.parallel.layout import Layout
from moe.parallel.parameters import (
    expert_parameters,
    is_expert,
    mark_expert,
    sharded_state,
    to_global,
)
from moe.parallel.shares import TokenShares

__all__ = [
    "AllToAll",
    "CollectiveError",
    "Layout",
    "TokenShares",
    "Traffic",
    "clip_by_global_norm",
    "collective",
    "exchange_rows",
    "expert_parameters",
    "is_expert",
    "mark_expert",
    "reduce_gradients",
    "sharded_state",
    "to_global",
]
