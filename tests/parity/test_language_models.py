"""Promise 1 of language models: every kind of attention under every layout, with packed documents and padding in rows,
and with parts of them frozen."""

import math
from functools import cache
from pathlib import Path
from random import Random
from typing import get_args

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from moe.interchange.expand import expand_model
from moe.parallel import Layout
from moe.spec import AdafactorSpec, AdapterSpec, LanguageModelSpec, TrainSpec, model_spec
from moe.spec.train import UNPAIRED_LOSSES, PreferenceLoss
from moe.tasks.language import build_model
from tests.grid import each_once, index_params, num_cases
from tests.language.families import FAMILIES
from tests.language.model_pairs import their_model
from tests.parity.combinations import (
    LAYOUTS,
    ROUTERS,
    assert_bit_identical,
    assert_same,
    assert_same_gradients_through_logits,
    option_of,
    refused_paths,
    run_on,
    train_of,
    train_with,
    with_option,
    with_possible_exchange,
)
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, VOCABULARY, dense, language_model, with_adapter
from tests.parity.random_language import FREEZES, language_models
from tests.parity.random_language import LAYOUTS as RANDOM_LAYOUTS
from tests.parity.sequences import ANSWERS, PAIRS, SOME
from tests.parity.trajectory import Degrees, Shape, batch_of, run

ONE, FEW_STEPS = Degrees(), 2
EVERY_LAYOUT = [degrees for family in LAYOUTS.values() for degrees in family]
FOLDED = Degrees(expert=2, data=2, tensor=2, fsdp=2, expert_fsdp=2)
FOLDED_CONTEXT = Degrees(expert=2, data=2, context=2, fsdp=4, expert_fsdp=2)
UPCYCLED_ON = (Degrees(expert=2), Degrees(data=2, fsdp=2, expert_fsdp=2), Degrees(expert=2, expert_tensor=2), FOLDED)


@cache
def reference(spec: LanguageModelSpec, train: TrainSpec, num_steps: int = FEW_STEPS) -> list[dict]:
    return run(spec, train, ONE, Shape(), num_steps)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_reference_meets_what_it_is_meant_to_meet(attention: str) -> None:
    """Otherwise the comparisons below would show little."""
    records = reference(language_model(attention), train_of(), 6)
    assert any(layer["dropped"] > 0 for record in records for layer in record["layers"])
    assert any(layer["rejected"] > 0 for record in records for layer in record["layers"])
    assert records[-1]["loss"] < records[0]["loss"]
    assert all(norm > 0 for norm in records[0]["gradients"].values())
    assert Degrees().plan(8).options.num_micro_batches == 1
    layout = Layout.single()
    (batch,) = batch_of(layout, ONE.plan(8), Shape(), language_model(attention), 1).micro_batches
    assert batch.context.documents is not None
    numbers = batch.context.documents
    assert bool((numbers < 0).any())
    assert int(numbers.max()) > 1
    assert int(numbers[0].max()) == 0, "one whole document"


@pytest.mark.sample(10)
@pytest.mark.parametrize("number", range(len(EVERY_LAYOUT)), ids=lambda number: str(EVERY_LAYOUT[number]))
def test_every_layout_with_some_attention_some_router_and_some_option(ranks: Pools, number: int) -> None:
    """Several layouts have each of them. `make parity` runs every router and every option with each."""
    attention = list(ATTENTIONS)[number % len(ATTENTIONS)]
    router = list(ROUTERS)[(5 * number + number // len(ROUTERS)) % len(ROUTERS)]
    option = option_of(number, EVERY_LAYOUT[number])
    degrees, train = with_option(EVERY_LAYOUT[number], option), train_with(option)
    spec = language_model(attention, **ROUTERS[router])
    degrees = with_possible_exchange(degrees, spec)
    assert_same(run_on(ranks, degrees, spec, train, Shape(), FEW_STEPS), reference(spec, train), 1e-10)


@pytest.mark.sample(1)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_float64_trajectories(ranks: Pools, attention: str) -> None:
    spec = language_model(attention)
    assert_same(run_on(ranks, FOLDED, spec, train_of(), Shape(), 8), reference(spec, train_of(), 8), 1e-10)


# Examples are not shrunk: each attempt that fails costs new processes.
@settings(max_examples=num_cases(12), deadline=None, phases=[Phase.explicit, Phase.generate], print_blob=True)
@given(data=st.data())
def test_random_models_are_trained_alike(ranks: Pools, data: st.DataObject) -> None:
    """Two steps, by AdamW or Adafactor, perhaps with parts frozen. Windows, chunks of the delta rule and groups lie
    across documents."""
    degrees = data.draw(st.sampled_from(RANDOM_LAYOUTS), "layout")
    spec = data.draw(language_models(degrees), "model")
    groups, rows = data.draw(st.integers(1, 5), "groups"), data.draw(st.integers(1, 3), "rows")
    shape = Shape(groups, rows, data.draw(st.sampled_from([1, 2, 11, 65]), "positions"), 1)
    if spec.moe is None:
        fsdp = degrees.workers // degrees.tensor
        degrees = Degrees(data=degrees.workers, tensor=degrees.tensor, context=degrees.context, fsdp=fsdp)
    optimizers = [train_of().optimizer, AdafactorSpec(name="adafactor", eps=1e-18)]
    freezes = FREEZES if spec.adapter is None else FREEZES[:1]  # otherwise no parameter may be left to train
    train = train_of(
        optimizer=data.draw(st.sampled_from(optimizers), "optimizer"),
        freeze=data.draw(st.sampled_from(freezes), "freeze"),
    )
    answer = run_on(ranks, degrees, spec, train, shape, FEW_STEPS)
    assert_same(answer, run(spec, train, ONE, shape, FEW_STEPS), 1e-10)


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("degrees", [Degrees(expert=4), Degrees(data=4, fsdp=4, expert_fsdp=4)], ids=str)
def test_ranks_without_a_group(ranks: Pools, degrees: Degrees, attention: str, is_adapted: bool) -> None:
    """Such ranks take part in every exchange without rows, for every kind of attention; adapters have dropout."""
    plain, shape = language_model(attention), Shape(groups=3)
    spec = model_with_adapter(attention, 0.3, router="softmax_topk", shared_hidden_dim=5) if is_adapted else plain
    answer = run_on(ranks, degrees, spec, train_of(), shape, 3)
    assert_same(answer, run(spec, train_of(), ONE, shape, 3), 1e-10)


@pytest.mark.sample(2)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_dense_models(ranks: Pools, attention: str) -> None:
    spec = dense(language_model(attention))
    for degrees in (Degrees(data=2, fsdp=2), Degrees(data=2, tensor=2)):
        answer = run_on(ranks, degrees, spec, train_of(), Shape(), FEW_STEPS)
        assert_same(answer, reference(spec, train_of()), 1e-10)


FROZEN_ON = (
    Degrees(expert=2, micro_batch_groups=1),
    Degrees(expert=2, tensor=2),
    Degrees(data=2, fsdp=2, expert_fsdp=2),
    FOLDED,
    FOLDED_CONTEXT,
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", each_once((freeze for freeze in FREEZES if freeze), FROZEN_ON))
def test_what_is_frozen_is_frozen_on_every_layout(ranks: Pools, case: tuple[tuple[str, ...], Degrees]) -> None:
    """Trained parameters, whose gradients pass through frozen ones, are the same; frozen ones keep every bit."""
    freeze, degrees = case
    attention = list(ATTENTIONS)[FREEZES.index(freeze) % len(ATTENTIONS)]
    spec = language_model(attention, **ROUTERS["sigmoid with bias, in groups"])
    train, initial_model = train_of(freeze=freeze), build_model(spec, seed=3, dtype=torch.float64)
    answer = run_on(ranks, degrees, spec, train, Shape(), FEW_STEPS)
    assert_same(answer, reference(spec, train), 1e-10)
    trained_names, parameter_norms = answer[-1]["gradients"].keys(), answer[-1]["parameters"]
    assert 0 < len(trained_names) < len(parameter_norms)
    for name, parameter in initial_model.named_parameters():
        assert (parameter_norms[name] == parameter.norm().item()) == (name not in trained_names), name


ALL_BUT_INDEXERS = (
    "embedding.*", "output.*", "norm.weight", "*.norm.weight", "*.moe.*", "*.dense.*", "*.attention.query_*",
    "*.attention.key_value_*", "*.attention.output.*",
)  # fmt: skip
"""Frozen in the warm-up that docs/families.md shows."""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "degrees", [FOLDED, Degrees(recompute="full"), Degrees(expert=2, tensor=2), FOLDED_CONTEXT], ids=str
)
def test_an_indexer_alone_is_trained_in_its_warm_up(ranks: Pools, degrees: Degrees) -> None:
    """In layers below, nothing has a gradient but the indexer's own loss."""
    fields = language_model("MLA with an indexer").model_dump()
    fields["attention"]["indexer"] |= {"stage": "dense", "loss_coefficient": 1.0}
    spec, train = LanguageModelSpec(**fields), train_of(freeze=ALL_BUT_INDEXERS)
    expected = reference(spec, train, 8)
    assert_same(run_on(ranks, degrees, spec, train, Shape(), 8), expected, 1e-10)
    assert all(".indexer." in name for name in expected[-1]["gradients"])
    assert len(expected[-1]["gradients"]) == 2 * 5
    assert 0 < expected[-1]["indexer_loss"] < expected[0]["indexer_loss"]


def model_with_adapter(attention: str, dropout: float = 0.0, **moe: object) -> LanguageModelSpec:
    """A model with adapters of everything that can have one, except of routers whose bias follows the loads."""
    spec = language_model(attention, **moe)
    targets = None if spec.moe.routing.bias_rate else ("*",)
    groups = [{"pattern": "*.w_out", "rank": 2, "alpha": 3.0}, {"pattern": "layers.0.*", "alpha": 2.0}]
    adapter = AdapterSpec(rank=3, alpha=5.0, targets=targets, dropout=dropout, groups=groups)
    return with_adapter(spec, adapter)


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", index_params(EVERY_LAYOUT, 3))
def test_adapters_are_trained_alike_on_every_layout(ranks: Pools, number: int) -> None:
    """Three steps: A has no gradient in the first, where B is zero. Experts are gated, with biases and shared ones."""
    attention = list(ATTENTIONS)[number % len(ATTENTIONS)]
    router = list(ROUTERS)[(5 * number + 1 + number // len(ROUTERS)) % len(ROUTERS)]
    experts = {"activation": ("swiglu", "relu")[number % 2], "expert_bias": number % 3 == 0, "shared_hidden_dim": 5}
    spec = model_with_adapter(attention, (0.0, 0.3)[number // 2 % 2], **{**experts, **ROUTERS[router]})
    saved = ("embedding", "output") if number % 3 == 0 and not spec.tie_embeddings else ()
    spec = with_adapter(spec, spec.adapter.model_copy(update={"modules_to_save": saved}))
    answer = run_on(ranks, with_possible_exchange(EVERY_LAYOUT[number], spec), spec, train_of(), Shape(), 3)
    expected = reference(spec, train_of(), 3)
    assert_same(answer, expected, 1e-10)
    whole = {f"{name}.weight" for name in saved} | ({"output.bias"} if saved and spec.output_bias else set())
    assert {name for name in expected[-1]["gradients"] if not name.endswith(("_lora_a", "_lora_b"))} == whole
    assert all(norm > 0 for norm in expected[-1]["gradients"].values())


@pytest.mark.sample(2)
@pytest.mark.parametrize("learned", [SOME, PAIRS, ANSWERS])
@pytest.mark.parametrize("number", range(0, len(EVERY_LAYOUT), 5), ids=lambda number: str(EVERY_LAYOUT[number]))
def test_conversations_and_preferences_are_learned_alike(ranks: Pools, number: int, learned: str) -> None:
    """Some layouts have ranks without a pair or an answer, or with rows of nothing to learn. Three steps, as for
    adapters: at first both models are equal."""
    degrees = EVERY_LAYOUT[number]
    attention = list(ATTENTIONS)[number // 5 % len(ATTENTIONS)]
    router = list(ROUTERS)[(7 * number + 2) % len(ROUTERS)]
    spec, shape = model_with_adapter(attention, **ROUTERS[router]), Shape(learned=learned)
    train = train_of(preference_loss="kto" if learned == ANSWERS else "dpo")
    expected = run(spec, train, ONE, shape, 3)
    degrees = with_possible_exchange(degrees, spec)
    assert_same(run_on(ranks, degrees, spec, train, shape, 3), expected, 1e-10)
    assert expected[2]["nll"] < expected[0]["nll"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", each_once(get_args(PreferenceLoss), (*FROZEN_ON, Degrees(data=2, fsdp=2))))
def test_preferences_of_all_weights_are_learned_alike(ranks: Pools, case: tuple[PreferenceLoss, Degrees]) -> None:
    """DPO, IPO, KTO and APO compare with a frozen copy of the initial weights, which is sharded as the model is."""
    loss, degrees = case
    attention = list(ATTENTIONS)[get_args(PreferenceLoss).index(loss)]
    shape = Shape(learned=ANSWERS if loss in UNPAIRED_LOSSES else PAIRS)
    spec = language_model(attention, **ROUTERS["sigmoid with bias, in groups"])
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.5} if loss in UNPAIRED_LOSSES else {}
    train = train_of(preference_loss=loss, **weights)
    expected = run(spec, train, ONE, shape, 3)
    assert_same(run_on(ranks, degrees, spec, train, shape, 3), expected, 1e-10)
    assert expected[2]["nll"] < expected[0]["nll"]
    if loss == "dpo":
        assert expected[0]["nll"] == pytest.approx(math.log(2), rel=1e-12)
    if loss == "kto":
        kls = [record["numbers"]["kl"] for record in expected]
        assert kls[0] == 0 < kls[2]
        desirable, undesirable = (expected[2]["numbers"][f"reward_{kind}"] for kind in ("desirable", "undesirable"))
        assert expected[2]["numbers"]["reward_margin"] == desirable - undesirable > 0


UPCYCLED = {
    "softmax, in groups, with noise": ("llama", {"num_experts": 4, "granularity": 3, "noise": 0.1}),
    "softmax, shared with a gate, dense layers": (
        "llama", {"num_experts": 4, "granularity": 2, "shared_slices": 1, "every": 2, "form": "qwen2_moe"},
    ),
    "sigmoid, shared, in groups": (
        "qwen3", {"num_experts": 4, "granularity": 3, "shared_slices": 1, "noise": 0.1, "form": "glm4_moe"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def dense_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Dense models in float64, whose every dimension four ranks can split."""
    sizes = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 16,
             "head_dim": 4, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "attention_bias": False}  # fmt: skip
    folders = {}
    for family in ("llama", "qwen3"):
        config = {**FAMILIES[family](Random(family)), **sizes, "tie_word_embeddings": False}
        config |= {"use_sliding_window": False} if family == "qwen3" else {}
        folders[family] = tmp_path_factory.mktemp(family) / "dense"
        their_model(config).save_pretrained(folders[family])
    return folders


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", each_once(UPCYCLED, UPCYCLED_ON))
def test_upcycled_models_train_alike(ranks: Pools, dense_folders: dict[str, Path], case: tuple[str, Degrees]) -> None:
    """Each rank reads its own slices of the dense layers, and draws its own part of routers and noise."""
    name, degrees = case
    family, upcycle = UPCYCLED[name]
    raw_model = {"from": str(dense_folders[family]), "upcycle": upcycle, "moe": {"group_tokens": 64}}
    spec = model_spec(expand_model(raw_model, None))
    assert isinstance(spec, LanguageModelSpec)
    expected = reference(spec, train_of(), 3)
    assert_same(run_on(ranks, degrees, spec, train_of(), Shape(), 3), expected, 1e-10)
    if "noise" not in upcycle:
        dense_spec = model_spec(expand_model({"from": str(dense_folders[family])}, None))
        assert isinstance(dense_spec, LanguageModelSpec)
        dense_nll = reference(dense_spec, train_of(), 1)[0]["nll"]
        assert expected[0]["nll"] == pytest.approx(dense_nll, rel=1e-10)


RECOMPUTED = ("without", "recomputation, selective", "recomputation, full", "accumulation", "all")


@pytest.mark.slow
@pytest.mark.parametrize("case", each_once(ATTENTIONS, RECOMPUTED))
def test_dropout_of_adapters_is_the_same_on_every_layout(ranks: Pools, case: tuple[str, str]) -> None:
    """Layers with and without experts, with shared experts. Input columns of some adapters are split over ranks, and
    recomputation draws the same masks."""
    attention, option = case
    experts = {"activation": "swiglu", "shared_hidden_dim": 5, "router": "softmax_topk"}
    spec = model_with_adapter(attention, 0.3, **experts)
    spec = spec.model_copy(update={"num_layers": 3, "dense_layers": (1,)})
    folded = FOLDED_CONTEXT if option == "recomputation, full" else FOLDED
    degrees = with_option(Degrees(expert=2, tensor=2) if option == "accumulation" else folded, option)
    assert degrees is not None
    answer = run_on(ranks, degrees, spec, train_of(), Shape(), 3)
    expected = reference(spec, train_of(), 3)
    assert_same(answer, expected, 1e-10)
    assert all(norm > 0 for norm in expected[-1]["gradients"].values())
    spec_without_dropout = spec.model_copy(update={"adapter": spec.adapter.model_copy(update={"dropout": 0.0})})  # type: ignore[union-attr]
    assert reference(spec_without_dropout, train_of(), 3)[-1]["loss"] != expected[-1]["loss"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("degrees", [Degrees(expert=2, tensor=2), FOLDED, FOLDED_CONTEXT], ids=str)
def test_gradients_of_logits_do_not_see_the_layout(ranks: Pools, degrees: Degrees, attention: str) -> None:
    assert_same_gradients_through_logits(ranks, degrees, language_model(attention))


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_same_layout_is_bit_identical(ranks: Pools, attention: str) -> None:
    assert_bit_identical(ranks, FOLDED, language_model(attention), 3)


HEADS = {
    "GQA with windows, sinks and biases": "model.attention.num_kv_heads",
    "MLA": "model.attention.num_heads",
    "DeltaNet and gated GQA": "model.linear_attention.num_key_heads",
}


@pytest.mark.parametrize("attention", HEADS)
def test_heads_that_do_not_divide_are_refused(attention: str) -> None:
    assert HEADS[attention] in refused_paths(language_model(attention), Degrees(expert=4, tensor=4))
