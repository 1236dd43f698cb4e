"""Execution of a Plan: process groups, all-to-all, sharded parameters, and gradient reduction over the mesh."""

from moe.parallel.apply import apply
from moe.parallel.buffers import GradBuffer, as_dtype, buffers_of, keep_buffers, narrow, narrowed, values_changed
from moe.parallel.collective import CollectiveError, collective
from moe.parallel.gradients import clip_by_global_norm, forget_gradients, reduce_gradients
from moe.parallel.mesh import Layout
from moe.parallel.parameters import (
    LocalParameter,
    ParameterShard,
    declare,
    extent,
    first_of,
    freeze_parameters,
    local_parameters,
    matrix_of,
    part_of,
    quant_schemes_of,
    to_global,
)
from moe.parallel.quantized import QuantizedWeight, QuantScheme
from moe.parallel.tensor import SequenceShard, SequenceSharded

__all__ = [
    "QuantizedWeight", "QuantScheme", "CollectiveError", "Layout", "LocalParameter", "ParameterShard", "GradBuffer",
    "SequenceSharded", "SequenceShard", "apply", "as_dtype", "buffers_of", "clip_by_global_norm", "quant_schemes_of",
    "collective", "declare", "extent", "first_of", "forget_gradients", "freeze_parameters", "keep_buffers",
    "local_parameters", "matrix_of", "narrow", "narrowed", "part_of", "reduce_gradients", "to_global", "values_changed",
]  # fmt: skip
