"""Adapters above a base in bfloat16, 8 or 4 bits are trained as above a folder of the values that it decodes into."""

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
"""Blocks that are full and some that are not, whose numbers mostly do not divide among ranks."""
EVERY_LAYOUT = [degrees for family in LAYOUTS.values() for degrees in family]
ROWS = Shape(groups=4, rows=1)


@dataclass(frozen=True)
class Case:
    family: str
    coded: LanguageModelSpec
    replaced: LanguageModelSpec
    """On a folder of the values that the other's base is decoded into."""
    expected: list[dict[str, Any]]
    """Of `replaced`, on one process."""


def spec_of(folder: Path, base: str) -> LanguageModelSpec:
    given = {"from": str(folder), "moe": {"group_tokens": 12}, "adapter": {"rank": 2, "alpha": 5.0, "base": base}}
    return model_spec(expand_model(given, None))


def loaded(spec: LanguageModelSpec, layout: Layout | None = None) -> Any:
    model = build_model(spec, layout, dtype=torch.float64)
    load_weights(spec.from_folder, model, spec, layout)
    return model


def save(spec: LanguageModelSpec, model: Any, into: Path) -> None:
    """Write a model without its adapter, as a folder."""
    whole = spec.model_copy(update={"adapter": None})
    origin = Origin.of_folder(spec.from_folder, whole, None)
    save_folder(whole, ModelSource(model), into, origin=origin, dtype=torch.float64)


def replaced_in(folder: Path, base: Form, into: Path) -> None:
    """The folder with what a form decodes in place of each matrix."""
    plain, coded = loaded(spec_of(folder, "float32")), spec_of(folder, base)
    with torch.no_grad():
        for name, scheme in quant_schemes_of(build_model(coded)).items():
            each = plain.get_parameter(name)
            each.copy_(through_codes(each, base, scheme.dim))
    save(coded, plain, into)


@pytest.fixture(scope="module", params=each_once(SIZES, FORMS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, base = request.param
    folder = tmp_path_factory.mktemp(f"{family}-{base}")
    tiny.folder_of(tiny.their_model(family, **SIZES[family]), folder / "hub", dtype=torch.float32)
    replaced_in(folder / "hub", base, folder / "replaced")
    replaced = spec_of(folder / "replaced", "float32")
    expected = trained(run(replaced, train_of(), Degrees(), ROWS, 3))
    return Case(family, spec_of(folder / "hub", base), replaced, expected)


def trained(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the frozen parameters, which each keeps in its own way."""
    last = records[-1]["parameters"]
    records[-1]["parameters"] = {name: each for name, each in last.items() if "_lora_" in name}
    return records


@pytest.mark.sample(1)
def test_one_process_trains_it_exactly_so(case: Case) -> None:
    for option in ("without", "recomputation, selective", "recomputation, full"):
        records = trained(run(case.coded, train_of(), with_option(Degrees(), option), ROWS, 3))
        assert_same(records, case.expected, 0.0)
    assert all("_lora_" in name for name in records[-1]["gradients"])
    assert all(norm > 0 for norm in records[-1]["gradients"].values())


def layouts_of(case: Case) -> list[tuple[Degrees, str]]:
    """A ninth of them, each with an option of the plan: all of them together for all forms of all families."""
    number = 3 * FORMS.index(case.coded.adapter.base) + list(SIZES).index(case.family)
    options = [option for option in OPTIONS if option != "Adafactor"]
    found = []
    for at in range(1 + number, len(EVERY_LAYOUT), len(FORMS) * len(SIZES)):
        turn = (options[(at + later) % len(options)] for later in range(len(options)))
        option = next(option for option in turn if with_option(EVERY_LAYOUT[at], option))
        found.append((with_option(EVERY_LAYOUT[at], option), option))
    return found


@pytest.mark.slow
def test_every_layout_trains_it_so(ranks: Pools, case: Case) -> None:
    for degrees, option in layouts_of(case):
        records = trained(run_on(ranks, degrees, case.coded, train_with(option), ROWS, 3))
        assert_same(records, case.expected, 1e-10)


@pytest.mark.slow
def test_ranks_without_a_group_train_along(ranks: Pools, case: Case) -> None:
    few = Shape(groups=2, rows=1)
    expected = trained(run(case.replaced, train_of(), Degrees(), few, 2))
    for degrees in (Degrees(expert=4), Degrees(expert=2, data=2, fsdp=4, expert_fsdp=2)):
        assert_same(trained(run_on(ranks, degrees, case.coded, train_of(), few, 2)), expected, 1e-10)


def parts_of(degrees: Degrees, spec: LanguageModelSpec) -> dict[str, Any]:
    """(place in the whole, values) of this rank's part of each parameter that is kept as codes or scales."""
    layout = Layout.build(degrees.plan(4))
    model = loaded(spec, layout)
    schemes = quant_schemes_of(model)
    found = {
        each.name: (extent(each.part, layout), each.local.detach().clone())
        for each in local_parameters(model)
        if each.name.removesuffix(SCALES) in schemes
    }
    layout.close()
    return found


@pytest.mark.sample(1)
def test_each_rank_reads_its_own_part_into_the_same_codes(ranks: Pools, case: Case) -> None:
    whole = parts_of(Degrees(), case.coded)
    for degrees in (
        Degrees(expert=2, tensor=2),
        Degrees(data=4, fsdp=4, expert_fsdp=4),
        Degrees(expert=2, data=2, tensor=2, fsdp=2, expert_fsdp=2),
        Degrees(expert_tensor=2, data=2, tensor=2, expert_fsdp=2),
    ):
        sizes = 0
        for answer in ranks[degrees.workers].run(parts_of, degrees, case.coded):
            for name, (within, values) in answer.items():
                expected = whole[name][1][tuple(slice(first, end) for first, end in within)]
                assert values.dtype == expected.dtype
                assert torch.equal(values, expected), name
                sizes += values.nbytes
        assert sizes < degrees.workers * sum(each.nbytes for _, each in whole.values())


@pytest.mark.sample(2)
@pytest.mark.parametrize("laid_out", [False, True])
def test_texts_are_the_same(case: Case, laid_out: bool) -> None:
    """Token by token, also where the model is laid out for texts alone, which leaves codes as they are."""
    texts, logits = [], []
    for spec in (case.coded, case.replaced):
        model, generator = loaded(spec).eval(), torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, each in model.named_parameters():
                if name.endswith("_lora_b"):
                    each.copy_(torch.randn(each.shape, generator=generator, dtype=each.dtype))
        if laid_out:
            prepare_for_decoding(model)
        assert any(each.dtype != torch.float64 for each in model.parameters()) == (spec is case.coded)
        texts.append(generate(model, [[5, 6, 7], [9]], GenerationSpec(max_tokens=6)))
        with torch.no_grad():
            logits.append(model(torch.tensor([[5, 6, 7, 8]])))
    assert texts[0] == texts[1]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-10, atol=1e-10)


@pytest.mark.sample(1)
def test_bfloat16_changes_nothing_in_bfloat16_arithmetic(case: Case) -> None:
    """Not a bit of loss, gradient and moment: it narrows what would be narrowed. Other forms do."""
    wide = spec_of(Path(case.coded.from_folder), "float32")
    ours, theirs = (trained(run(spec, train_of("bfloat16"), Degrees(), ROWS, 3)) for spec in (case.coded, wide))
    if case.coded.adapter.base == "bfloat16":
        assert_same(ours, theirs, 0.0)
        assert [each["digests"]["gradients"] for each in ours] == [each["digests"]["gradients"] for each in theirs]
    else:
        assert ours[0]["loss"] != theirs[0]["loss"]


def test_a_model_is_written_as_it_is_decoded(case: Case, tmp_path: Path) -> None:
    save(case.coded, loaded(case.coded), tmp_path / "out")
    written, expected = tiny.tensors_of(tmp_path / "out"), tiny.tensors_of(Path(case.replaced.from_folder))
    assert written.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.equal(written[name].double(), each.double()), name
