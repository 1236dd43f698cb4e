"""Fused attention: under random assignments, with dropout, and the rules of its forms on GPUs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe.sharding.capture.capture import capture
from moe.sharding.rules.attention import RULES
from moe.sharding.rules.registry import rule_of
from tests.refusals import expect_problem
from tests.sharding.modules import Function
from tests.sharding.partitioned import check_at_random, node_of, operators

D = torch.float64
aten = torch.ops.aten


class Attention(nn.Module):
    """`heads` query heads and `groups` key and value heads of width 4."""

    def __init__(self, heads: int, groups: int, mask: tuple[int, ...] | None = None, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.groups, self.causal = heads, groups, causal
        self.q = nn.Parameter(torch.randn(6, heads * 4, dtype=D))
        self.k = nn.Parameter(torch.randn(6, groups * 4, dtype=D))
        self.v = nn.Parameter(torch.randn(6, groups * 4, dtype=D))
        self.register_buffer("mask", None if mask is None else torch.randn(mask, dtype=D))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        batch, queries, _ = x.shape
        q = (x @ self.q).view(batch, queries, self.heads, 4).transpose(1, 2)
        k, v = ((y @ weight).view(batch, -1, self.groups, 4).transpose(1, 2) for weight in (self.k, self.v))
        is_grouped = self.heads != self.groups
        y = F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=self.causal, enable_gqa=is_grouped)
        return y.transpose(1, 2).reshape(batch, queries, -1)


CASES: dict[str, dict[str, Any]] = {
    "4 heads": {"heads": 4, "groups": 4},
    "3 heads": {"heads": 3, "groups": 3},
    "groups": {"heads": 6, "groups": 2},
    "one group": {"heads": 4, "groups": 1},
    "causal": {"heads": 4, "groups": 4, "causal": True},
    "masked": {"heads": 4, "groups": 4, "mask": (5, 7)},
    "masked by batch row": {"heads": 4, "groups": 2, "mask": (3, 1, 1, 7)},
    "masked by head": {"heads": 3, "groups": 3, "mask": (1, 3, 5, 7)},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str) -> None:
    torch.manual_seed(0)
    keys = 5 if CASES[name].get("causal") else 7
    sample = (torch.randn(3, 5, 6, dtype=D), torch.randn(3, keys, 6, dtype=D))
    check_at_random(Attention(**CASES[name]), sample, cases=4)
    split = {"b", "k", "g", "s"}
    check_at_random(Attention(**CASES[name]), sample, cases=4, seed=1, prefer=lambda option: option.factor in split)


def test_dropout_of_fused_attention_is_refused() -> None:
    qkv = [torch.empty(2, 4, 8, 16, device="meta")] * 3
    node = node_of(aten._scaled_dot_product_efficient_attention.default, *qkv, None, True, 0.1)
    with expect_problem("unsupported", "_scaled_dot_product_efficient_attention_default", 0.1):
        rule_of(node)


def test_dropout_of_decomposed_attention_has_rules() -> None:
    module = Function(lambda q, x: F.scaled_dot_product_attention(q * x, x, x, dropout_p=0.5), torch.randn(2, 4, 5, 8))
    for node in operators(capture(module, (torch.randn(2, 4, 5, 8),))):
        rule_of(node)


Q, KV, LSE = (2, 4, 8, 16), (2, 2, 8, 16), (2, 4, 32)
ON_GPUS = {
    "_scaled_dot_product_flash_attention": (Q, KV, KV, 0.0, True),
    "_scaled_dot_product_efficient_attention": (Q, Q, Q, (2, 4, 8, 8), True, 0.0),
    "_scaled_dot_product_cudnn_attention": (Q, KV, KV, None, True, 0.0, True),
    "_scaled_dot_product_fused_attention_overrideable": (Q, KV, KV, None, 0.0, True),
    "_scaled_dot_product_flash_attention_backward":
        (Q, Q, KV, KV, Q, (2, 4, 8), None, None, 8, 8, 0.0, True, (), ()),
    "_scaled_dot_product_efficient_attention_backward":
        (Q, Q, Q, Q, (1, 4, 8, 8), Q, LSE, (), (), 0.0, [True] * 4, False),
    "_scaled_dot_product_cudnn_attention_backward":
        (Q, Q, KV, KV, Q, (2, 4, 8, 1), (), (), None, None, None, 8, 8, 0.0, True),
    "_scaled_dot_product_fused_attention_overrideable_backward":
        (Q, Q, KV, KV, None, [True] * 4, Q, (2, 4, 8), None, None, 8, 8, 0.0, True, (), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_GPUS)
def test_forms_on_gpus_split_batch_and_heads(name: str) -> None:
    target = getattr(aten, name).default
    assert target in RULES
    arguments = [
        torch.empty(argument, device="meta") if isinstance(argument, tuple) else argument for argument in ON_GPUS[name]
    ]
    node = node_of(target, *arguments)
    if "backward" in name:
        has_bias = "efficient" in name and isinstance(arguments[4], Tensor)
        bias = [arguments[4] if has_bias else None] if len(target._schema.returns) == 4 else []
        node.meta["val"] = (*arguments[1:4], *bias)
    else:
        lse = torch.empty(LSE if "efficient" in name else (2, 4, 8), device="meta")
        other_results = [8 if "Int" in str(result.type) else torch.empty((), device="meta")
                         for result in target._schema.returns[2:]]  # fmt: skip
        node.meta["val"] = (arguments[0], lse, *other_results)
    options = {option.factor: option for option in rule_of(node).axis_options()}
    assert set(options) == {None, "b", "k"}
    by_batch = [str(placement) for placement in options["b"].results]
    assert by_batch[0] == "S(0)"
    if "efficient" in name and "backward" in name:
        assert by_batch[3] == "P(sum)", "the gradient of a bias shared by all batch rows"
    if "backward" not in name:
        assert set(by_batch[2:]) == {"R"}
