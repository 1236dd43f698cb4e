"""One use of each of torch's operators that is known to have no rule, by the name of the operator."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


def _square(x: Tensor) -> Tensor:
    return x @ x.T + 9 * torch.eye(len(x), dtype=x.dtype)


USES: dict[str, Callable[[Tensor], Any]] = {
    "_embedding_bag": lambda x: F.embedding_bag(
        torch.tensor([0, 2, 1, 1]), x, torch.tensor([0, 2]), scale_grad_by_freq=True, mode="sum"
    ),
    "_pdist_forward": lambda x: F.pdist(x),
    "_trilinear": lambda x: F.bilinear(x, x, torch.ones(3, 4, 4, dtype=x.dtype)),
    "_unsafe_masked_index": lambda x: aten._unsafe_masked_index(x, x > 0, [torch.zeros(4, 4).long()], 0),
    "adaptive_max_pool2d_backward": lambda x: F.adaptive_max_pool2d(x[None], 2),
    "addbmm": lambda x: torch.addbmm(x, x[None], x[None]),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2)),
    "cholesky_inverse": lambda x: torch.cholesky_inverse(_square(x)),
    "complex": lambda x: torch.complex(x, x).abs(),
    "embedding_renorm": lambda x: F.embedding(torch.tensor([0, 1]), x.detach().clone(), max_norm=1.0) * x[0],
    "fractional_max_pool2d_backward": lambda x: F.fractional_max_pool2d(
        x[None], 2, 2, _random_samples=torch.full((1, 1, 2), 0.5, dtype=x.dtype)
    ),
    "grid_sampler_3d_backward": lambda x: F.grid_sample(
        x.view(1, 1, 2, 2, 4), torch.zeros(1, 1, 1, 1, 3, dtype=x.dtype), align_corners=True
    ),
    "linalg_householder_product": lambda x: torch.linalg.householder_product(x, x[0]),
    "linalg_lu": lambda x: torch.linalg.lu(x)[1],
    "linalg_pinv": lambda x: torch.linalg.pinv(x),
    "logspace": lambda x: torch.logspace(0, 1, 4, dtype=x.dtype) * x,
    "masked_scatter": lambda x: x.masked_scatter(x > 0, x * 2),
    "permute_copy": lambda x: aten.permute_copy(x, [1, 0]),
    "polar": lambda x: torch.polar(x, x).abs(),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 1, 2, 0]), 0, output_size=4),
    "replication_pad1d": lambda x: F.pad(x, (1, 1), mode="replicate"),
    "replication_pad2d": lambda x: F.pad(x[None], (1, 1, 1, 1), mode="replicate"),
    "replication_pad3d": lambda x: F.pad(x[None, None], (1, 1, 1, 1, 0, 0), mode="replicate"),
    "segment_reduce": lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([1, 3]), unsafe=True),
    "_upsample_bilinear2d_aa_backward": lambda x: F.interpolate(x[None, None], (2, 2), mode="bilinear", antialias=True),
}
"""Uses by operator, each of a square matrix of four rows."""
