"""The only executor of a Plan: process groups, all-to-all, parameters cut up over ranks, gradients over the mesh."""

from moe.parallel.all_to_all import AllToAll, Traffic, exchange_rows
from moe.parallel.buffers import Room, buffers_of, keep_buffers, narrow, narrowed, values_changed
from moe.parallel.collective import CollectiveError, collective
from moe.parallel.fsdp import cut_up
from moe.parallel.gradients import clip_by_global_norm, forget_gradients, reduce_gradients
from moe.parallel.layout import Layout
from moe.parallel.parameters import Held, Part, held_parameters, new_parameter, to_global
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
    "buffers_of",
    "clip_by_global_norm",
    "collective",
    "cut_up",
    "exchange_rows",
    "forget_gradients",
    "held_parameters",
    "keep_buffers",
    "narrow",
    "narrowed",
    "new_parameter",
    "reduce_gradients",
    "to_global",
    "values_changed",
]
