"""A short causal convolution of each channel by itself, through which no document sees another (Gated DeltaNet, arXiv
2412.06464, section 3.4)."""

from typing import Any

import torch
from torch import Tensor


def short_convolution(
    x: Tensor, weight: Tensor, documents: Tensor | None = None, before: Tensor | None = None
) -> Tensor:
    """`[B, L, c]`, in the dtype of `x`: at each position t the sum over j of weight[:, w - 1 - j] · x at t - j, of its
    own document's positions, in float32 at least.

    `x` is `[B, L, c]`, `weight` `[c, w]`, of whose columns the last meets the position itself. `documents` is int
    `[B, L]`; padding, which is negative, is seen by none and gives zeros. `before` `[B, w - 1, c]`, from
    `convolution_cache`, are the inputs before these, by default zeros; they belong to the document of the row's first
    position.
    """
    ahead = weight.shape[1] - 1
    if before is not None:
        x = torch.cat((before.to(x.dtype), x), dim=1)
        if documents is not None:
            documents = torch.cat((documents[:, :1].expand(-1, ahead), documents), dim=1)
    wide = torch.promote_types(x.dtype, torch.float32)
    out = _Convolution.apply(x, weight, _own(documents, weight.shape[1], wide))
    return out if before is None else out[:, ahead:]


def short_convolution_reference(
    x: Tensor, weight: Tensor, documents: Tensor | None = None, before: Tensor | None = None
) -> Tensor:
    """Reference for `short_convolution`: one position after another."""
    rows, num_positions, channels = x.shape
    width = weight.shape[1]
    out = []
    for row in range(rows):
        for at in range(num_positions):
            total = torch.zeros(channels, dtype=x.dtype)
            own = 0 if documents is None else int(documents[row, at])
            for behind in range(width):
                source = at - behind
                of_source = 0 if documents is None else int(documents[row, max(source, 0)])
                if own < 0 or own != of_source or (source < 0 and before is None):
                    continue
                value = x[row, source] if source >= 0 else before[row, source]  # type: ignore[index]
                total = total + weight[:, width - 1 - behind] * value
            out.append(total)
    return torch.stack(out).view(x.shape)


def convolution_cache(
    x: Tensor, width: int, documents: Tensor | None = None, before: Tensor | None = None
) -> Tensor:
    """`[B, w - 1, c]`: what `short_convolution` with weights of this width has to know of `x` `[B, L, c]`, and of what
    was `before`, to go on behind it. What is in another document than a row's last position is zeros there."""
    before = x.new_zeros(x.shape[0], width - 1, x.shape[2]) if before is None else before.to(x.dtype)
    cache = torch.cat((before, x), dim=1)[:, x.shape[1] :]
    if documents is None:
        return cache
    documents = torch.cat((documents[:, :1].expand(-1, width - 1), documents), dim=1)
    is_own = (documents == documents[:, -1:]) & (documents >= 0)
    return cache * is_own[:, x.shape[1] :, None].to(x.dtype)


def _own(documents: Tensor | None, width: int, dtype: torch.dtype) -> tuple[Tensor, ...] | None:
    """`[B, L - j, 1]` for each j < `width`: 1 where a position and the one j before it are in the same document."""
    if documents is None:
        return None
    num_positions = documents.shape[1]
    return tuple(
        ((documents[:, j:] == documents[:, : num_positions - j]) & (documents[:, j:] >= 0))[..., None].to(
            dtype
        )
        for j in range(min(width, num_positions))
    )


class _Convolution(torch.autograd.Function):
    """Products of whole shifted sequences, added up in place. Forward and backward of [2, 512, 1024] with weights of 4
    take 14 ms on one core of an EPYC, and 17 with documents; as plain operations 32, and with torch's conv1d, which
    wants another order in memory and knows no documents, 24."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, own: tuple[Tensor, ...] | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.own = own
        wide = torch.promote_types(x.dtype, torch.float32)
        inputs, weight = x.to(wide), weight.to(wide)
        length, width = x.shape[1], weight.shape[1]
        out = inputs * weight[:, -1]
        if own is not None:
            out *= own[0]
        for j in range(1, min(width, length)):
            earlier = inputs[:, : length - j]
            out[:, j:].addcmul_(earlier if own is None else earlier * own[j], weight[:, width - 1 - j])
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        inputs, gradient = x.to(wide), gradients[0].to(wide)
        length, width = x.shape[1], weight.shape[1]
        of_x = torch.zeros_like(inputs)
        of_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        for j in range(min(width, length)):
            towards = gradient[:, j:] if ctx.own is None else gradient[:, j:] * ctx.own[j]
            of_x[:, : length - j].addcmul_(towards, weight[:, width - 1 - j].to(wide))
            of_weight[:, width - 1 - j] = (towards * inputs[:, : length - j]).sum(dim=(0, 1))
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None
