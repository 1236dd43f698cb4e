"""Our attention with sinks, rotary positions, RMS norm and gated delta rule, and feed-forward layers, under random
assignments."""

import pytest
import torch
from torch import Tensor, nn

from moe.layers.attention_mask import AttentionMask
from moe.layers.delta_rule import gated_delta_rule
from moe.layers.feed_forward import FeedForward
from moe.layers.norm import rms_norm
from moe.layers.rotary import Pairing, rotary_table, rotate
from moe.layers.short_convolution import short_convolution
from moe.layers.softmax_attention import attend
from moe.parallel import SequenceShard, declare
from moe.spec.parameter import linear
from moe.spec.rope import RopeSpec
from tests.sharding.modules import Function
from tests.sharding.partitioned import check_at_random

D = torch.float64


def random(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=D))


class AttentionLayer(nn.Module):
    """4 query heads and 2 key heads of width 4."""

    def __init__(self, pairing: Pairing, window: int | None, has_sinks: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = random(6, 16), random(6, 8), random(6, 8)
        self.norm, self.window = random(4), window
        self.rope = RopeSpec(pairing=pairing, fraction=0.5)
        self.sinks = random(4) if has_sinks else None

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        q, k, v = ((x @ weight).unflatten(2, (-1, 4)).transpose(1, 2) for weight in (self.q, self.k, self.v))
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        cos, sin = rotary_table(positions, 4, self.rope, dtype=x.dtype)
        q, k = (rotate(rms_norm(projection, self.norm, 1e-6), cos, sin, self.rope.pairing) for projection in (q, k))
        attention_mask = AttentionMask(window=self.window, documents=documents)
        return attend(q, k, v, scale=0.5, attention_mask=attention_mask, sinks=self.sinks).transpose(1, 2).flatten(2)


class RecurrentLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.weight = random(6, 2 * 8 + 16), random(2 * 8 + 16, 3)
        self.decay, self.beta = random(6, 4), random(6, 4)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        projections = short_convolution(x @ self.qkv, self.weight, documents)
        q, k, v = projections.split((8, 8, 16), dim=-1)
        q, k, v = (projection.unflatten(2, (-1, 4)) for projection in (q, k, v))
        log_decay = -nn.functional.softplus(x @ self.decay)
        beta = torch.sigmoid(x @ self.beta)
        return gated_delta_rule(q, k * 0.2, v, log_decay, beta, documents=documents)[0].flatten(2)


def sample() -> tuple[Tensor, Tensor]:
    documents = torch.tensor([[0, 0, 0, 1, 1], [2, 2, 2, 2, -1], [3, 3, 3, 3, 3]])
    return torch.randn(3, 5, 6, dtype=D), documents


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pairing", "window", "has_sinks"),
    [pytest.param("half", None, False, marks=pytest.mark.slow), ("interleaved", 3, True)],
)
def test_attention(pairing: Pairing, window: int | None, has_sinks: bool) -> None:
    torch.manual_seed(0)
    check_at_random(AttentionLayer(pairing, window, has_sinks), sample(), cases=6)


@pytest.mark.slow
def test_the_gated_delta_rule() -> None:
    torch.manual_seed(0)
    check_at_random(RecurrentLayer(), sample(), cases=6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu", "geglu"])
def test_feed_forward(activation: str) -> None:
    torch.manual_seed(0)
    layer = FeedForward(activation)
    inputs = ("w_in", "w_gate") if layer.activation.is_gated else ("w_in",)
    weights = [linear(name, ("hidden", 12), ("model", 6)) for name in inputs]
    declare(layer, (*weights, linear("w_out", ("model", 6), ("hidden", 12))), D)
    module = Function(lambda x: layer(x, SequenceShard(len(x))).square().sum())
    module.layer = layer
    check_at_random(module, (torch.randn(8, 6, dtype=D),), cases=6)
