"""Everything that documents and docstrings name exists (files, terms, presets, fields, packages), and their jobs are
valid."""

import io
import json
import pkgutil
import re
import tomllib
from html import unescape
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from rich.console import Console

from moe.interchange.families import BY_TYPE, WRAPPED_FAMILIES
from moe.plan import Plan, plan_request
from moe.spec import OptimizerSpec, ParallelSpec, json_schema, model_spec
from moe.spec.expansion import names
from moe.spec.routers import ROUTERS
from service.cli.checks import DEMO_MEMORY_BYTES
from service.cli.view.verdict import short_plan_view

ROOT = Path(__file__).parents[2]
FOLDERS = ("moe", "service", "tests", "benchmarks", "examples")
FILES = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
# CHANGELOG.md is left out: it describes the past.
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]


def read(path: str) -> str:
    return (ROOT / path).read_text()


def words(path: str) -> str:
    return " ".join(read(path).split())


def section(path: str, begin: str, end: str = "## ") -> str:
    return read(path).partition(begin)[2].partition(end)[0]


def names_in_first_cells(table: str) -> set[str]:
    """Names between backticks in the first column."""
    return {name for row in re.findall(r"^\| (.*?) \|", table, re.M) for name in re.findall(r"`([\w/]+)`", row)}


def unknown_files(text: str) -> list[str]:
    """Python files named between backticks that do not exist; NAME is a placeholder."""
    code = " ".join(re.findall(r"`([^`\n]+)`", text))
    file_names = re.findall(r"(?<![\w./*-])[\w./]+\.py\b", code)
    return [
        name for name in file_names if "NAME" not in name and not any(f"/{path}".endswith(f"/{name}") for path in FILES)
    ]


DENIALS = re.compile(
    r"[Nn]othing[^.]{0,30}\s(?:has\s)?(?:ran|run)\son\sa\sGPU|No\sline\sof\sthis\shas\srun\son\sa\sGPU"
    r"|(?:not|never)(?:\syet)?(?:\sbeen)?\s(?:run|ran|measured)\son\sa\sGPU"
)
PRESETS = re.compile(
    r"preset[:=] ?[\"']?([a-z][\w.-]*)|\"preset\": \"([\w.-]+)\""
    r"|`((?:gshard-(?:tiny|\d)|mixtral-8x|qwen3-\w+-a|deepseek-v|gpt-oss-\d|kimi-|olmoe-)[\w.-]*)`"
)
"""Names that are said to be presets, and what looks like one between backticks."""


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_results_targets_and_presets_that_a_document_names_exist(document: str) -> None:
    text = read(document)
    assert unknown_files(text) == []
    for path in re.findall(r"benchmarks/results/[\w./-]+\.json", text):
        assert (ROOT / path).is_file(), path
    targets = re.findall(r"^([a-z][\w-]*):", read("Makefile"), re.M)
    assert set(re.findall(r"`make ([a-z][\w-]*)`", text)) <= set(targets)
    assert {"".join(preset) for preset in PRESETS.findall(text)} <= set(names())
    assert DENIALS.findall(text) == [], "benchmarks/results has runs on GPUs"


def test_docstrings_and_examples_name_what_exists() -> None:
    assert {path: files for path in FILES if (files := unknown_files(read(path)))} == {}
    assert [path for path in FILES if path.startswith("moe/layers/") and DENIALS.search(read(path))] == []
    examples = "".join(path.read_text() for path in ROOT.glob("examples/**/*.yaml"))
    presets = {"".join(preset) for preset in PRESETS.findall(examples + "".join(map(read, DOCUMENTS)))}
    assert {"gshard-tiny", "gshard-2048e-60l", "qwen3-30b-a3b", "deepseek-v3"} <= presets <= set(names())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_jobs_in_documents_are_valid(document: str) -> None:
    """Complete jobs can be planned, and partial ones have existing fields."""
    text = read(document)
    jobs: list[Any] = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)]
    jobs += [json.loads(body) for body in re.findall(r"/v1/jobs -H \S+ \S+ -d '(\{.*?\})'", text, re.S)]
    for job in jobs:
        if not isinstance(job, dict) or not job.keys() & {"model", "data", "train"}:
            continue  # facts of a cluster, or tasks of an evaluation
        assert job.keys() <= json_schema(with_sweep=True)["properties"].keys()
        if job.keys() >= {"model", "data", "train"} and "preset" in job["model"]:
            plan_request(job)


def test_presets_families_routers_and_degrees_are_documented() -> None:
    text = words("docs/jobs.md")
    papers = [name for name in names() if re.fullmatch(r"gshard-\d+e-\d+l", name)]
    assert f"from `{papers[0]}` to `{papers[-1]}` (a trillion weights)" in text
    assert 0.95e12 < model_spec({"preset": papers[-1]}).num_parameters() < 1.05e12
    assert {f"{name}-dense" for name in papers} <= set(names())
    families = names_in_first_cells(section("docs/families.md", "## Families", "**Multimodal models"))
    assert families - {"model_type"} == {*BY_TYPE, *WRAPPED_FAMILIES}
    (routers,) = re.findall(r"`model.moe.router`\*\* is GShard's top-2 or another common router \((.*?)\)", text)
    assert len(ROUTERS) == 1 + len(re.split(r", | or ", routers)), ROUTERS.keys()
    (fields,) = re.findall(r"`parallel` takes (.*?)\. All parallel degrees", text)
    assert set(re.findall(r"`(\w+)`", fields)) <= ParallelSpec.model_fields.keys()
    rank = yaml.safe_load(read("examples/fine-tune.yaml"))["adapter"]["rank"]
    assert f"adapters of rank {rank} on attention and experts" in read("docs/language-models.md")


def test_corpora_and_optimizers_are_documented() -> None:
    properties = [definition.get("properties", {}) for definition in json_schema()["$defs"].values()]
    corpora = {fields["corpus"]["const"] for fields in properties if "const" in fields.get("corpus", {})}
    assert names_in_first_cells(section("docs/jobs.md", "\n## Data\n", "\n## ")) == corpora
    for kind in get_args(get_args(OptimizerSpec)[0]):
        name = get_args(kind.model_fields["name"].annotation)[0]
        assert f"`{name}`" in section("docs/jobs.md", "\n## Optimizer\n", "\n## ")


def test_the_readme_says_what_is_needed_where_packages_are_and_which_files_to_extend() -> None:
    (version,) = re.findall(r"You need Python ([\d.]+) or later", read("README.md"))
    assert tomllib.loads(read("pyproject.toml"))["project"]["requires-python"] == f">={version}"
    assert f"two CPU cores and {DEMO_MEMORY_BYTES >> 30} GiB of memory" in read("README.md")
    packages = {
        path.parent.relative_to(ROOT).as_posix()
        for top in ("moe", "service")
        for path in (ROOT / top).glob("*/__init__.py")
    }
    table_names = names_in_first_cells(section("README.md", "## Where things are"))
    assert {name for name in table_names if "/" in name} == packages
    assert all((ROOT / name).is_dir() for name in table_names)
    table = section("README.md", "## How to extend it")  # where NAME stands for an existing file
    paths = re.findall(r"`((?:moe|service|docs|tests|examples)/[\w./-]+)`", table)
    assert len(paths) > 8
    assert [path for path in paths if not list(ROOT.glob(path.replace("NAME", "[a-z]*")))] == []


def test_the_picture_of_a_plan_shows_what_the_command_prints() -> None:
    example = "deepseek-v3-1024-h100"
    plan, output = Plan.model_validate_json(read(f"tests/golden/{example}.json")), io.StringIO()
    console = Console(width=104, file=output, highlight=False, emoji=False, markup=False)
    console.print(f"$ shardyard plan examples/{example}.yaml")
    console.print(short_plan_view(plan, "128 nodes of 8 h100"))
    texts = re.findall(r"<text class=\"plan-r\d+\"[^>]*>(.*?)</text>", read("docs/pictures/plan.svg"))
    assert re.sub(r"\s", "", unescape("".join(texts))) == re.sub(r"\s", "", output.getvalue()), (
        "draw it again: python -m benchmarks.pictures plan"
    )


GLOSSARY = re.findall(r"^\| (\*\*.+?) \| .+ \| `([\w.]+)` \|$", read("docs/glossary.md"), re.M)


@pytest.mark.parametrize("dotted_name", sorted({name for _, name in GLOSSARY}))
def test_names_in_the_glossary_exist(dotted_name: str) -> None:
    """As modules, attributes of modules or fields of dataclasses."""
    try:
        pkgutil.resolve_name(dotted_name)
    except AttributeError:
        owner, _, field = dotted_name.rpartition(".")
        assert any(field in vars(base).get("__annotations__", {}) for base in pkgutil.resolve_name(owner).__mro__)


def test_each_row_of_the_glossary_is_read_and_has_a_term_of_its_own() -> None:
    assert len(GLOSSARY) == read("docs/glossary.md").count("\n| **")
    terms = [term for cell, _ in GLOSSARY for term in re.findall(r"\*\*(.+?)\*\*", cell)]
    assert len(set(terms)) == len(terms)
