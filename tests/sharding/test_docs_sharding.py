"""docs/sharding.md: its snippets run, its table of operators is complete, the tests that it names exist."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.operator_table import table, with_table
from moe import sharding
from moe.sharding.applied.dtensors import local
from moe.sharding.capture.capture import capture
from moe.sharding.rules.registry import Rules
from moe.spec import SpecError
from tests.parity.gloo_ranks import Pools
from tests.sharding.modules import Function
from tests.sharding.on_ranks import cores
from tests.sharding.without_rule import USES

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "sharding.md"
TEXT = DOCUMENT.read_text()


def snippets(text: str) -> Iterator[str]:
    """Blocks of Python with their line numbers."""
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield "\n" * (text[: match.start(1)].count("\n")) + match[1]


def run_snippets(path: Path, folder: Path) -> dict[str, Any]:
    """Run all snippets of a document in order; return some of their results as plain values."""
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": path.stem}
    for snippet in snippets(path.read_text()):
        exec(compile(snippet, str(path), "exec"), names)
    return {
        "parameters": {name: tuple(local(parameter).shape) for name, parameter in names["again"].named_parameters()},
        "experts": names["whole"].get("experts"),
        "loss": names["loss"].item(),
    }


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("num_ranks", [2, 1])
def test_snippets_run(ranks: Pools, tmp_path: Path, num_ranks: int) -> None:
    first, *other_results = ranks[num_ranks].run(run_snippets, DOCUMENT, tmp_path / "run")
    assert first["parameters"]["experts"] == (8 // num_ranks, 32, 32)
    assert first["experts"].shape == (8, 32, 32)
    assert all(result["loss"] == pytest.approx(first["loss"], rel=1e-5) for result in other_results)
    assert "<svg" in (tmp_path / "run" / "plan.svg").read_text()


def test_the_snippet_of_the_readme_runs() -> None:
    (snippet,) = [snippet for snippet in snippets((ROOT / "README.md").read_text()) if "sharding" in snippet]
    names: dict[str, Any] = {"__name__": "README"}
    exec(compile(snippet, "README.md", "exec"), names)
    assert all(parameter.grad is not None for parameter in names["model"].parameters())


def test_the_table_of_operators_is_current() -> None:
    assert with_table(TEXT) == TEXT, "python -m benchmarks.operator_table docs/sharding.md writes it anew"
    assert "`convolution`" in table()


def use(name: str) -> Function:
    return Function(lambda x: USES[name](x * 2).sum(), torch.randn(4, 4, dtype=torch.float64))


def test_operators_without_a_rule_are_those_that_it_lists() -> None:
    (names,) = re.findall(r"torch operators known to have no rule: (.*?)\. ", TEXT.replace("\n", " "))
    assert re.findall(r"`(\w+)`", names) == sorted(USES, key=lambda name: (name.lstrip("_"), name))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", USES)
def test_an_operator_without_a_rule_is_refused_by_name(name: str) -> None:
    with pytest.raises(SpecError) as error:
        Rules().check(capture(use(name), ()).graph.graph)
    refused_operators = {str(problem.value) for problem in error.value.problems if problem.code == "no_sharding_rule"}
    assert any(operator.startswith(f"aten.{name}.") for operator in refused_operators), refused_operators


def test_an_operator_without_a_rule_runs_on_whole_tensors_on_request() -> None:
    module, operators = use("addbmm"), ["aten.addbmm.default"]
    plan = sharding.plan(module, (), cores(1), replicate=operators)
    applied = sharding.apply(module, plan, replicate=operators)
    actual, expected = applied(), module()
    actual.backward()
    expected.backward()
    assert actual.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(applied.get_parameter("operands.0").grad, module.operands[0].grad, rtol=1e-12)


def test_tests_that_it_names_exist() -> None:
    references = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert len(references) > 30
    functions = {
        path: {
            statement.name
            for statement in ast.parse((ROOT / path).read_text()).body
            if isinstance(statement, ast.FunctionDef)
        }
        for path in {path for path, _ in references}
    }
    assert [(path, name) for path, name in references if name not in functions[path]] == []


def test_files_and_headings_that_it_links_to_exist() -> None:
    headings = {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
        for heading in re.findall(r"^## (.*)", TEXT, re.MULTILINE)
    }
    for link in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert link.removeprefix("#") in headings if link.startswith("#") else (DOCUMENT.parent / link).exists(), link
