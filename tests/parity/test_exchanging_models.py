"""Promise 1 for every exchange of keys and values between context ranks: losses, gradients and routing of every kind of
attention are those of one process."""

from dataclasses import replace

import pytest

from moe.plan.fit import fit_problems
from moe.spec import LanguageModelSpec
from moe.spec.parallel import ContextExchange
from tests.parity.combinations import (
    Model,
    assert_same,
    assert_same_gradients_through_logits,
    model_of,
    option_of,
    run_on,
    train_with,
    with_option,
)
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, language_model, with_adapter
from tests.parity.trajectory import Degrees, Shape, run

FEW_STEPS = 2
EXCHANGES: tuple[ContextExchange, ...] = ("ring", "heads")
LAYOUTS = (
    Degrees(data=2, context=2), Degrees(data=4, context=4), Degrees(expert=4, context=2, tensor=2),
    Degrees(expert=2, data=2, context=2, fsdp=4, expert_fsdp=2), Degrees(expert_tensor=2, context=2),
    Degrees(expert=2, context=2, fsdp=2),
)  # fmt: skip
SHAPES = (Shape(), Shape(source=4, target=5), Shape(source=2, target=1))
"""Rows of 12 positions, of 9, which the ranks do not divide, and of 3, so that ranks have none."""


def layout_of(spec: Model, exchange: ContextExchange, number: int) -> Degrees:
    """The layout whose turn it is, or the next one that the model's heads allow."""
    turn = (LAYOUTS[(number + offset) % len(LAYOUTS)] for offset in range(len(LAYOUTS)))
    return next(
        replace(degrees, context_exchange=exchange)
        for degrees in turn
        if not fit_problems(spec, degrees.plan(8).degrees.axes, exchange)
    )


def assert_same_on(ranks: Pools, spec: Model, exchange: ContextExchange, number: int) -> None:
    degrees, shape = layout_of(spec, exchange, number), SHAPES[number % len(SHAPES)]
    option = option_of(number, degrees)
    degrees, train = with_option(degrees, option) or degrees, train_with(option)
    records = run_on(ranks, degrees, spec, train, shape, FEW_STEPS)
    assert_same(records, run(spec, train, Degrees(), shape, FEW_STEPS), 1e-10)


EXCHANGED = [attention for attention in ATTENTIONS if "indexer" not in attention]


@pytest.mark.sample(2)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("attention", EXCHANGED)
def test_every_attention(ranks: Pools, attention: str, exchange: ContextExchange) -> None:
    spec: LanguageModelSpec = language_model(attention)
    assert_same_on(ranks, spec, exchange, EXCHANGED.index(attention) + 3 * EXCHANGES.index(exchange))


@pytest.mark.sample(1)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("attention", ["MLA", "global and local GQA with norms around them"])
def test_adapters_with_dropout(ranks: Pools, attention: str, exchange: ContextExchange) -> None:
    adapter = {"rank": 3, "dropout": 0.3, "targets": ["*.attention.*"]}
    assert_same_on(ranks, with_adapter(language_model(attention), adapter), exchange, EXCHANGES.index(exchange))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_encoder_and_a_decoder(ranks: Pools, exchange: ContextExchange) -> None:
    assert_same_on(ranks, model_of(), exchange, 3 * EXCHANGES.index(exchange))


def test_documents_in_a_ring_of_four(ranks: Pools) -> None:
    spec: LanguageModelSpec = language_model("GQA with windows, sinks and biases")
    assert_same_gradients_through_logits(ranks, replace(LAYOUTS[1], context_exchange="ring"), spec)
