"""Adapters of a base in bfloat16, 8 or 4 bits are trained as those of a folder with the values that it decodes into."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.interchange import load_weights
from moe.interchange.expand import expand_model
from moe.interchange.origin import Origin
from moe.interchange.save import save_folder
from moe.interchange.sources import ModelSource
from moe.parallel import Layout, extent, local_parameters, quant_schemes_of
from moe.spec import LanguageModelSpec, model_spec
from moe.spec.form import SCALES
from moe.spec.generation import GenerationSpec
from moe.spec.parameter import Form
from moe.tasks.language import build_model, generate
from moe.tasks.language.generation import prepare_for_decoding
from tests.grid import each_once
from tests.interchange import tiny
from tests.parity.combinations import LAYOUTS, OPTIONS, assert_same, run_on, train_of, train_with, with_option
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees, Shape, run
from tests.unit.reference_dequantization import through_codes

FORMS: tuple[Form, ...] = ("bfloat16", "int8", "nf4")
SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 136, "intermediate_size": 72, "num_key_value_heads": 4},
    "deepseek_v3": {"hidden_size": 80, "kv_lora_rank": 66, "intermediate_size": 88, "moe_intermediate_size": 20},
    "qwen3_next": {"hidden_size": 66, "num_key_value_heads": 4, "moe_intermediate_size": 76},
}  # fmt: skip
"""Sizes with full and partial blocks; most numbers of blocks cannot be divided among ranks."""
EVERY_LAYOUT = [degrees for family in LAYOUTS.values() for degrees in family]
ROWS = Shape(groups=4, rows=1)


@dataclass(frozen=True)
class Case:
    family: str
    quantized_spec: LanguageModelSpec
    dequantized_spec: LanguageModelSpec
    """Model of a folder with the values that the base of `quantized_spec` decodes into."""
    expected: list[dict[str, Any]]
    """Records of `dequantized_spec` on one process."""


def spec_of(folder: Path, base: str) -> LanguageModelSpec:
    raw_model = {"from": str(folder), "moe": {"group_tokens": 12}, "adapter": {"rank": 2, "alpha": 5.0, "base": base}}
    return model_spec(expand_model(raw_model, None))


def load_model(spec: LanguageModelSpec, layout: Layout | None = None) -> Any:
    model = build_model(spec, layout, dtype=torch.float64)
    load_weights(spec.from_folder, model, spec, layout)
    return model


def save(spec: LanguageModelSpec, model: Any, folder: Path) -> None:
    """Write a model without its adapter, as a folder."""
    base_spec = spec.model_copy(update={"adapter": None})
    origin = Origin.of_folder(spec.from_folder, base_spec, None)
    save_folder(base_spec, ModelSource(model), folder, origin=origin, dtype=torch.float64)


def dequantize_folder(source: Path, base: Form, target: Path) -> None:
    """Write the folder with each matrix replaced by the values that its quantized form decodes into."""
    plain, quantized_spec = load_model(spec_of(source, "float32")), spec_of(source, base)
    with torch.no_grad():
        for name, scheme in quant_schemes_of(build_model(quantized_spec)).items():
            matrix = plain.get_parameter(name)
            matrix.copy_(through_codes(matrix, base, scheme.dim))
    save(quantized_spec, plain, target)


@pytest.fixture(scope="module", params=each_once(SIZES, FORMS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, base = request.param
    folder = tmp_path_factory.mktemp(f"{family}-{base}")
    tiny.folder_of(tiny.their_model(family, **SIZES[family]), folder / "hub", dtype=torch.float32)
    dequantize_folder(folder / "hub", base, folder / "replaced")
    dequantized_spec = spec_of(folder / "replaced", "float32")
    expected = without_frozen(run(dequantized_spec, train_of(), Degrees(), ROWS, 3))
    return Case(family, spec_of(folder / "hub", base), dequantized_spec, expected)


def without_frozen(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove norms of frozen parameters from records, which differ between forms."""
    last = records[-1]["parameters"]
    records[-1]["parameters"] = {name: norm for name, norm in last.items() if "_lora_" in name}
    return records


@pytest.mark.slow
def test_one_process_trains_it_exactly_so(case: Case) -> None:
    for option in ("without", "recomputation, selective", "recomputation, full"):
        records = without_frozen(run(case.quantized_spec, train_of(), with_option(Degrees(), option), ROWS, 3))
        assert_same(records, case.expected, 0.0)
    assert all("_lora_" in name for name in records[-1]["gradients"])
    assert all(norm > 0 for norm in records[-1]["gradients"].values())


def layouts_of(case: Case) -> list[tuple[Degrees, str]]:
    """A ninth of the layouts, each with an option of the plan. All forms of all families together have every layout."""
    number = 3 * FORMS.index(case.quantized_spec.adapter.base) + list(SIZES).index(case.family)
    options = [option for option in OPTIONS if option != "Adafactor"]
    layouts = []
    for index in range(1 + number, len(EVERY_LAYOUT), len(FORMS) * len(SIZES)):
        turn = (options[(index + offset) % len(options)] for offset in range(len(options)))
        option = next(option for option in turn if with_option(EVERY_LAYOUT[index], option))
        layouts.append((with_option(EVERY_LAYOUT[index], option), option))
    return layouts


@pytest.mark.slow
def test_every_layout_trains_it_so(ranks: Pools, case: Case) -> None:
    for degrees, option in layouts_of(case):
        records = without_frozen(run_on(ranks, degrees, case.quantized_spec, train_with(option), ROWS, 3))
        assert_same(records, case.expected, 1e-10)


@pytest.mark.slow
def test_ranks_without_a_group_train_along(ranks: Pools, case: Case) -> None:
    shape = Shape(groups=2, rows=1)
    expected = without_frozen(run(case.dequantized_spec, train_of(), Degrees(), shape, 2))
    for degrees in (Degrees(expert=4), Degrees(expert=2, data=2, fsdp=4, expert_fsdp=2)):
        assert_same(without_frozen(run_on(ranks, degrees, case.quantized_spec, train_of(), shape, 2)), expected, 1e-10)


def parts_of(degrees: Degrees, spec: LanguageModelSpec) -> dict[str, Any]:
    """(ranges in the full tensor, values) of this rank's part of each parameter that is stored as codes or scales."""
    layout = Layout.build(degrees.plan(4))
    model = load_model(spec, layout)
    schemes = quant_schemes_of(model)
    parts = {
        parameter.name: (extent(parameter.part, layout), parameter.local.detach().clone())
        for parameter in local_parameters(model)
        if parameter.name.removesuffix(SCALES) in schemes
    }
    layout.close()
    return parts


@pytest.mark.slow
@pytest.mark.sample(1)
def test_each_rank_reads_its_own_part_into_the_same_codes(ranks: Pools, case: Case) -> None:
    full_tensors = parts_of(Degrees(), case.quantized_spec)
    for degrees in (
        Degrees(expert=2, tensor=2),
        Degrees(data=4, fsdp=4, expert_fsdp=4),
        Degrees(expert=2, data=2, tensor=2, fsdp=2, expert_fsdp=2),
        Degrees(expert_tensor=2, data=2, tensor=2, expert_fsdp=2),
    ):
        sizes = 0
        for answer in ranks[degrees.workers].run(parts_of, degrees, case.quantized_spec):
            for name, (ranges, values) in answer.items():
                expected = full_tensors[name][1][tuple(slice(first, end) for first, end in ranges)]
                assert values.dtype == expected.dtype
                assert torch.equal(values, expected), name
                sizes += values.nbytes
        assert sizes < degrees.workers * sum(tensor.nbytes for _, tensor in full_tensors.values())


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_prepared", [False, True])
def test_texts_are_the_same(case: Case, is_prepared: bool) -> None:
    """Token by token, also where the model is prepared for decoding, which leaves codes as they are."""
    texts, logits = [], []
    for spec in (case.quantized_spec, case.dequantized_spec):
        model, generator = load_model(spec).eval(), torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("_lora_b"):
                    parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
        if is_prepared:
            prepare_for_decoding(model)
        assert any(parameter.dtype != torch.float64 for parameter in model.parameters()) == (
            spec is case.quantized_spec
        )
        texts.append(generate(model, [[5, 6, 7], [9]], GenerationSpec(max_tokens=6)))
        with torch.no_grad():
            logits.append(model(torch.tensor([[5, 6, 7, 8]])))
    assert texts[0] == texts[1]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-10, atol=1e-10)


@pytest.mark.sample(1)
def test_bfloat16_changes_nothing_in_bfloat16_arithmetic(case: Case) -> None:
    """No bit of losses, gradients and moments changes, because the arithmetic rounds to bfloat16 anyway. Other forms
    change them."""
    wide = spec_of(Path(case.quantized_spec.from_folder), "float32")
    quantized_records, wide_records = (
        without_frozen(run(spec, train_of("bfloat16"), Degrees(), ROWS, 3)) for spec in (case.quantized_spec, wide)
    )
    if case.quantized_spec.adapter.base == "bfloat16":
        assert_same(quantized_records, wide_records, 0.0)
        assert [record["digests"]["gradients"] for record in quantized_records] == [
            record["digests"]["gradients"] for record in wide_records
        ]
    else:
        assert quantized_records[0]["loss"] != wide_records[0]["loss"]


@pytest.mark.sample(1)
def test_a_model_is_written_as_it_is_decoded(case: Case, tmp_path: Path) -> None:
    save(case.quantized_spec, load_model(case.quantized_spec), tmp_path / "out")
    actual, expected = tiny.tensors_of(tmp_path / "out"), tiny.tensors_of(Path(case.dequantized_spec.from_folder))
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name].double(), tensor.double()), name
