"""Predicted matrix products of partly trained models against those of a forward and backward pass."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe.data.sequences.store import SequenceRows
from moe.layers.nll import smoothed_nll
from moe.parallel import Layout, QuantizedWeight
from moe.plan import Calibration, Cluster, Degrees, LayoutSearch, plan_job
from moe.plan.candidate import RECOMPUTES, Candidate, Options, Recompute
from moe.plan.cost.flops import attended_positions, model_flops_per_step, pairs_flops
from moe.plan.cost.units import Part, units
from moe.plan.degrees import ShardCounts
from moe.plan.plan import TimeEstimate
from moe.plan.profile import OURS
from moe.spec import JobSpec, UnpairedPreferenceSpec
from moe.spec.patterns import matches
from moe.spec.train import UNPAIRED_LOSSES
from moe.tasks.batch_context import BatchContext
from moe.tasks.build import build_model
from moe.tasks.language.batches import SequencesBatch
from moe.tasks.language.preference import preference_loss_of

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
ROWS, LENGTH, ONE = 4, 128, Degrees()
GROUPED = {"kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
DENSE = {"kind": "language", "model_dim": 128, "num_layers": 3, "ffn_dim": 384, "vocab_size": 1000,
         "attention": GROUPED, "tie_embeddings": False}  # fmt: skip
MIXTURE = {**DENSE, "first_dense_layers": 1, "moe": {
    "router": "softmax_topk", "top_k": 2, "num_experts": 4, "hidden_dim": 256, "shared_hidden_dim": 128,
    "activation": "swiglu", "group_tokens": LENGTH}}  # fmt: skip
PREFERENCES = {"corpus": "preference", "paths": ["/data/pairs.jsonl"]}


def with_adapter(model: dict[str, Any], rank: int = 16, **adapter: Any) -> dict[str, Any]:
    return {**model, "from": "/models/base", "adapter": {"rank": rank, **adapter}}


CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "dense, adapters": (with_adapter(DENSE), ()),
    "experts, adapters": (with_adapter(MIXTURE), ()),
    "experts, adapters of high rank": (with_adapter(MIXTURE, 64), ()),
    "experts, adapters on attention": (with_adapter(MIXTURE, targets=["*.attention.*"]), ()),
    "experts, a quantized base": (with_adapter(MIXTURE, base="nf4"), ()),
    "frozen experts": (MIXTURE, ("*.experts.*",)),
    "all but experts frozen": (MIXTURE, ("*.attention.*", "*.dense.*", "*.shared.*", "output.*")),
    "one layer frozen": (MIXTURE, ("layers.1.*",)),
    "a dense model's head frozen": (DENSE, ("output.*",)),
    "the lower layers frozen": (DENSE, ("embedding.*", "layers.0.*", "layers.1.*")),
}  # fmt: skip


def random_case(seed: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A model with random adapters, or with random frozen parameters."""
    draw = random.Random(seed)
    model = draw.choice([DENSE, MIXTURE])
    parts = ["*.attention.*", "*.experts.*", "*.shared.*"] if model is MIXTURE else ["*.attention.*", "*.dense.*"]
    targets = draw.sample(parts, draw.randint(1, len(parts) - 1))
    if draw.random() < 0.5:
        lower = ["embedding.*", *(f"layers.{layer}.*" for layer in range(draw.randint(0, 2)))]
        return model, (*draw.choice([lower, targets]), *draw.sample(["layers.2.*", "output.*"], draw.randint(0, 1)))
    return with_adapter(model, draw.randint(1, 48), targets=targets, base=draw.choice(["float32", "int8"])), ()


CASES |= {f"random {seed}": random_case(seed) for seed in range(6)}


class Products(TorchDispatchMode):
    """Counts the multiplications of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__.strip("_")
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            a, b = args[:2] if name in ("mm", "bmm") else args[1:3]
            self.count += a.numel() * b.shape[-1]
        return function(*args, **(kwargs or {}))


def job(model: dict[str, Any], freeze: tuple[str, ...] = (), **data: Any) -> JobSpec:
    return JobSpec.parse({
        "model": model, "data": {"corpus": "packages", "max_tokens": LENGTH, **data},
        "train": {"num_steps": 1, "batch_tokens": ROWS * LENGTH, "freeze": list(freeze)},
    })  # fmt: skip


def loss_of_pairs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Loss of rows whose halves are a preferred and a rejected answer."""
    halves = (np.arange(LENGTH) >= LENGTH // 2).astype(np.int32)
    rows = SequenceRows(tokens.numpy(), np.tile(halves, (ROWS, 1)), tokens.numpy())
    batch = SequencesBatch.from_part(rows, BatchContext(rows_per_group=1), Layout.single())
    return preference_loss_of(model, batch, job(model.spec.model_dump(mode="json"), **PREFERENCES)).objective


def loss_of_texts(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    hidden_states = model.hidden_states(tokens, BatchContext(documents=torch.zeros_like(tokens)))
    return smoothed_nll(hidden_states, model.output_embedding, tokens, 0.0, 0)[0]


def count_products(
    model: dict[str, Any], freeze: tuple[str, ...] = (), loss_of: Loss = loss_of_texts, **options: Any
) -> int:
    """Multiplications of a forward and backward pass, excluding those of pairs of positions."""
    torch.manual_seed(0)
    network: Any = build_model(job(model).model, replace(Layout.single(), **options))
    for name, parameter in network.named_parameters():
        if any(matches(pattern, name) for pattern in freeze):
            parameter.requires_grad_(False)
    if "adapter" in model:  # gradients reach the first layer, as they do most layers of a deep model
        network.embedding.weight.requires_grad_(True)
    tokens = torch.randint(5, 1000, (ROWS, LENGTH))
    with Products() as products:
        loss_of(network, tokens).backward()
    return products.count


BY_ARITHMETIC = Calibration(machine="an imagined one", memory_bytes_per_s=1e18, half_rows=0.0, expert_half_rows=0.0)


def predict(
    spec: JobSpec, degrees: Degrees = ONE, calibration: Calibration | None = BY_ARITHMETIC, **options: Any
) -> TimeEstimate:
    """On CPUs whose products are bound by arithmetic alone."""
    cluster = Cluster(num_nodes=1, devices_per_node=degrees.num_workers, device="cpu", memory_bytes=1 << 40,
                      calibration=calibration)  # fmt: skip
    candidate = Candidate(degrees, Options(micro_batch_groups=spec.num_groups // degrees.data, **options))
    return LayoutSearch(spec, cluster).time.estimate(candidate)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", CASES)
def test_products_and_operations_of_a_partly_trained_model(name: str) -> None:
    """Operations exclude pairs of attention positions; they differ by the recomputation of an adapter's first half."""
    model, freeze = CASES[name]
    full_model = MIXTURE if "moe" in model else DENSE
    share = count_products(model, freeze) / count_products(full_model)
    assert predict(job(model, freeze)).products_s / predict(job(full_model)).products_s == pytest.approx(
        share, rel=0.01
    )
    assert share < 0.97 or "high rank" in name or "random" in name

    def operations(spec: JobSpec) -> float:
        pairs = sum(
            spec.train.batch_tokens * pairs_flops(attention, attended_positions(attention, spec.data.padded_tokens))
            * (1 + 2 * unit.has_backward)
            for unit in units(spec.model, OURS, spec.train.freeze) for attention in unit.attentions
        )  # fmt: skip
        return model_flops_per_step(spec) - pairs

    if "random" not in name:
        assert operations(job(model, freeze)) / operations(job(full_model)) == pytest.approx(share, rel=0.04)


@pytest.mark.parametrize("base", [DENSE, MIXTURE], ids=["dense", "experts"])
def test_products_of_preferences(base: dict[str, Any]) -> None:
    """The base without its adapter runs first."""
    model = with_adapter(base)
    ratio = count_products(model, loss_of=loss_of_pairs) / count_products(model)
    expected = predict(job(model, **PREFERENCES)).products_s / predict(job(model)).products_s
    assert expected == pytest.approx(ratio, rel=0.03)
    assert ratio > 1.3


@pytest.mark.parametrize(("loss", "extra_passes"), [("dpo", 1), ("simpo", 0), ("kto", 3), ("apo_zero_unpaired", 1)])
def test_products_and_memory_of_preferences_of_all_weights(loss: str, extra_passes: int) -> None:
    """KTO's mismatched answers run through both models, without a backward pass."""
    texts, pairs = job(MIXTURE), job(MIXTURE, **PREFERENCES)
    update: dict[str, Any] = {"train": pairs.train.model_copy(update={"preference_loss": loss})}
    if loss in UNPAIRED_LOSSES:
        update["data"] = UnpairedPreferenceSpec(
            **{**PREFERENCES, "corpus": "unpaired_preference", "max_tokens": LENGTH}
        )
    pairs = pairs.model_copy(update=update)
    ratio = model_flops_per_step(pairs) / model_flops_per_step(texts)
    assert ratio == pytest.approx((3 + extra_passes) / 3, rel=0.01)
    cluster = Cluster(num_nodes=1, devices_per_node=1, device="cpu", memory_bytes=4 << 30)
    expected, memory = (plan_job(spec, cluster, 1).memory for spec in (texts, pairs))
    assert memory.parameters == (1 + (extra_passes > 0)) * expected.parameters
    assert memory.optimizer == expected.optimizer


def test_preferences_repeat_exchanges_and_gathers() -> None:
    degrees = Degrees(data=4, fsdp=4, expert=2, expert_fsdp=2)
    texts, pairs = (
        predict(job(with_adapter(MIXTURE), **data), degrees, sharding="parameters") for data in ({}, PREFERENCES)
    )
    assert pairs.gather_s / texts.gather_s == pytest.approx(3 / 2, rel=0.1), "no frozen gradients are scattered"
    assert pairs.all_to_all_s / texts.all_to_all_s == pytest.approx(6 / 4, rel=0.1)
    assert pairs.attention_s / texts.attention_s == pytest.approx(4.5 / 3.5, rel=1e-5)


@pytest.mark.parametrize(("tensor", "expert_tensor"), [(1, 1), (4, 1), (1, 4), (2, 2)])
def test_ranks_that_split_a_matrix_split_half_of_its_adapter(tensor: int, expert_tensor: int) -> None:
    """An adapter's B is split with the query matrix, and its A is not; for the output matrix it is the reverse."""
    unit = next(unit for unit in units(job(with_adapter(MIXTURE, 8)).model, OURS) if unit.moe is not None)
    m, heads, kv, expert_hidden, shared_hidden = 128, 128, 64, 256, 128

    def num_weights(part: Part, is_adapter: bool) -> int:
        matrices = unit.matrices(tensor, part)
        return sum(
            matrix.inputs * matrix.outputs * count for matrix, count in matrices if matrix.is_adapter == is_adapter
        )

    assert num_weights("others", False) == (2 * m * heads + 2 * m * kv) // tensor
    assert num_weights("others", True) == 8 * (3 * m + (heads + 2 * kv) // tensor + heads // tensor + m)
    assert num_weights("feed_forward", False) == 3 * m * shared_hidden
    assert num_weights("feed_forward", True) == 8 * 3 * (m + shared_hidden)
    base, adapters = 3 * m * expert_hidden / expert_tensor, 8 * (m + 3 * expert_hidden / expert_tensor + m)
    shards = ShardCounts(tensor=tensor, expert_tensor=expert_tensor)
    assert unit.products("experts", shards).forward == pytest.approx(1 + adapters / base, rel=1e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("base", ["nf4", "bfloat16"])
def test_a_base_is_dequantized_for_each_product(
    base: str, recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, dequantize = [], QuantizedWeight.dequantize

    def dequantize_and_record(self: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
        weight = dequantize(self, dtype)
        sizes.append(weight.numel())
        return weight

    # Dequantizes normally, and records each call: nothing else shows how often.
    monkeypatch.setattr(QuantizedWeight, "dequantize", dequantize_and_record)
    wide, narrow = with_adapter(MIXTURE, 2), with_adapter(MIXTURE, 2, base=base)
    count_products(narrow, recompute=recompute)
    plain_s, quantized_s = (
        predict(job(model), calibration=None, recompute=recompute).elementwise_s for model in (wide, narrow)
    )
    weight_s = 1 / 2e8 if base == "nf4" else 2 * 4 / 24e9
    assert (quantized_s - plain_s) / weight_s == pytest.approx(sum(sizes), rel=0.01)
