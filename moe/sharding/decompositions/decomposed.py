"""Operators that are decomposed into simpler ones while a module is captured."""

from collections.abc import Callable
from typing import Any

import torch

from moe.sharding import torch_private
from moe.sharding.decompositions import slices, variances, window_operators

aten = torch.ops.aten

DECOMPOSED = (
    aten._native_batch_norm_legit.default, aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats, aten.native_batch_norm.default, aten.native_batch_norm_backward.default,
    aten.nll_loss_forward.default, aten.nll_loss_backward.default, aten.nll_loss2d_forward.default,
    aten.nll_loss2d_backward.default, aten.t.default, aten.unbind.int, aten.select_backward.default,
    aten.mse_loss.default, aten.mse_loss_backward.default, aten.huber_loss.default, aten.huber_loss_backward.default,
    aten.smooth_l1_loss.default, aten.smooth_l1_loss_backward.default, aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_backward.default, aten.binary_cross_entropy_with_logits.default,
    aten.soft_margin_loss.default, aten.log_sigmoid_forward.default, aten.log_sigmoid_backward.default,
    aten.unfold_backward.default, aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim, aten.norm.Scalar,
    aten.addcmul.default, aten.addcdiv.default, aten.lerp.Scalar, aten.lerp.Tensor, aten.tril.default,
    aten.triu.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.masked_fill.Scalar,
    aten.masked_fill.Tensor, aten.logsumexp.default, aten.diagonal_backward.default, aten.dot.default, aten.mv.default,
    aten.addmv.default, aten.logaddexp.default, aten.rsub.Scalar, aten.rsub.Tensor, aten.square.default,
    aten.repeat.default, aten.unsafe_split.Tensor, aten.hardswish.default, aten.floor_divide.default,
    aten.count_nonzero.default, aten.aminmax.default, aten.dist.default, aten.addr.default, aten.vdot.default,
    aten.rot90.default, aten.diag_embed.default, aten.isin.Tensor_Tensor, aten.affine_grid_generator.default,
    aten.native_group_norm.default, aten.native_group_norm_backward.default, aten.fill.Tensor,
    aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.channel_shuffle.default, aten.im2col.default,
    aten.col2im.default, aten.block_diag.default,
)  # fmt: skip
"""Operators for which torch's decompositions are used. They have no sharding rules."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    return {
        **torch_private.decompositions(DECOMPOSED),
        **variances.DECOMPOSITIONS,
        **slices.DECOMPOSITIONS,
        **window_operators.DECOMPOSITIONS,
    }
