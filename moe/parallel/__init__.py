"""Execution of a Plan: process groups, all-to-all, sharded parameters, and gradient reduction over the mesh."""

from moe.parallel.apply import apply
from moe.parallel.buffers import GradBuffer, as_dtype, buffers_of, cast_parameter, keep_buffers, narrow, values_changed
from moe.parallel.collective import CollectiveError, collective
from moe.parallel.context import ContextParallel, ContextShard
from moe.parallel.deferred_gradients import DeferredGradients, deferred_gradients, weight_gradient
from moe.parallel.gradients import clip_factor, discard_gradients, global_norm, scale_gradients
from moe.parallel.mesh import Layout
from moe.parallel.optimizer_shards import OptimizerShards
from moe.parallel.parameters import (
    LocalParameter,
    ParameterShard,
    declare,
    extent,
    freeze_parameters,
    local_parameters,
    matrix_of,
    quant_schemes_of,
    shard_of,
    shard_offsets,
    to_global,
)
from moe.parallel.quantized import QuantizedWeight, QuantScheme
from moe.parallel.reduction import GradientReduction, reduce_gradients
from moe.parallel.tensor import SequenceParallel, SequenceShard

__all__ = [
    "QuantizedWeight", "QuantScheme", "CollectiveError", "Layout", "LocalParameter", "ParameterShard", "GradBuffer",
    "GradientReduction", "OptimizerShards", "ContextParallel", "ContextShard", "DeferredGradients",
    "deferred_gradients", "weight_gradient",
    "SequenceParallel", "SequenceShard", "apply", "as_dtype", "buffers_of", "clip_factor", "global_norm",
    "scale_gradients", "quant_schemes_of", "collective", "declare", "extent", "shard_offsets", "discard_gradients",
    "freeze_parameters", "keep_buffers", "local_parameters", "matrix_of", "narrow", "cast_parameter", "shard_of",
    "reduce_gradients", "to_global", "values_changed",
]  # fmt: skip
