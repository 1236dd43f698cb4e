"""Codes of problems: documented, and in what programs read."""

import json
import re
import subprocess
import sys
from pathlib import Path

from moe.spec import PROBLEM_CODES
from moe.spec.problems import code_of
from tests.refusals import check

PAGE = Path(__file__).parents[2] / "docs" / "problems.md"
PYTHON = [sys.executable, "-m", "service.cli.main"]


def test_every_code_is_documented() -> None:
    assert tuple(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)) == PROBLEM_CODES


def test_types_of_pydantic_have_codes() -> None:
    assert [code_of(kind) for kind in ("int_type", "greater_than", "literal_error", "url_parsing", "new")] == [
        "wrong_type", "out_of_range", "not_a_choice", "wrong_type", "invalid_value",
    ]  # fmt: skip


def test_the_command_line_prints_problems_as_json(tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text("{foo: 1, model: {preset: gshard-tiny}, data: {corpus: catalogs}}")
    answer = subprocess.run(
        [*PYTHON, "plan", str(spec), "--json"], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 2
    errors = json.loads(answer.stdout)["errors"]
    check(errors, [("unknown_key", "foo", 1), ("missing", "train", None)])
    assert all(error["rule"] in answer.stderr for error in errors)
