"""Codes of problems: documented, and in what programs read."""

import json
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from moe.spec import PROBLEM_CODES, Problem
from moe.spec.errors import RuleError
from moe.spec.problems import code_of
from tests.refusals import check

PAGE = Path(__file__).parents[2] / "docs" / "problems.md"
PYTHON = [sys.executable, "-m", "service.cli.main"]


def test_every_code_is_documented() -> None:
    assert tuple(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)) == PROBLEM_CODES


def test_a_problem_may_be_of_a_value_that_cannot_be_copied() -> None:
    lock = threading.Lock()
    fields = Problem("wrong_type", "hints[0]", lock, "is no hint", "use Split").to_dict()
    assert fields == {"code": "wrong_type", "path": "hints[0]", "value": lock, "rule": "is no hint",
                      "remedy": "use Split"}  # fmt: skip


def test_types_of_pydantic_have_codes() -> None:
    kinds = {
        "int_type": "wrong_type",
        "int_parsing": "wrong_type",
        "int_parsing_size": "out_of_range",
        "greater_than": "out_of_range",
        "literal_error": "not_a_choice",
        "datetime_parsing": "invalid_value",
        "url_parsing": "invalid_value",
        "string_too_short": "empty",
        "new": "invalid_value",
    }
    assert {kind: code_of(kind) for kind in kinds} == kinds


def test_the_command_line_prints_problems_as_json(tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text("{foo: 1, model: {preset: gshard-tiny}, data: {corpus: catalogs}}")
    answer = subprocess.run([*PYTHON, "plan", str(spec), "--json"], capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    errors = json.loads(answer.stdout)["errors"]
    check(errors, [("unknown_key", "foo", 1), ("missing", "train", None)])
    assert all(error["rule"] in answer.stderr for error in errors)


def run(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and problems of a command that fails: `errors` of the one line that it prints."""
    answer = subprocess.run([*PYTHON, *arguments], capture_output=True, text=True, check=False)
    (line,) = answer.stdout.splitlines()
    return answer.returncode, json.loads(line, parse_constant=pytest.fail)["errors"]


def test_what_json_cannot_hold_is_printed_as_text(tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text("{model: {preset: gshard-tiny}, data: {corpus: catalogs}, train: {num_steps: .nan}}")
    status, errors = run("plan", str(spec), "--json")
    check(errors, [("wrong_type", "train.num_steps", "nan")])
    assert status == 2


@pytest.mark.parametrize(
    ("command", "path", "value"),
    [
        (["generate", "job-x", "text", "--json", "--temperature=-1"], "--temperature", -1.0),
        (["plan", "{spec}", "--json", "--goal=luck"], "--goal", "luck"),
        (["plan", "{spec}", "--json", "--software=none"], "--software", "none"),
    ],
)
def test_options_have_problems_as_fields_do(tmp_path: Path, command: list[str], path: str, value: object) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text(
        "{model: {preset: gshard-tiny}, data: {corpus: catalogs}, train: {num_steps: 5, batch_tokens: 1024}}"
    )
    status, errors = run(*(word.format(spec=spec) for word in command))
    check(errors, [("not_a_choice" if path != "--temperature" else "out_of_range", path, value)])
    assert status == 2


def test_a_word_behind_two_dashes_is_no_option(tmp_path: Path) -> None:
    answer = subprocess.run(
        [*PYTHON, "translate", str(tmp_path / "none"), "--", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (answer.returncode, answer.stdout) == (2, "")


def test_a_broken_rule_pickles() -> None:
    again = pickle.loads(pickle.dumps(RuleError("missing", "is required", "add it")))
    assert (again.code, again.rule, again.remedy) == ("missing", "is required", "add it")
    assert str(again) == "is required; add it"


def test_an_argument_that_is_no_utf8_is_said_to_be_that() -> None:
    command = [*PYTHON, "show", b"job-\xff", "--url", "http://127.0.0.1:9"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (
        2, "shardyard: 'job-\\udcff' is not UTF-8 text; encode it as UTF-8\n",
    )  # fmt: skip
