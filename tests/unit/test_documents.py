"""Files, presets and jobs that the documents and the docstrings name are there."""

import io
import json
import re
import tomllib
from html import unescape
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from rich.console import Console

from moe.interchange.families import BY_TYPE
from moe.plan import Plan, plan_request
from moe.spec import OptimizerSpec, ParallelSpec, json_schema, model_spec
from moe.spec.expansion import names
from moe.spec.routers import ROUTERS
from service.cli.checks import DEMO_MEMORY_BYTES
from service.cli.view.verdict import short_plan_view

ROOT = Path(__file__).parents[2]
FOLDERS = ("moe", "service", "tests", "benchmarks", "examples")
FILES = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
"""CHANGELOG.md is left out: it tells of what was."""
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(str(each.relative_to(ROOT)) for each in ROOT.glob("docs/**/*.md"))]


def unknown(text: str) -> list[str]:
    """Names of Python files between backticks that no file ends in; NAME stands for any."""
    quoted = " ".join(re.findall(r"`([^`\n]+)`", text))
    named = re.findall(r"(?<![\w./*-])[\w./]+\.py\b", quoted)
    return [name for name in named if "NAME" not in name and not any(f"/{path}".endswith(f"/{name}") for path in FILES)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_a_document_names_are_there(document: str) -> None:
    assert unknown((ROOT / document).read_text()) == []


def test_files_that_a_docstring_names_are_there() -> None:
    found = {path: names for path in FILES if (names := unknown((ROOT / path).read_text()))}
    assert found == {}


DENIALS = re.compile(
    r"[Nn]othing[^.]{0,30}\s(?:has\s)?(?:ran|run)\son\sa\sGPU|No\sline\sof\sthis\shas\srun\son\sa\sGPU"
    r"|(?:not|never)(?:\syet)?(?:\sbeen)?\s(?:run|ran|measured)\son\sa\sGPU"
)


def test_no_document_denies_a_run_on_a_gpu_that_was_measured() -> None:
    for result in ("layer_gpu.json", "decoder_step_gpu.json", "h200/gpu_tests.log"):
        assert (ROOT / "benchmarks/results" / result).is_file()
    texts = [*DOCUMENTS, *(path for path in FILES if path.startswith("moe/layers/"))]
    assert {name: found for name in texts if (found := DENIALS.findall((ROOT / name).read_text()))} == {}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_results_and_make_targets_that_a_document_names_are_there(document: str) -> None:
    text = (ROOT / document).read_text()
    for path in re.findall(r"benchmarks/results/[\w./-]+\.json", text):
        assert (ROOT / path).is_file(), path
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M)
    for target in re.findall(r"`make ([a-z][\w-]*)`", text):
        assert target in targets, target


PRESETS = re.compile(
    r"preset[:=] ?[\"']?([a-z][\w.-]*)|\"preset\": \"([\w.-]+)\""
    r"|`((?:gshard-(?:tiny|\d)|mixtral-8x|qwen3-\w+-a|deepseek-v|gpt-oss-\d|kimi-|olmoe-)[\w.-]*)`"
)
"""Names that are said to be presets, and what looks like one between backticks."""


def test_presets_that_the_documents_name_exist() -> None:
    named: dict[str, set[str]] = {}
    for document in (*DOCUMENTS, *(str(path.relative_to(ROOT)) for path in ROOT.glob("examples/**/*.yaml"))):
        for found in PRESETS.findall((ROOT / document).read_text()):
            named.setdefault("".join(found), set()).add(document)
    assert {name: where for name, where in named.items() if name not in names()} == {}
    assert {"gshard-tiny", "gshard-2048e-60l", "qwen3-30b-a3b", "deepseek-v3"} <= named.keys()


def test_presets_and_families_are_documented_as_they_are() -> None:
    text = " ".join((ROOT / "docs" / "jobs.md").read_text().split())
    papers = [name for name in names() if re.fullmatch(r"gshard-\d+e-\d+l", name)]
    assert f"from `{papers[0]}` to `{papers[-1]}` (a trillion weights)" in text
    assert 0.95e12 < model_spec({"preset": papers[-1]}).num_parameters() < 1.05e12
    assert {f"{name}-dense" for name in papers} <= set(names())
    table = (
        (ROOT / "docs" / "language-models.md").read_text().partition("## Families")[2].partition("Rotary scaling")[0]
    )
    rows = re.findall(r"^\| (.*?) \|", table, re.M)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} - {"model_type"} == set(BY_TYPE)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_jobs_in_documents_are_jobs(document: str) -> None:
    """Whole ones can be planned, and parts of others have fields that there are."""
    text = (ROOT / document).read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)
    given: list[Any] = [yaml.safe_load(block) for block in blocks]
    given += [json.loads(body) for body in re.findall(r"/v1/jobs -H \S+ \S+ -d '(\{.*?\})'", text, re.S)]
    fields = json_schema()["properties"].keys()
    for job in given:
        if not isinstance(job, dict) or not job.keys() & {"model", "data", "train"}:
            continue  # facts of a cluster, or tasks of an evaluation
        assert job.keys() <= fields, job.keys() - fields
        if job.keys() >= {"model", "data", "train"} and "preset" in job["model"]:
            plan_request(job)


def test_what_the_readme_needs_is_what_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (version,) = re.findall(r"You need Python ([\d.]+) or later", (ROOT / "README.md").read_text())
    assert project["requires-python"] == f">={version}"
    assert f"two CPU cores and {DEMO_MEMORY_BYTES >> 30} GiB of memory" in (ROOT / "README.md").read_text()


def test_routers_and_degrees_are_documented_as_they_are() -> None:
    text = " ".join((ROOT / "docs" / "jobs.md").read_text().split())
    (routers,) = re.findall(r"`model.moe.router`\*\* is GShard's top-2 or another common router \((.*?)\)", text)
    assert len(ROUTERS) == 1 + len(re.split(r", | or ", routers)), ROUTERS.keys()
    (fields,) = re.findall(r"`parallel` takes (.*?): all parallel degrees", text)
    assert set(re.findall(r"`(\w+)`", fields)) <= ParallelSpec.model_fields.keys()
    example = yaml.safe_load((ROOT / "examples" / "fine-tune.yaml").read_text())
    page = (ROOT / "docs" / "language-models.md").read_text()
    assert f"adapters of rank {example['adapter']['rank']} on attention and experts" in page


def test_corpora_and_optimizers_are_documented_as_they_are() -> None:
    text = (ROOT / "docs" / "jobs.md").read_text()
    sections = {name: rest for name, _, rest in (part.partition("\n") for part in text.split("\n## "))}
    rows = re.findall(r"^\| (`.*?) \|", sections["Data"], re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    definitions = json_schema()["$defs"].values()
    properties = [definition.get("properties", {}) for definition in definitions]
    corpora = {fields["corpus"]["const"] for fields in properties if "corpus" in fields}
    assert named == corpora
    optimizers = {kind.model_fields["name"].annotation for kind in get_args(get_args(OptimizerSpec)[0])}
    for optimizer in optimizers:
        assert f"`{get_args(optimizer)[0]}`" in sections["Optimizer"]


def test_the_readme_names_every_package() -> None:
    text = (ROOT / "README.md").read_text()
    table = text.partition("## Where things are")[2].partition("## ")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`([\w/]+)`", row)}
    packages = {
        path.parent.relative_to(ROOT).as_posix()
        for top in ("moe", "service")
        for path in (ROOT / top).glob("*/__init__.py")
    }
    assert {name for name in named if "/" in name} == packages
    assert all((ROOT / name).is_dir() for name in named)


def test_files_to_extend_are_there() -> None:
    """Files and names of the table "How to extend it", with an existing file for NAME."""
    text = (ROOT / "README.md").read_text().partition("## How to extend it")[2].partition("## ")[0]
    paths = re.findall(r"`((?:moe|service|docs|tests|examples)/[\w./-]+)`", text)
    assert len(paths) > 8
    for path in paths:
        assert list(ROOT.glob(path.replace("NAME", "[a-z]*"))), path


def test_the_picture_of_a_plan_shows_what_the_command_prints() -> None:
    example = "deepseek-v3-1024-h100"
    plan = Plan.model_validate_json((ROOT / "tests" / "golden" / f"{example}.json").read_text())
    console = Console(width=104, file=io.StringIO(), highlight=False, emoji=False, markup=False)
    console.print(f"$ shardyard plan examples/{example}.yaml")
    console.print(short_plan_view(plan, "128 nodes of 8 h100"))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    drawn = (ROOT / "docs" / "pictures" / "plan.svg").read_text()
    texts = re.findall(r"<text class=\"plan-r\d+\"[^>]*>(.*?)</text>", drawn)
    assert re.sub(r"\s", "", unescape("".join(texts))) == re.sub(r"\s", "", printed), (
        "draw it anew: python -m benchmarks.pictures plan"
    )
