"""Promise 1 with context ranks: rows whose positions are on several ranks have the same losses, gradients and routing
as on one process."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist

from moe.parallel import ContextShard, Layout, SequenceShard, apply
from moe.spec import LanguageModelSpec
from moe.spec.generation import GenerationSpec
from moe.tasks.language import build_model
from moe.tasks.language.likelihood import log_likelihoods
from moe.tasks.language.preference import preferences_of
from moe.tasks.language.unpaired_preference import kl_sums, unpaired_preferences_of
from moe.tasks.translation.decoding import translate
from moe.tasks.translation.model import build_model as build_translation_model
from tests.parity.combinations import (
    ROUTERS,
    Model,
    assert_same,
    assert_same_gradients_through_logits,
    model_of,
    run_on,
    train_of,
)
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, language_model
from tests.parity.sequences import ANSWERS, PAIRS
from tests.parity.trajectory import Degrees, Shape, batch_of, run, task_of
from tests.refusals import expect_problem

ONE, FEW_STEPS = Degrees(), 2
PREFERENCE_MODEL = language_model("MLA", router="softmax_topk")
LAYOUTS = (
    Degrees(data=2, context=2), Degrees(expert=4, context=2, tensor=2), Degrees(data=4, context=4),
    Degrees(expert=2, data=2, context=2), Degrees(data=4, context=2, fsdp=2), Degrees(expert_tensor=2, context=2),
    Degrees(data=4, context=4, fsdp=2), Degrees(expert=2, data=2, context=2, fsdp=4, expert_fsdp=2),
    Degrees(expert=4, context=2, tensor=2, fsdp=2), Degrees(data=4, context=2, fsdp=4, sharding="gradients"),
)  # fmt: skip
SHAPES = (Shape(), Shape(source=2, target=1), Shape(source=4, target=5))
"""Rows of 12 positions, of 3, so that ranks have none, and of 9, which the ranks do not divide."""


@cache
def reference(spec: Model, shape: Shape = SHAPES[0]) -> list[dict]:
    return run(spec, train_of(), ONE, shape, FEW_STEPS)


def assert_same_on(ranks: Pools, degrees: Degrees, spec: Model, shape: Shape = SHAPES[0]) -> None:
    records = run_on(ranks, degrees, spec, train_of(), shape, FEW_STEPS)
    assert_same(records, reference(spec, shape), 1e-10)


@pytest.mark.sample(3)
@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_and_attention_over_context_ranks(ranks: Pools, router: str) -> None:
    number = list(ROUTERS).index(router)
    spec = language_model(list(ATTENTIONS)[number % len(ATTENTIONS)], **ROUTERS[router])
    assert_same_on(ranks, LAYOUTS[number % len(LAYOUTS)], spec, SHAPES[number % len(SHAPES)])


@pytest.mark.sample(2)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_in_short_and_uneven_rows(ranks: Pools, attention: str) -> None:
    number = list(ATTENTIONS).index(attention)
    spec: LanguageModelSpec = language_model(attention)
    assert_same_on(ranks, LAYOUTS[(number + 2) % len(LAYOUTS)], spec, SHAPES[1 + number % 2])


@pytest.mark.parametrize("shape", [Shape(), Shape(source=2), Shape(target=2)], ids=["both", "sources", "targets"])
def test_an_encoder_and_a_decoder_with_rows_of_their_own_lengths(ranks: Pools, shape: Shape) -> None:
    assert_same_on(ranks, LAYOUTS[2] if shape.source == 2 else LAYOUTS[1], model_of(), shape)


def test_logits_are_those_of_whole_rows(ranks: Pools) -> None:
    assert_same_gradients_through_logits(ranks, LAYOUTS[1], language_model("MLA"))


def test_ranks_without_rows(ranks: Pools) -> None:
    """One of two data ranks has no token group; all of its context ranks take part in the exchanges."""
    assert_same_on(ranks, Degrees(expert=2, data=2, context=2), language_model("MLA"), Shape(groups=1))


def _likelihoods(degrees: Degrees, attention: str) -> list[tuple[float, bool]]:
    layout = Layout.build(degrees.plan(8))
    model = build_model(language_model(attention, router="softmax_topk"), layout, seed=3, dtype=torch.float64).eval()
    pairs = [([1, 5, 6, 7, 8, 9], [4, 5]), ([1, 7], [3, 2, 9, 8]), ([1], [6])]
    likelihoods = log_likelihoods(model, pairs, max_tokens=7)
    layout.close()
    return [(likelihood.nats, likelihood.is_greedy) for likelihood in likelihoods]


def test_every_rank_scores_continuations_as_one_process(ranks: Pools) -> None:
    expected = _likelihoods(ONE, "GQA in chunks, and without positions")
    degrees = Degrees(expert=4, context=2, tensor=2)
    for answer in ranks[4].run(_likelihoods, degrees, "GQA in chunks, and without positions"):
        assert [is_greedy for _, is_greedy in answer] == [is_greedy for _, is_greedy in expected]
        assert [nats for nats, _ in answer] == pytest.approx([nats for nats, _ in expected], rel=1e-10)


def _held_out_sums(degrees: Degrees, learned: str) -> list[float]:
    """Sums over all ranks of what evaluation measures on pairs of answers, or on labelled answers."""
    plan = degrees.plan(8)
    layout = Layout.build(plan)
    task = task_of(PREFERENCE_MODEL, train_of(preference_loss="kto" if learned == ANSWERS else "dpo", seed=3), learned)
    model, reference = task.build_model(layout), task.model_of(PREFERENCE_MODEL, layout, seed=4, dtype=torch.float64)
    sums = torch.zeros(8, dtype=torch.float64)
    for micro_batch in batch_of(layout, plan, Shape(learned=learned), PREFERENCE_MODEL, 1).micro_batches:
        batch = micro_batch.for_evaluation()
        if learned == ANSWERS:
            answers = unpaired_preferences_of(model, replace(batch, kl=torch.tensor(0.1)), task.spec, reference)
            values = [answers.loss, answers.num_answers, *answers.rewards, *answers.num_by_label]
            values += kl_sums(model, batch, task.spec, reference)
        else:
            pairs = preferences_of(model, batch, task.spec, reference)
            values = [pairs.loss, pairs.num_pairs, pairs.num_right]
        sums += torch.stack([*map(torch.as_tensor, values), *[torch.zeros(())] * (8 - len(values))]).double()
    if layout.world_group is not None:
        dist.all_reduce(sums, group=layout.world_group)
    layout.close()
    return sums.tolist()


@pytest.mark.parametrize("learned", [PAIRS, ANSWERS])
def test_preferences_are_measured_as_on_one_process(ranks: Pools, learned: str) -> None:
    expected = _held_out_sums(ONE, learned)
    assert expected[1] > 0
    for sums in ranks[4].run(_held_out_sums, Degrees(expert=4, context=2, tensor=2), learned):
        assert sums == pytest.approx(expected, rel=1e-10)


def _translations(degrees: Degrees) -> list[list[list[int]]]:
    """Greedy translations and those of beam search, of rows of several lengths."""
    layout = Layout.build(degrees.plan(8))
    model = build_translation_model(model_of(router="softmax_topk"), layout, seed=3, dtype=torch.float64).eval()
    source = torch.tensor([[5, 6, 7, 8, 9], [4, 3, 0, 0, 0], [9, 8, 7, 0, 0]])
    specs = GenerationSpec(max_tokens=6), GenerationSpec(max_tokens=5, num_beams=2)
    answers = [translate(model, source, spec, process_group=layout.lockstep_group) for spec in specs]
    layout.close()
    return answers


def test_every_rank_translates_as_one_process(ranks: Pools) -> None:
    """Context ranks encode parts of the sources, and decode alike."""
    assert ranks[2].run(_translations, Degrees(expert=2, context=2)) == [_translations(ONE)] * 2


def test_a_model_that_does_not_share_its_rows_is_refused() -> None:
    layout = Layout(0, 2, torch.device("cpu"), {"context": 2})
    with expect_problem("unsupported", "parallel.context", 2):
        apply(torch.nn.Linear(2, 2), [], layout)


def _exchange(num_positions: int) -> list[torch.Tensor]:
    """On each rank: its positions, gathered rows, their gradient, results, their gradient, and the positions of all
    tokens gathered over tensor ranks and context ranks."""
    layout = Layout.from_degrees({"context": dist.get_world_size()})
    group = layout.group("context")
    assert group is not None
    shard = ContextShard(num_positions, group)
    rows = torch.arange(3.0 * num_positions * 2, dtype=torch.float64).view(3, num_positions, 2)
    part = shard.take(rows).requires_grad_()
    factor = torch.full((), 1.0 + layout.rank, dtype=torch.float64)
    (gathered, twice) = shard.gather(part, 2 * part)
    ((gathered + 0.5 * twice) * factor * rows).sum().backward()
    gathered_grad, part.grad = part.grad, None
    results = shard.gather_results(part)
    (results * rows).sum().backward()
    tokens = SequenceShard.of_rows(3, num_positions, None, group)
    ids = torch.arange(tokens.num_tokens)
    numbers = tokens.gather_all(tokens.take(ids))
    layout.close()
    return [shard.positions("cpu"), gathered.detach(), gathered_grad, results.detach(), part.grad, numbers]


@pytest.mark.parametrize(("num_ranks", "num_positions"), [(2, 8), (2, 5), (4, 19), (4, 3)])
def test_positions_are_gathered_in_order_and_gradients_are_summed(
    ranks: Pools, num_ranks: int, num_positions: int
) -> None:
    rows = torch.arange(3.0 * num_positions * 2, dtype=torch.float64).view(3, num_positions, 2)
    total = num_ranks * (num_ranks + 1) / 2
    for positions, gathered, gathered_grad, results, result_grad, numbers in ranks[num_ranks].run(
        _exchange, num_positions
    ):
        assert torch.equal(gathered, rows)
        assert torch.equal(results, rows)
        torch.testing.assert_close(gathered_grad, 2 * total * rows[:, positions])
        assert torch.equal(result_grad, rows[:, positions])
        assert torch.equal(numbers, torch.arange(3 * num_positions))
