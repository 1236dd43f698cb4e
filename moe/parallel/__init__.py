"""The only executor of a Plan: process groups, all-to-all, parameters cut up over ranks, gradients over the mesh."""

from moe.parallel.all_to_all import AllToAll, Traffic, exchange_rows
from moe.parallel.apply import apply
from moe.parallel.buffers import Room, buffers_of, keep_buffers, narrow, narrowed, values_changed
from moe.parallel.collective import CollectiveError, collective
from moe.parallel.gradients import clip_by_global_norm, forget_gradients, reduce_gradients
from moe.parallel.layout import Layout
from moe.parallel.parameters import Held, Part, declare, first_of, held_parameters, part_of, to_global
from moe.parallel.shares import TokenShares

__all__ = [
    "AllToAll",
    "CollectiveError",
    "Held",
    "Layout",
    "Part",
    "Room",
    "TokenShares",
    "Traffic",
    "apply",
    "buffers_of",
    "clip_by_global_norm",
    "collective",
    "declare",
    "exchange_rows",
    "first_of",
    "forget_gradients",
    "held_parameters",
    "keep_buffers",
    "narrow",
    "narrowed",
    "part_of",
    "reduce_gradients",
    "to_global",
    "values_changed",
]
