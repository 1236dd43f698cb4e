"""Promise 1 on random models, batches and optimizers, and how far it goes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.spec import AdafactorSpec, MoESpec
from tests.grid import num_cases
from tests.parity.combinations import ROUTERS, assert_same, model_of, run_on, train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees, Shape, run

ELSEWHERE = (
    Degrees(micro_batch_groups=1), Degrees(micro_batch_groups=3), Degrees(expert=2, micro_batch_groups=2),
    Degrees(data=2, fsdp=2, expert_fsdp=2), Degrees(expert=2, tensor=2),
)  # fmt: skip
ADAFACTOR = AdafactorSpec(name="adafactor", peak_lr=1e-2)
BOUNDED = ADAFACTOR.model_copy(update={"eps": 1e-18})
"""Its denominator is at least 1e-9, as AdamW's."""


@st.composite
def moe_fields(draw: st.DrawFn) -> dict[str, object]:
    """A router of any kind, also with more experts than tokens, so that no token chooses some of them."""
    fields = dict(draw(st.sampled_from(list(ROUTERS.values()))))
    fields["num_experts"] = draw(st.sampled_from([4, 12, 48]))
    field_names = MoESpec(model_dim=16, hidden_dim=24, **fields).model_dump().keys()  # type: ignore[arg-type]
    if "aux_scope" in field_names:
        fields["aux_scope"] = draw(st.sampled_from(["group", "sequence", "global_batch"]))
        fields["aux_coefficient"] = draw(st.sampled_from([0.0, 0.05]))
    if "top_k" in field_names:
        fields["top_k"] = draw(st.integers(1, 2))
    return fields


@settings(max_examples=num_cases(15), deadline=None)
@given(
    fields=moe_fields(),
    shape=st.builds(
        Shape, groups=st.integers(1, 5), rows=st.integers(1, 3), source=st.integers(1, 7), target=st.integers(1, 5)
    ),
    degrees=st.sampled_from(ELSEWHERE),
    adafactor=st.booleans(),
)  # fmt: skip
def test_random_models_are_trained_alike(
    ranks: Pools, fields: dict[str, object], shape: Shape, degrees: Degrees, adafactor: bool
) -> None:
    """Three steps by AdamW or Adafactor: routing, losses, gradients and the resulting parameters."""
    one_key = min(shape.source, shape.target) == 1
    train = train_of(optimizer=BOUNDED if one_key else ADAFACTOR) if adafactor else train_of()
    reference = run(model_of(**fields), train, Degrees(), shape, 3)
    assert_same(run_on(ranks, degrees, model_of(**fields), train, shape, 3), reference, 1e-10)


@pytest.mark.parametrize("degrees", [Degrees(micro_batch_groups=1), Degrees(expert=2)], ids=str)
def test_the_first_step_balances_nothing_over_the_batch(ranks: Pools, degrees: Degrees) -> None:
    """There is no last load yet, and no token chooses most of the experts: Adafactor would take a full step along the
    rounding errors of their gradient."""
    model = model_of(num_experts=96, router="sigmoid_topk", aux_scope="global_batch", aux_coefficient=0.05)
    train = train_of(optimizer=ADAFACTOR)
    reference = run(model, train, Degrees(), Shape(), 4)
    assert 0 in reference[0]["layers"][0]["load"]
    assert_same(run_on(ranks, degrees, model, train, Shape(), 4), reference, 1e-10)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [Shape(source=1), Shape(target=1)], ids=str)
def test_with_one_key_queries_have_no_gradient_but_rounding(shape: Shape) -> None:
    """Where the promise ends: Adafactor would take a step in a direction that depends on the layout, unless its
    denominator is bounded."""
    train = train_of(optimizer=BOUNDED)
    reference = run(model_of(), train, Degrees(), shape, 6)
    zero_gradients = [name for name, norm in reference[0]["gradients"].items() if norm < 1e-14]
    assert any("query" in name for name in zero_gradients), "how much rounding there is, and whether any, is the CPU's"
    actual = run(model_of(), train, Degrees(micro_batch_groups=1), shape, 6)
    assert_same(actual, reference, 1e-10)


TIED = {"lone tokens": (Shape(rows=1, source=1, target=1), 300), "equal tokens": (Shape(rows=16, source=1), 5)}
"""(batch, vocabulary): groups of one token each, and groups of equal tokens at the same position"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", TIED)
def test_ties_of_sinkhorns_do_not_see_the_layout(ranks: Pools, case: str) -> None:
    shape, vocabulary = TIED[case]
    size = {"source_vocab_size": vocabulary, "target_vocab_size": vocabulary, "dropout": 0.0}
    model = model_of(router="sinkhorn_topk", num_experts=12).model_copy(update=size)
    reference = run(model, train_of(), Degrees(), shape, 3)
    elsewhere = Degrees(expert=2, tensor=2, micro_batch_groups=2)
    assert_same(run_on(ranks, elsewhere, model, train_of(), shape, 3), reference, 1e-10)
