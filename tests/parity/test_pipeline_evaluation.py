"""Passes through pipeline stages without gradients give every rank what one process computes: losses, likelihoods, and
texts, greedy, sampled and from beam search."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from moe.parallel import Layout
from moe.parallel.stages import DirectPass, ModelStages
from moe.spec import LanguageModelSpec
from moe.spec.generation import GenerationSpec
from moe.tasks.build import build_model
from moe.tasks.language import generate
from moe.tasks.language.likelihood import log_likelihoods
from moe.tasks.language.model import LanguageModel
from moe.tasks.translation.decoding import translate
from moe.tasks.translation.model import TranslationModel
from moe.tasks.translation.model import batch_loss as pairs_loss
from tests.parity.combinations import model_of
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, language_model
from tests.parity.trajectory import Degrees, Model, Shape, global_batch, rank_batch

PROMPTS = [[1, 9, 10, 11, 12, 13, 14], [1], [1, 5, 6], [1, 40, 41, 42], [1, 7]]
PAIRS = [([1, 5, 9], [4, 6]), ([2], [7]), ([3, 8, 8, 9, 2], [5, 5, 5])]
ENDS = set(range(2, 300, 8))
SPECS = (
    GenerationSpec(max_tokens=8),
    GenerationSpec(max_tokens=8, temperature=1.0, top_p=0.95, seed=4),
    GenerationSpec(max_tokens=6, num_beams=3),
)
LAYOUTS = (
    Degrees(pipeline=2), Degrees(pipeline=2, virtual_stages=2), Degrees(pipeline=2, expert=2, tensor=2),
    Degrees(pipeline=2, data=2, fsdp=2, expert_fsdp=2), Degrees(pipeline=4, stages=(1, 1, 1, 1)),
)  # fmt: skip


def results(degrees: Degrees, spec: Model) -> dict[str, Any]:
    """What this rank computes without gradients, by name; texts by number."""
    plan = replace(degrees, micro_batch_groups=1).plan(8)
    layout = Layout.build(plan)
    model = build_model(spec, layout, seed=3, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)
        values = _of_language(model, layout) if isinstance(model, LanguageModel) else _of_pairs(model, layout, plan)
    layout.close()
    return values


def _of_language(model: LanguageModel, layout: Layout) -> dict[str, Any]:
    numbers = layout.local_groups(len(PROMPTS))
    prompts = [PROMPTS[number] for number in numbers]
    texts = [
        generate(model, prompts, spec, ENDS, text_numbers=numbers, process_group=layout.lockstep_group)
        for spec in SPECS
    ]
    if layout.degree("tensor") > 1:  # likelihoods are of whole rows on a rank
        return {"texts": [dict(zip(numbers, of_spec, strict=True)) for of_spec in texts]}
    likelihoods = [likelihood.nats for likelihood in log_likelihoods(model, PAIRS, 16)]
    return {"texts": [dict(zip(numbers, of_spec, strict=True)) for of_spec in texts], "likelihoods": likelihoods}


def _of_pairs(model: torch.nn.Module, layout: Layout, plan: Any) -> dict[str, Any]:
    assert isinstance(model, TranslationModel)
    batch = rank_batch(layout, plan, Shape(), 300, 1)
    losses = [float(pairs_loss(model, micro_batch, 0.1).objective) for micro_batch in batch.micro_batches]
    source, *_ = global_batch(Shape(), 300, 1)
    numbers = layout.local_groups(len(source))
    own_source = source[numbers.start : numbers.stop]
    texts = [
        translate(model, own_source, spec, text_numbers=numbers, process_group=layout.lockstep_group) for spec in SPECS
    ]
    return {"texts": [dict(zip(numbers, of_spec, strict=True)) for of_spec in texts], "losses": losses}


@cache
def reference(spec: Model) -> dict[str, Any]:
    return results(Degrees(), spec)


def four_layers(attention: str) -> LanguageModelSpec:
    spec = language_model(attention, router="softmax_topk")
    return LanguageModelSpec(**{**spec.model_dump(), "num_layers": 4})


def assert_same_texts(answers: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for number, texts in enumerate(expected["texts"]):
        items = [item for answer in answers for item in answer["texts"][number].items()]
        assert dict(items) == texts
        assert all(text == texts[row] for row, text in items), "ranks with the same rows have the same texts"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("degrees", "attention"),
    [(degrees, attention) for degrees in LAYOUTS for attention in (*ATTENTIONS,)[LAYOUTS.index(degrees) :: 5][:2]],
    ids=str,
)
def test_language_models_evaluate_and_generate_the_same(ranks: Pools, degrees: Degrees, attention: str) -> None:
    spec = four_layers(attention)
    expected = reference(spec)
    answers = ranks[degrees.workers].run(results, degrees, spec)
    assert_same_texts(answers, expected)
    for answer in answers if degrees.tensor == 1 else ():
        assert answer["likelihoods"] == pytest.approx(expected["likelihoods"], rel=1e-10)


@pytest.mark.sample(1)
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_translation_models_evaluate_and_generate_the_same(ranks: Pools, degrees: Degrees) -> None:
    spec = model_of(router="softmax_topk")
    expected = reference(spec)
    answers = ranks[degrees.workers].run(results, degrees, spec)
    assert_same_texts(answers, expected)
    losses = sum(sum(answer["losses"]) for answer in answers)
    num_copies = degrees.pipeline  # every stage has the losses
    assert losses / num_copies == pytest.approx(sum(expected["losses"]), rel=1e-10)


def sends_after_a_failure() -> int:
    """Number of transfers that the stages keep after a pass that failed."""
    layout = Layout.build(Degrees(pipeline=2, micro_batch_groups=1).plan(8))
    stages = ModelStages.of_layout(2, layout)
    x = torch.ones(3, 4)

    def pass_through() -> None:
        with stages.passing() as active:
            for stage in active:
                if not stage.is_first:
                    assert stages.receive(stage, (3, 4), torch.float32, layout.device).tolist() == x.tolist()
                if not stage.is_last:
                    stages.send(stage, x)
            torch.distributed.barrier()  # the message has arrived: a failed pass does not wait for it
            raise torch.OutOfMemoryError("of this test")

    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        pass_through()
    direct_pass = stages._pass
    assert isinstance(direct_pass, DirectPass)
    num_sends = len(direct_pass._sends)
    (result,) = stages.on_last_stage(lambda: (x + 1,), [(3, 4)], torch.float32, layout.device)
    assert result.tolist() == (x + 1).tolist()
    layout.close()
    return num_sends


def test_a_pass_that_fails_keeps_nothing_that_it_sent(ranks: Pools) -> None:
    assert ranks[2].run(sends_after_a_failure) == [0, 0]
