"""Predicted products of models of which little is trained beside those that a forward and backward pass makes."""

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
from moe.plan import Calibration, Cluster, Degrees, LayoutSearch
from moe.plan.candidate import RECOMPUTES, Candidate, Options, Recompute
from moe.plan.cost.flops import looked_at, model_flops_per_step, pairs_flops
from moe.plan.cost.units import Part, units
from moe.plan.degrees import ShardCounts
from moe.plan.plan import TimeEstimate
from moe.plan.profile import OURS
from moe.spec import JobSpec
from moe.spec.patterns import matches
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
ADAPTED = {"from": "/models/base", "adapter": {"rank": 16}}
ON_ATTENTION = {**ADAPTED, "adapter": {"rank": 16, "targets": ["*.attention.*"]}}
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "dense, adapters": ({**DENSE, **ADAPTED}, ()),
    "experts, adapters": ({**MIXTURE, **ADAPTED}, ()),
    "experts, adapters of high rank": ({**MIXTURE, **ADAPTED, "adapter": {"rank": 64}}, ()),
    "experts, adapters on attention": ({**MIXTURE, **ON_ATTENTION}, ()),
    "experts, a coded base": ({**MIXTURE, **ADAPTED, "adapter": {"rank": 16, "base": "nf4"}}, ()),
    "experts that are frozen": (MIXTURE, ("*.experts.*",)),
    "all but experts frozen": (MIXTURE, ("*.attention.*", "*.dense.*", "*.shared.*", "output.*")),
    "one layer frozen": (MIXTURE, ("layers.1.*",)),
    "a dense model's head frozen": (DENSE, ("output.*",)),
    "the lower layers frozen": (DENSE, ("embedding.*", "layers.0.*", "layers.1.*")),
}  # fmt: skip


class Products(TorchDispatchMode):
    """Counts the multiplications of all matrix products, whether they are added to something or not."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        name = function.overloadpacket.__name__.strip("_")
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            a, b = given[:2] if name in ("mm", "bmm") else given[1:3]
            self.count += a.numel() * b.shape[-1]
        return function(*given, **(named or {}))


def job(model: dict[str, Any], freeze: tuple[str, ...] = (), **data: Any) -> JobSpec:
    return JobSpec.parse(
        {
            "model": model,
            "data": {"corpus": "packages", "max_tokens": LENGTH, **data},
            "train": {"num_steps": 1, "batch_tokens": ROWS * LENGTH, "freeze": list(freeze)},
        }
    )


def pairs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Loss of rows whose two halves are a preferred answer and another one."""
    halves = (np.arange(LENGTH) >= LENGTH // 2).astype(np.int32)
    rows = SequenceRows(tokens.numpy(), np.tile(halves, (ROWS, 1)), tokens.numpy())
    batch = SequencesBatch.from_part(rows, BatchContext(rows_per_group=1), Layout.single())
    return preference_loss_of(model, batch, 0.1).objective


def texts(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    hidden = model.hidden_states(tokens, BatchContext(documents=torch.zeros_like(tokens)))
    return smoothed_nll(hidden, model.output_embedding, tokens, 0.0, 0)[0]


def counted(model: dict[str, Any], freeze: tuple[str, ...], loss_of: Loss = texts, **options: Any) -> int:
    """Multiplications of a forward and backward pass, without those of pairs of positions."""
    torch.manual_seed(0)
    built: Any = build_model(job(model).model, replace(Layout.single(), **options))
    for name, parameter in built.named_parameters():
        if any(matches(pattern, name) for pattern in freeze):
            parameter.requires_grad_(False)
    if "adapter" in model:  # gradients go all the way down, as in most layers of a deep model
        built.embedding.weight.requires_grad_(True)
    tokens = torch.randint(5, 1000, (ROWS, LENGTH))
    with Products() as products:
        loss_of(built, tokens).backward()
    return products.count


BY_ARITHMETIC = Calibration(machine="an imagined one", memory_bytes_per_s=1e18, half_rows=0.0, expert_half_rows=0.0)


def predicted(
    spec: JobSpec, degrees: Degrees = ONE, calibration: Calibration | None = BY_ARITHMETIC, **options: Any
) -> TimeEstimate:
    """On CPUs whose products are bound by arithmetic alone."""
    cluster = Cluster(num_nodes=1, devices_per_node=degrees.num_workers, device="cpu", memory_bytes=1 << 40,
                      calibration=calibration)  # fmt: skip
    candidate = Candidate(degrees, Options(micro_batch_groups=spec.num_groups // degrees.data, **options))
    return LayoutSearch(spec, cluster).time.estimate(candidate)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_products_of_what_is_not_trained(name: str) -> None:
    model, freeze = CASES[name]
    whole = {key: given for key, given in model.items() if key not in ADAPTED}
    seen = counted(model, freeze) / counted(whole, ())
    said = predicted(job(model, freeze)).products_s / predicted(job(whole)).products_s
    print(f"{name}: {seen:.3f} of the products, {said:.3f} predicted")
    assert said == pytest.approx(seen, rel=0.01)
    assert seen < 0.97 or "high rank" in name


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_operations_of_a_model_are_those_that_are_computed(name: str) -> None:
    """Without the pairs of attention, and but for what goes through an adapter's first half once more, which is
    recomputation: no gradient of a frozen matrix counts."""
    model, freeze = CASES[name]
    whole = {key: given for key, given in model.items() if key not in ADAPTED}
    seen = counted(model, freeze) / counted(whole, ())

    def operations(spec: JobSpec) -> float:
        pairs = sum(
            spec.train.batch_tokens * pairs_flops(each, looked_at(each, spec.data.padded_tokens))
            * (1 + 2 * unit.has_backward)
            for unit in units(spec.model, OURS, spec.train.freeze) for each in unit.attentions
        )  # fmt: skip
        return model_flops_per_step(spec) - pairs

    assert operations(job(model, freeze)) / operations(job(whole)) == pytest.approx(seen, rel=0.04)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(6))
def test_products_of_any_adapters_and_any_patterns(seed: int) -> None:
    draw = random.Random(seed)
    whole = draw.choice([DENSE, MIXTURE])
    parts = ["*.attention.*", "*.experts.*", "*.shared.*"] if whole is MIXTURE else ["*.attention.*", "*.dense.*"]
    some = draw.sample(parts, draw.randint(1, len(parts) - 1))
    if draw.random() < 0.5:
        lower = ("embedding.*", *(f"layers.{layer}.*" for layer in range(draw.randint(0, 2))))
        others = draw.sample(["layers.2.*", "output.*"], draw.randint(0, 1))
        model, freeze = whole, (*draw.choice([lower, some]), *others)
    else:
        adapter = {"rank": draw.randint(1, 48), "targets": some, "base": draw.choice(["float32", "int8"])}
        model, freeze = {**whole, **ADAPTED, "adapter": adapter}, ()
    seen = counted(model, freeze) / counted(whole, ())
    said = predicted(job(model, freeze)).products_s / predicted(job(whole)).products_s
    print(f"{model.get('adapter')} {freeze}: {seen:.3f} of the products, {said:.3f} predicted")
    assert said == pytest.approx(seen, rel=0.01)


@pytest.mark.parametrize("base", [DENSE, MIXTURE], ids=["dense", "experts"])
def test_products_of_preferences(base: dict[str, Any]) -> None:
    """The model beneath the adapter says what it has to say first."""
    model = {**base, **ADAPTED}
    data = {"corpus": "preference", "paths": ["/data/pairs.jsonl"]}
    seen = counted(model, (), pairs) / counted(model, ())
    said = predicted(job(model, **data)).products_s / predicted(job(model)).products_s
    print(f"{seen:.3f} times the products, {said:.3f} predicted")
    assert said == pytest.approx(seen, rel=0.03)
    assert seen > 1.3


@pytest.mark.parametrize(("tensor", "expert_tensor"), [(1, 1), (4, 1), (1, 4), (2, 2)])
def test_ranks_that_split_a_matrix_share_a_half_of_its_adapter(tensor: int, expert_tensor: int) -> None:
    """B of queries is split as they are, and A is whole; of what comes out of heads it is the other way round."""
    spec = job({**MIXTURE, **ADAPTED, "adapter": {"rank": 8}})
    unit = next(unit for unit in units(spec.model, OURS) if unit.moe is not None)
    shards = ShardCounts(tensor=tensor, expert_tensor=expert_tensor)
    m, heads, kv, hidden, shared = 128, 128, 64, 256, 128

    def numbers(part: Part, is_adapter: bool) -> int:
        counted = unit.matrices(tensor, part)
        return sum(each.inputs * each.outputs * count for each, count in counted if each.is_adapter == is_adapter)

    assert numbers("others", False) == (2 * m * heads + 2 * m * kv) // tensor
    assert numbers("others", True) == 8 * (3 * m + (heads + 2 * kv) // tensor + heads // tensor + m)
    assert numbers("feed_forward", False) == 3 * m * shared
    assert numbers("feed_forward", True) == 8 * 3 * (m + shared)
    own, adapters = 3 * m * hidden / expert_tensor, 8 * (m + 3 * hidden / expert_tensor + m)
    assert unit.products("experts", shards).forward == pytest.approx(1 + adapters / own, rel=1e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("base", ["nf4", "bfloat16"])
def test_a_base_is_decoded_as_often_as_it_is_multiplied(
    base: str, recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, as_it_is = [], QuantizedWeight.dequantize

    def noted(self: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
        decoded.append(as_it_is(self, dtype))
        return decoded[-1]

    # Decodes as ever, and notes that it did: nothing else tells how often.
    monkeypatch.setattr(QuantizedWeight, "dequantize", noted)
    model = {**MIXTURE, **ADAPTED, "adapter": {"rank": 2, "base": base}}
    counted(model, (), recompute=recompute)
    wide = {**model, "adapter": {"rank": 2}}
    plain, coded = (predicted(job(each), calibration=None, recompute=recompute).elementwise_s for each in (wide, model))
    numbers = sum(each.numel() for each in decoded)
    each_s = 1 / 2e8 if base == "nf4" else 2 * 4 / 24e9
    print(f"{base}, recompute {recompute}: {numbers:,} numbers, {(coded - plain) / each_s:,.0f} predicted")
    assert (coded - plain) / each_s == pytest.approx(numbers, rel=0.01)


def test_preferences_take_what_is_exchanged_and_gathered_once_more() -> None:
    model = {**MIXTURE, **ADAPTED}
    data = {"corpus": "preference", "paths": ["/data/pairs.jsonl"]}
    degrees = Degrees(data=4, fsdp=4, expert=2, expert_fsdp=2)
    texts, pairs = (
        predicted(job(model, **each), degrees, sharding="parameters") for each in ({"max_tokens": LENGTH}, data)
    )
    assert pairs.gather_s / texts.gather_s == pytest.approx(3 / 2, rel=0.1), "of the frozen nothing is scattered"
    assert pairs.all_to_all_s / texts.all_to_all_s == pytest.approx(6 / 4, rel=0.1)
    assert pairs.attention_s / texts.attention_s == pytest.approx(4.5 / 3.5, rel=1e-5)
