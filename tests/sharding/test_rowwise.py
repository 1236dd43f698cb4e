"""Operators that need some dimensions whole, and norms, under random assignments."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.sharding.partitioned import check_at_random, check_function

D = torch.float64


def _norms(a: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(a, (6,), b, b) + F.layer_norm(a, (4, 6)) + F.rms_norm(a, (6,), b)


def _weight_norm(a: Tensor, b: Tensor) -> Tensor:
    return torch._weight_norm(a[:, :, 0], b[None, :4].T[:1].expand(5, 1), 0)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": lambda a, b: F.softmax(a * b, -1) + F.log_softmax(a, 0) + F.softmax(a, 1),
    "scans": lambda a, b: a.cumsum(0) * b + a.cumprod(1) + a.logcumsumexp(2),
    "scans of extremes": lambda a, b: a.cummax(0)[0] * b + a.cummin(1)[0],
    "sort": lambda a, b: a.sort(0)[0] * b + a.sort(1, descending=True)[0],
    "stable sort": lambda a, b: torch.sort(a, dim=1, stable=True)[0] * b,
    "argsort": lambda a, b: a.gather(1, a.argsort(1)) * b,
    "topk": lambda a, b: a.topk(3, 1)[0] * b,
    "topk of the last": lambda a, b: a.topk(3)[0] * b[:3],
    "extremes with indices": lambda a, b: a.max(1)[0] * b + a.min(1, keepdim=True)[0][:, 0],
    "indices of extremes": lambda a, b: a.argmax(1) * b + a.argmin(1) + a.argmax(),
    "medians": lambda a, b: a.median(0)[0] * b + a.kthvalue(2, 0)[0] + a.median() + a.mode(0)[0],
    "products": lambda a, b: a.prod(1) * b + (a * 0.1 + 1).prod(),
    "glu": lambda a, b: F.glu(a, 1).sum((0, 1)) * b + F.glu(a)[0, 0, 0],
    "norms": _norms,
    "layer norm": lambda a, b: F.layer_norm(a, (6,), b, b.cos()),
    "layer norm of all": lambda a, b: F.layer_norm(a, (5, 4, 6)) * b,
    "group norm": lambda a, b: F.group_norm(a, 2, b[:4], b[2:]),
    "weight norm": _weight_norm,
    "renorm": lambda a, b: torch.renorm(a, 2, 1, 0.5) * b,
    "complex as real": lambda a, b: torch.view_as_real(torch.fft.fft2(a * b)).sum(),
    "fourier": lambda a, b: torch.fft.rfft(a, dim=1).abs() * b + torch.fft.irfft(a[..., :3] + 0j, dim=2).sum(),
    "linear systems": lambda a, b: torch.linalg.inv_ex(a[..., :4] @ a[..., :4].mT + torch.eye(4))[0] @ a * b,
    "determinants of matrices in either order": lambda a, b: (
        torch.linalg.det(a[0, :, :4]) + torch.linalg.det(a[1, :, :4].t()) + torch.linalg.slogdet(a[..., :4])[1].sum()
        + torch.linalg.slogdet(a[..., :4].mT)[1]
    ).sum() * b,
    "complex": lambda a, b: (
        torch.view_as_real(torch.view_as_complex(a.mT.reshape(5, 4, 3, 2)) * torch.view_as_complex(a.view(5, 4, 3, 2)))
    ).flatten(2) * b,
    "searchsorted": lambda a, b: torch.searchsorted(b.sort()[0], a) * a + torch.bucketize(a, b.detach().sort()[0]),
    "distances": lambda a, b: torch.cdist(a, a.flip(1)).sum(-1, keepdim=True) * b,
    "norm-like": lambda a, b: a.norm(dim=1) * b + F.normalize(a, dim=0)[0, 0] + a.logsumexp(1),
    "activations": lambda a, b: F.logsigmoid(a) * b + F.hardswish(a) + F.elu(a) + F.leaky_relu(a) + F.mish(a),
    "decomposed": lambda a, b: (
        torch.outer(b, b).sum() * b + torch.vdot(b, b) + a.aminmax()[0] + a.dist(a * 2) + torch.rot90(a[0, :, :4]).sum()
        + a.count_nonzero() + torch.diag_embed(b).cumsum(0)[-1] + torch.isin(a.argsort(1), torch.tensor([1, 2])).sum()
    ),
    "cells": lambda a, b: torch.lstm_cell(
        a[:, 0], (a[:, 1, :2], a[:, 2, :2]), a[0, :2].repeat(4, 1), a[1, 0, :2].repeat(8, 1)
    )[0],
    "variance": lambda a, b: a.var(1) * b + a.std((0, 1)) + a.std(),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_whole_dimensions(name: str) -> None:
    torch.manual_seed(len(name))
    function, x = FUNCTIONS[name], torch.randn(5, 4, 6, dtype=D)
    check_function(lambda a, b, x: (function(a * x, b) * 0.7).sin(), (5, 4, 6), (6,), inputs=[x], cases=10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (nn.GRU, nn.RNN))])
def test_recurrent_layers(kind: type[nn.Module]) -> None:
    """Decomposed into products, since torch's operator for a whole layer cannot be split."""
    torch.manual_seed(0)
    check_at_random(kind(4, 3, batch_first=True).double(), (torch.randn(4, 3, 4, dtype=D),), cases=6)
