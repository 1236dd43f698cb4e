"""Specs as text: the meaning of YAML and JSON, and the line and column of errors."""

import json
from pathlib import Path
from unittest.mock import ANY

import pytest

from moe.spec import SpecError, parse_text, read_job
from moe.spec.files import parse_stream, read_plain
from tests.refusals import expect_problem

UNREADABLE = {  # and the place that is named
    "name: [1, 2": "spec, line 1, column 12",
    "name: a\n  b: c": "spec, line 2, column 4",
    "name: a\nname: b": "spec, line 2, column 1",
    "a: &x 1\nb: *x": "spec, line 2, column 4",
    "a: b\nc: !!map [1]": "spec, line 2, column 4",
    "a: !!int 1:30": "spec, line 1, column 4",
    "a: !!binary eA==": "spec, line 1, column 4",
    "a: " + "9" * 31: "spec, line 1, column 4",
    "[" * 100_000: "spec, line 1, column 65",
    "[" + "1," * 49_000 + "]": "spec, line 1, column 20000",
}


@pytest.mark.parametrize("text", UNREADABLE)
def test_broken_yaml_is_told_line_and_column(text: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_text(text)
    assert error.value.problems[0].path == UNREADABLE[text]


NUMBERS = {
    "1e-3": 1e-3, "1E3": 1e3, "-.5": -0.5, "1.": 1.0, ".inf": float("inf"), "1_000": 1000, "-7": -7,
    "9" * 30: 10**30 - 1, "1:30": "1:30", "1:30.5": "1:30.5", "0x1f": "0x1f", "0o17": "0o17", "017": "017",
    "0b1": "0b1", "2026-01-31": "2026-01-31",
}  # fmt: skip


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_in_yaml_are_those_of_its_newest_version_in_decimal(text: str) -> None:
    number = parse_text(f"a: {text}")["a"]
    assert (number, type(number)) == (NUMBERS[text], type(NUMBERS[text]))


@pytest.mark.parametrize("text", ["1:" * 45_000 + "1", "0x" + "f" * 90_000], ids=["base 60", "hex"])
def test_numbers_that_take_long_to_read_are_text(text: str) -> None:
    assert parse_text(f"a: {text}") == {"a": text}


@pytest.mark.parametrize("format", ["json", "yaml"])
def test_more_than_any_spec_has_is_too_large(format: str) -> None:
    for text in (json.dumps([1] * 20_000), "[" * 100_000, f"[{'9' * 5000}]"):
        with expect_problem("too_large", "spec" if format == "json" else ANY, None) as error:
            parse_text(text, format=format)
        assert format == "json" or error.value.problems[0].path.startswith("spec, line 1, column ")


@pytest.mark.parametrize(
    ("text", "format", "code", "path", "value"),
    [
        ('{"a": {"b": 1, "c": 2, "b": 1}}', "json", "duplicate", "spec", "b"),
        ("a:\n  b: 1\n  b: 1\n", "yaml", "duplicate", "spec, line 3, column 3", "b"),
        ('{"data": {"paths": ["/a", "\\ud83d"]}}', "json", "invalid_encoding", "data.paths[1]", r"\ud83d"),
        ('{"name": "a",\n "model": }', "json", "invalid_syntax", "spec, line 2, column 11", None),
        ("a: " + "x" * 1_000_000, "yaml", "too_large", "spec", None),
    ],
    ids=["key twice in JSON", "key twice in YAML", "half a surrogate pair", "broken JSON", "large"],
)
def test_text_that_is_no_spec_is_refused_at_its_place(text, format, code, path, value) -> None:
    with expect_problem(code, path, value):
        parse_text(text, format=format)


@pytest.mark.parametrize("name", ["job.json", "job.JSON", "job.yaml", "job"])
def test_a_byte_order_mark_is_no_part_of_a_spec(name: str, tmp_path: Path) -> None:
    """Editors on Windows and PowerShell write one at the beginning of a file."""
    (tmp_path / name).write_bytes(b'\xef\xbb\xbf{"a": [1]}')
    assert read_plain(tmp_path / name) == {"a": [1]}
    assert parse_stream((tmp_path / name).read_bytes(), "standard input") == {"a": [1]}
    for encoding in ("utf-16", "utf-32"):
        (tmp_path / name).write_bytes('{"a": [1]}'.encode(encoding))
        with expect_problem("invalid_encoding", str(tmp_path / name), None):
            read_plain(tmp_path / name)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(SpecError, match=r"is not UTF-8 text at byte 7"):
        read_job(tmp_path / "job.yaml")
