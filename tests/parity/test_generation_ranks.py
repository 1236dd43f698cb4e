"""Texts on several ranks: whoever makes which, and whatever is laid out where, they are those of one process."""

from functools import cache

import pytest
import torch

from moe.parallel import Layout
from moe.spec import LanguageModelSpec, model_spec
from moe.spec.generation import GenerationSpec
from moe.tasks.language import build_model, generate
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees

PROMPTS = [[1, 9, 10, 11, 12], [1], [1, 5, 6], [1, 40, 41], [1, 7]]
ENDS = set(range(2, 120, 8))
SPECS = {
    "greedy": GenerationSpec(max_tokens=9),
    "drawn": GenerationSpec(max_tokens=9, temperature=1.0, top_p=0.9, seed=4),
    "beams": GenerationSpec(max_tokens=6, num_beams=3),
}
LAYOUTS = [Degrees(data=2), Degrees(expert=2), Degrees(expert=2, tensor=2), Degrees(data=4, fsdp=2)]


@cache
def spec() -> LanguageModelSpec:
    found = model_spec({
        "kind": "language", "model_dim": 32, "num_layers": 2, "vocab_size": 120, "ffn_dim": 64,
        "attention": {"kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
        "moe": {"num_experts": 4, "hidden_dim": 24, "router": "softmax_topk", "top_k": 2, "group_tokens": 16},
    })  # fmt: skip
    assert isinstance(found, LanguageModelSpec)
    return found


def made(degrees: Degrees | None, name: str) -> dict[int, list[int]]:
    """The texts, by their numbers, that this rank makes: an uneven share, of the first none where there are four."""
    layout = Layout.single() if degrees is None else Layout.build(degrees.plan(8))
    model = build_model(spec(), layout, seed=3, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    pairs = layout.groups_here(3)
    numbers = [number for number in range(len(PROMPTS)) if number // 2 in pairs]
    texts = generate(
        model, [PROMPTS[number] for number in numbers], SPECS[name], ENDS, texts=numbers, together=layout.in_step
    )  # fmt: skip
    layout.close()
    return dict(zip(numbers, texts, strict=True))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_any_layout_makes_the_texts_of_one_process(ranks: Pools, degrees: Degrees, name: str) -> None:
    alone = made(None, name)
    assert len({len(text) for text in alone.values()}) > 1, "else none ends before the others"
    for found in ranks[degrees.workers].run(made, degrees, name):
        assert found == {number: alone[number] for number in found}
