"""Texts that language models of every kind of attention generate on several ranks are those of one process: greedy,
sampled and from beam search, with prompts of several lengths spread over data ranks, some of which have none."""

from collections.abc import Mapping
from functools import cache

import pytest
import torch

from moe.parallel import Layout
from moe.spec.generation import GenerationSpec
from moe.tasks.language import build_model, generate
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, language_model
from tests.parity.trajectory import Degrees

PROMPTS = [[1, 9, 10, 11, 12, 13, 14], [1], [1, 5, 6], [1, 40, 41, 42], [1, 7]]
ENDS = set(range(2, 300, 8))
SPECS = {
    "greedy": GenerationSpec(max_tokens=12),
    "drawn": GenerationSpec(max_tokens=12, temperature=1.0, top_p=0.95, min_p=0.001, repetition_penalty=1.2, seed=4),
    "beams": GenerationSpec(max_tokens=7, num_beams=3, repetition_penalty=1.2),
}
LAYOUTS = [
    Degrees(data=2), Degrees(expert=2, tensor=2), Degrees(data=2, fsdp=2, expert_fsdp=2),
    Degrees(expert=2, data=2, tensor=2, fsdp=2, expert_fsdp=2), Degrees(expert=4, fsdp=4),
    Degrees(expert_tensor=2, expert=2, tensor=2), Degrees(expert=2, data=2, context=2, fsdp=4, expert_fsdp=2),
]  # fmt: skip


def generate_texts(degrees: Degrees, attention: str, number_of_prompts: int) -> Mapping[str, dict[int, list[int]]]:
    """Texts that this rank generates, by number, for each way of choosing tokens."""
    layout = Layout.build(degrees.plan(8))
    spec = language_model(attention, router="softmax_topk")
    model = build_model(spec, layout, seed=3, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)
    text_numbers, texts_by_name = layout.local_groups(number_of_prompts), {}
    for name, generation_spec in SPECS.items():
        prompts = [PROMPTS[number] for number in text_numbers]
        texts = generate(
            model, prompts, generation_spec, ENDS, text_numbers=text_numbers, process_group=layout.lockstep_group
        )
        texts_by_name[name] = dict(zip(text_numbers, texts, strict=True))
    layout.close()
    return texts_by_name


@cache
def reference_texts(attention: str, number_of_prompts: int) -> Mapping[str, dict[int, list[int]]]:
    return generate_texts(Degrees(), attention, number_of_prompts)


CASES = [
    (degrees, attention)
    for index, degrees in enumerate(LAYOUTS)
    for attention in (*ATTENTIONS, *ATTENTIONS)[index % 4 :][:2]
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("degrees", "attention"), CASES, ids=str)
def test_any_layout_makes_the_texts_of_one_process(ranks: Pools, degrees: Degrees, attention: str) -> None:
    number = 3 if degrees.fsdp == 4 else len(PROMPTS)  # one of four data ranks has none
    answers = ranks[degrees.workers].run(generate_texts, degrees, attention, number)
    for name, texts in reference_texts(attention, number).items():
        assert len({len(text) for text in texts.values()}) > 1, "otherwise no text ends before the others"
        items = [item for answer in answers for item in answer[name].items()]
        assert dict(items) == texts, name
        assert all(text == texts[row] for row, text in items), "tensor and context ranks make the same"
