"""`plan.explain()`: every parameter once, every byte, the user's lines, within a terminal's width."""

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe import sharding
from moe.sharding.explain.explain import WIDTH, in_bytes, in_seconds
from moe.sharding.explain.name_patterns import fold_names, ranges
from tests.sharding.explained_plans import PLANS, stack


def section(plan: sharding.ShardingPlan, title: str) -> list[list[str]]:
    """Cells of the lines under a title."""
    lines = plan.explain().splitlines()
    begin = next(index for index, line in enumerate(lines) if line.startswith(title))
    rows = itertools.takewhile(bool, lines[begin + 1 :])
    return [re.split(r"\s{2,}", row.strip()) for row in rows]


def numbers_of(text: str) -> set[int]:
    if match := re.fullmatch(r"(\d+),(\d+),\.\.,(\d+)", text):
        first, second, last = map(int, match.groups())
        return set(range(first, last + 1, second - first))
    numbers: set[int] = set()
    for run in text.split(","):
        first, _, last = run.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def is_named_by(pattern: str, name: str) -> bool:
    """Whether the pattern denotes this name."""
    parts = re.split(r"\.(?!\.|,)", pattern)
    steps = name.split(".")
    return len(parts) == len(steps) and all(
        (step.isdigit() if part == "*" else step.isdigit() and int(step) in numbers_of(part) if part[0].isdigit()
         else part == step)
        for part, step in zip(parts, steps, strict=True)
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_every_parameter_is_named_once(plan: str) -> None:
    sharding_plan = PLANS[plan]()
    patterns = [re.sub(r" \(x \d+\)$", "", row[0]) for row in section(sharding_plan, "placements")]
    assert {parameter.name for parameter in sharding_plan.stored} == set(sharding_plan.parameters)
    for name in sharding_plan.parameters:
        assert [is_named_by(pattern, name) for pattern in patterns].count(True) == 1, (name, patterns)


@pytest.mark.slow
def test_equal_layers_are_one_line_with_their_placements():
    rows = {row[0]: row[1] for row in section(stack(), "placements")}
    assert rows["layers.*.wi.weight (x 5)"] == "[256/model, 64]"
    assert len([name for name in rows if name.startswith("layers.")]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_collectives_add_up(plan: str) -> None:
    sharding_plan = PLANS[plan]()
    total = sum(collective.num_bytes for collective in sharding_plan.collectives)
    assert f"{in_bytes(total)} by each rank in {len(sharding_plan.collectives)} collectives" in sharding_plan.explain()
    if not sharding_plan.collectives:
        assert section(sharding_plan, "collectives") == [["none"]]
        return
    rows = [row for row in section(sharding_plan, "collectives")[1:] if len(row) > 1]
    assert sum(int(row[2]) for row in rows) == len(sharding_plan.collectives)
    _, *totals = section(sharding_plan, "in all")
    assert sum(int(row[1]) for row in totals if row[0] != "all") == len(sharding_plan.collectives)
    assert totals[-1][-1] == in_bytes(total)


def test_lines_of_the_users_file_are_named():
    plan = stack()
    places = {collective.where for collective in plan.collectives if collective.where is not None}
    assert places
    for place in places:
        assert place.startswith("tests/sharding/explained_plans.py:")
        assert re.search(rf"[ /…]{re.escape(Path(place).name)}$", plan.explain(), re.MULTILINE)
    source = Path("tests/sharding/explained_plans.py").read_text().splitlines()
    lines = {int(match.group(1)) for key in plan.annotated if (match := re.search(r":(\d+) ", key))}
    assert [line for line in lines if "sharding.split" in source[line - 1]] == list(lines) != []
    assert "inputs.0 [512]" in plan.annotated


def test_collectives_name_their_tensor_and_module():
    plan = stack()
    blocks = {collective.block for collective in plan.collectives}
    assert {f"layers.{number}{last}" for number in range(5) for last in ("", ".wi")} & blocks
    of_gradients = {
        collective.tensor for collective in plan.collectives if collective.tensor.startswith("gradient of ")
    }
    assert of_gradients <= {f"gradient of {name}" for name in plan.parameters}
    assert any("layers.4." in tensor_name for tensor_name in of_gradients)


@pytest.mark.sample(2)
@pytest.mark.parametrize("plan", PLANS)
def test_it_fits_a_terminal(plan: str) -> None:
    assert max(map(len, PLANS[plan]().explain().splitlines())) <= WIDTH


def test_hints_memory_and_meshes_are_listed():
    plan = stack()
    assert section(plan, "hints")[:2] == [
        ["inputs", "Split(0, axis='data')"], ["layers.*.wi.weight", "Shard({'model': 0})"],
    ]  # fmt: skip
    sizes = {row[0]: row[1] for row in section(plan, "memory on each rank")}
    assert sizes["total"] == in_bytes(plan.memory.total)
    assert sizes["optimizer state"] == in_bytes(plan.memory.optimizer)
    cost = [in_seconds(plan.step_s), in_bytes(plan.considered[0].memory_bytes)]
    assert section(plan, "considered") == [["data 2 x model 2", plan.layout, *cost, "this plan"]]


def test_a_saved_plan_has_the_same_explanation(tmp_path: Path):
    plan = stack()
    plan.save(tmp_path / "plan.json")
    loaded_plan = sharding.ShardingPlan.load(tmp_path / "plan.json")
    assert loaded_plan.explain() == plan.explain()
    assert list(loaded_plan.mesh) == ["data", "model"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [(in_bytes(0), "0 B"), (in_bytes(999), "999 B"), (in_bytes(1000), "0.977 KiB"), (in_bytes(1536), "1.5 KiB"),
     (in_bytes(1 << 40), "1 TiB"), (in_bytes(1023 << 20), "0.999 GiB"), (in_seconds(0.0123), "12.3 ms"),
     (in_seconds(1.5), "1.5 s"), (in_seconds(1234.0), "1,234 s"), (in_seconds(2e-6), "2 us")],
)  # fmt: skip
def test_bytes_and_seconds_have_three_digits(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    ("numbers", "text"),
    [({3}, "3"), ({0, 1, 2, 5}, "0-2,5"), ({1, 3, 5, 7}, "1,3,..,7"), ({0, 1, 2, 3}, "0-3"), ({0, 2}, "0,2")],
)
def test_ranges(numbers: set[int], text: str) -> None:
    assert ranges(numbers) == text
    assert numbers_of(text) == set(numbers)


NAMES = st.dictionaries(
    st.lists(st.sampled_from(["0", "1", "2", "3", "7", "w", "b"]), min_size=1, max_size=4).map(".".join),
    st.integers(0, 2), min_size=1, max_size=30,
)  # fmt: skip


@settings(max_examples=200, deadline=None, derandomize=True)
@given(NAMES)
def test_a_pattern_denotes_its_names_and_no_others(values: dict[str, int]) -> None:
    folds = fold_names(values)
    assert sorted(name for fold in folds for name in fold.names) == sorted(values)
    for fold in folds:
        assert len({values[name] for name in fold.names}) == 1
        assert [name for name in values if is_named_by(fold.pattern, name)] == [
            name for name in values if name in fold.names
        ]
