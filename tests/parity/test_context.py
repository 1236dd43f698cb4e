"""Promise 1 with context ranks: rows whose positions are on several ranks have the same losses, gradients and routing
as on one process."""

from functools import cache

import pytest
import torch
import torch.distributed as dist

from moe.parallel import ContextShard, Layout, SequenceShard
from moe.spec import LanguageModelSpec
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
from tests.parity.trajectory import Degrees, Shape, run

ONE, FEW_STEPS = Degrees(), 2
LAYOUTS = (
    Degrees(data=2, context=2), Degrees(expert=4, context=2, tensor=2), Degrees(data=4, context=4),
    Degrees(expert=2, data=2, context=2), Degrees(data=4, context=2, fsdp=2), Degrees(expert_tensor=2, context=2),
    Degrees(data=4, context=4, fsdp=2), Degrees(expert=2, data=2, context=2, fsdp=4, expert_fsdp=2),
    Degrees(expert=4, context=2, tensor=2, fsdp=2),
)  # fmt: skip
SHAPES = (Shape(), Shape(source=2, target=1), Shape(source=4, target=5))
"""Rows of 12 positions, of 3, so that ranks have none, and of 9, which the ranks do not divide."""


@cache
def reference(spec: Model, shape: Shape = SHAPES[0]) -> list[dict]:
    return run(spec, train_of(), ONE, shape, FEW_STEPS)


def assert_same_on(ranks: Pools, degrees: Degrees, spec: Model, shape: Shape = SHAPES[0]) -> None:
    records = run_on(ranks, degrees, spec, train_of(), shape, FEW_STEPS)
    assert_same(records, reference(spec, shape), 1e-10)


@pytest.mark.sample(4)
@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_and_attention_over_context_ranks(ranks: Pools, router: str) -> None:
    number = list(ROUTERS).index(router)
    spec = language_model(list(ATTENTIONS)[number % len(ATTENTIONS)], **ROUTERS[router])
    assert_same_on(ranks, LAYOUTS[number % len(LAYOUTS)], spec, SHAPES[number % len(SHAPES)])


@pytest.mark.sample(4)
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
