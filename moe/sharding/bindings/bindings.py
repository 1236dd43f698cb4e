"""Functions of our layers, and what replaces them while a module is captured."""

from collections.abc import Callable, Hashable
from typing import Any, NoReturn

from torch import Tensor

from moe.layers.adapter_dropout import DropoutMasks
from moe.layers.attention_mask import AttentionMask
from moe.layers.draws import apply_dropout, apply_jitter
from moe.layers.grouped_query import project_keys_values
from moe.layers.linear import uses_own_dtype
from moe.layers.moe import MoELayer
from moe.layers.nll import smoothed_nll
from moe.layers.norm import rms_norm, rms_norm_reference
from moe.layers.rotary import rotate, rotate_reference
from moe.layers.softmax_attention import attend
from moe.overrides import Overrides
from moe.sharding.bindings import attention, draws, experts, nll, routing


def _uncached(mask: AttentionMask, key: Hashable, make: Callable[[], Any]) -> Any:
    """`AttentionMask.get_or_make` without a cache, whose tensors would belong to one trace."""
    return make()


def _refuse_dropout(masks: DropoutMasks, x: Tensor) -> NoReturn:
    raise ValueError("a model cannot be captured with adapter dropout; set adapter.dropout to 0")


BINDINGS: Overrides = {
    # one operator each, with a sharding rule of its own
    MoELayer.route_tokens: routing.route_tokens,
    MoELayer.run_experts: experts.run_experts,
    smoothed_nll: nll.smoothed_nll,
    apply_dropout: draws.apply_dropout,
    apply_jitter: draws.apply_jitter,
    # plain operations, which can be sharded in more ways than kernels of our own
    rms_norm: rms_norm_reference,
    rotate: rotate_reference,
    attend: attention.attend,
    project_keys_values: attention.project_keys_values,
    uses_own_dtype: lambda x: True,
    # without shortcuts that depend on data or outlive a trace
    MoELayer.decode_forward: lambda layer, x_TM, tokens: None,
    AttentionMask.get_or_make: _uncached,
    DropoutMasks.apply_to: _refuse_dropout,
}
"""Replacements by function. Those that define operators register their rules, too."""
