"""Fused attention under random assignments; what is said of its dropout; rules of the forms that run on GPUs."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from moe.sharding.capture.capture import capture
from moe.sharding.operands import is_operator
from moe.sharding.rules.attention import RULES
from moe.sharding.rules.registry import rule_of
from tests.refusals import refused
from tests.sharding.partitioned import check_at_random

D = torch.float64
aten = torch.ops.aten


class Attention(nn.Module):
    """`heads` of queries, `groups` of keys and values, of 4 numbers each."""

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
        k, v = ((y @ each).view(batch, -1, self.groups, 4).transpose(1, 2) for each in (self.k, self.v))
        made = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, is_causal=self.causal, enable_gqa=self.heads != self.groups
        )
        return made.transpose(1, 2).reshape(batch, queries, -1)


CASES: dict[str, dict[str, Any]] = {
    "of 4 heads": {"heads": 4, "groups": 4},
    "of 3 heads": {"heads": 3, "groups": 3},
    "of groups": {"heads": 6, "groups": 2},
    "of one group": {"heads": 4, "groups": 1},
    "causal": {"heads": 4, "groups": 4, "causal": True},
    "masked": {"heads": 4, "groups": 4, "mask": (5, 7)},
    "masked by row of the batch": {"heads": 4, "groups": 2, "mask": (3, 1, 1, 7)},
    "masked by head": {"heads": 3, "groups": 3, "mask": (1, 3, 5, 7)},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str) -> None:
    torch.manual_seed(0)
    keys = 5 if CASES[name].get("causal") else 7
    sample = (torch.randn(3, 5, 6, dtype=D), torch.randn(3, keys, 6, dtype=D))
    check_at_random(Attention(**CASES[name]), sample, cases=4)
    split = {"b", "k", "g", "s"}
    check_at_random(Attention(**CASES[name]), sample, cases=4, seed=1, prefer=lambda option: option.factor in split)


def test_its_dropout_is_refused_in_words() -> None:
    node = _node(aten._scaled_dot_product_efficient_attention.default,
                 *[(2, 4, 8, 16)] * 3, None, True, 0.1)  # fmt: skip
    with refused("unsupported", "_scaled_dot_product_efficient_attention_default", 0.1):
        rule_of(node)


def test_dropout_of_attention_written_out_has_rules() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Parameter(torch.randn(2, 4, 5, 8))

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(self.q * x, x, x, dropout_p=0.5)

    captured = capture(Dropped(), (torch.randn(2, 4, 5, 8),))
    for node in filter(is_operator, captured.graph.graph.nodes):
        rule_of(node)


def _node(target: Any, *args: Any) -> fx.Node:
    """A node of a graph with placeholders for shapes."""
    graph, given = fx.Graph(), []
    for number, each in enumerate(args):
        if isinstance(each, tuple):
            placeholder = graph.placeholder(f"x{number}")
            placeholder.meta["val"] = torch.empty(each, device="meta")
            given.append(placeholder)
        else:
            given.append(each)
    return graph.call_function(target, tuple(given))


Q, KV, LSE = (2, 4, 8, 16), (2, 2, 8, 16), (2, 4, 32)
OF_GPUS = {
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


@pytest.mark.parametrize("name", OF_GPUS)
def test_forms_that_run_on_gpus_split_batch_and_heads(name: str) -> None:
    target = getattr(aten, name).default
    assert target in RULES
    node = _node(target, *OF_GPUS[name])
    first = torch.empty(Q, device="meta")
    if "backward" in name:
        bias = node.args[4] if "efficient" in name else None
        of_bias = bias.meta["val"] if isinstance(bias, fx.Node) else None
        shapes = [node.args[at].meta["val"] for at in (1, 2, 3)]
        node.meta["val"] = (*shapes, *([of_bias] if len(target._schema.returns) == 4 else []))
    else:
        lse = torch.empty(LSE if "efficient" in name else (2, 4, 8), device="meta")
        others = [8 if "Int" in str(each.type) else torch.empty((), device="meta")
                  for each in target._schema.returns[2:]]  # fmt: skip
        node.meta["val"] = (first, lse, *others)
    options = {each.factor: each for each in rule_of(node).axis_options()}
    assert set(options) == {None, "b", "k"}
    by_batch = [str(each) for each in options["b"].results]
    assert by_batch[0] == "S(0)"
    if "efficient" in name and "backward" in name:
        assert by_batch[3] == "P(sum)", "of a bias that all rows of the batch have"
    if "backward" not in name:
        assert set(by_batch[2:]) == {"R"}
