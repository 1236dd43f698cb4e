"""CUDA graphs of micro-batches compute what their operations compute, bit for bit."""

from typing import Any

import pytest
import torch

from moe.spec import LanguageModelSpec, MoESpec
from moe.train.micro_batch_graphs import WARM_UP_PASSES
from tests.parity.combinations import train_of
from tests.parity.sequences import ALL, SOME
from tests.parity.trajectory import Degrees, Shape
from tests.rehearsal.graphs import steps_by_graphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none"),
]

NEVER = 1000
DENSE: dict[str, Any] = {
    "kind": "language", "model_dim": 128, "num_layers": 2, "ffn_dim": 192, "vocab_size": 1000,
    "attention": {
        "kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "query_key_norm": "head",
    },
}  # fmt: skip
MIXTURE = MoESpec(
    num_experts=8, model_dim=128, hidden_dim=96, group_tokens=512, router="softmax_topk", top_k=2, activation="swiglu",
    z_coefficient=1e-3,
)  # fmt: skip


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("moe", [None, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("learned", [ALL, SOME])
def test_steps_by_graphs_are_those_without(moe: MoESpec | None, learned: str, recompute: str) -> None:
    """Rows of 256 positions in packed documents, whose attention is compiled."""
    model = LanguageModelSpec(**DENSE, moe=moe)
    train = train_of("bfloat16", cuda_graphs=True)
    degrees = Degrees(micro_batch_groups=1, recompute=recompute)
    shape = Shape(groups=2 + WARM_UP_PASSES, source=128, target=128, learned=learned)
    by_graphs, without = (
        steps_by_graphs(model, train, degrees, shape, 3, num_warm_ups, "cuda")
        for num_warm_ups in (WARM_UP_PASSES, NEVER)
    )
    assert (by_graphs.num_graphs, without.num_graphs) == (1, 0)
    assert by_graphs.records == without.records
    for parameter, expected in zip(by_graphs.parameters, without.parameters, strict=True):
        assert torch.equal(parameter, expected)
