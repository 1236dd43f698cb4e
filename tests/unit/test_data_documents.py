"""Users' documents: what is read of each format, and what each mistake is told."""

import gzip
import json
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from moe.data.data_file import DataFile
from moe.data.faults import Faults
from moe.data.locations import Location
from moe.data.sequences import check
from moe.data.sequences.corpora import build
from moe.data.sequences.formats import PlainText
from moe.spec import DocumentsSpec, SpecError
from tests.refusals import refused
from tests.unit.data_corpora import write_jsonl


def documents(*sources, **fields):
    return DocumentsSpec(corpus="documents", sources=sources, **{"held_out": 0.0, **fields})


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


def told(spec, root):
    """The one problem that both a look and reading tell."""
    errors = []
    for act in (lambda: check(spec, [str(root)]), lambda: list(build(spec).documents())):
        with pytest.raises(SpecError) as error:
            act()
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    return errors[0]


def test_documents_of_every_format_come_source_by_source_as_they_are(tmp_path):
    odd = " two  spaces\r\n\tand a tab\u2028é "
    lines = write_jsonl(tmp_path / "a.jsonl", [{"text": odd, "id": 1}, {"text": "b"}])
    rows = write_parquet(tmp_path / "b.parquet", body=[odd, "c"], other=[1, 2])
    (tmp_path / "c.txt").write_bytes(odd.encode("utf-8-sig"))  # as some editors begin a file
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"d\n"))
    spec = documents(
        {"name": "lines", "paths": [lines]},
        {"name": "rows", "paths": [rows], "column": "body"},
        {"paths": [f"{tmp_path}/*.txt", f"{tmp_path}/d.txt.gz"]},
    )
    check(spec, [str(tmp_path)])
    found = [(document.source, document.text) for document in build(spec).documents()]
    assert found == [
        ("lines", odd), ("lines", "b"), ("rows", odd), ("rows", "c"), ("source-3", odd), ("source-3", "d\n"),
    ]  # fmt: skip


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("letter", ["\u00e9", "\u5929", "\U0001f600"])
@pytest.mark.parametrize("limit", range(20, 28))
def test_a_text_is_cut_between_its_characters(tmp_path, mark, letter, limit):
    (tmp_path / "a.txt").write_bytes(mark + letter.encode() * 40)
    file = DataFile("data.sources[0].paths[0]", Location("file", f"{tmp_path}/a.txt"))
    (text,) = PlainText().texts(file, Faults(), limit)
    assert text == letter * ((limit + 1 - len(mark)) // len(letter.encode()))
    (tmp_path / "a.txt").write_bytes(mark + letter.encode() * 3 + b"\n\xff" + letter.encode() * 40)
    for at_most in (None, limit):
        faults = Faults()
        assert not list(PlainText().texts(file, faults, at_most))
        with refused("invalid_encoding", "data.sources[0].paths[0]"):
            faults.require_none()


def test_text_in_a_dictionary_or_a_large_column_is_text(tmp_path):
    columns = {"text": pyarrow.array(["a", "b", "a"]).dictionary_encode()}
    large = {"text": pyarrow.array(["a", "b", "a"], pyarrow.large_string())}
    for name, each in (("x", columns), ("y", large)):
        spec = documents({"paths": [write_parquet(tmp_path / f"{name}.parquet", **each)]})
        check(spec, [str(tmp_path)])
        assert [document.text for document in build(spec).documents()] == ["a", "b", "a"]


def test_a_file_that_two_sources_name_is_the_first_one_s(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    spec = documents({"paths": [f"{tmp_path}/a.txt"]}, {"paths": [f"{tmp_path}/*.txt"]})
    assert [(document.source, document.text) for document in build(spec).documents()] == [
        ("source-1", "a"), ("source-2", "b"),
    ]  # fmt: skip
    with refused("duplicate", "data.sources[1].paths", None):
        check(documents({"paths": [f"{tmp_path}/*.txt"]}, {"paths": [f"{tmp_path}/a.txt"]}), [str(tmp_path)])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "line 2') is not JSON: Expecting property name"),
        ("[1, 2]", "line 2') is a list, not an object"),
        ({"text": None}, "line 2') has a 'text' that is null, not text; write a string, or remove the line"),
        (b"\xff", "line 2') is not UTF-8 text at byte 1 of the line; save the file as UTF-8"),
    ],
)
def test_a_broken_line_is_named_with_its_file_and_number(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    raw = line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
    path.write_bytes(b'{"text": "good"}\n' + raw + b"\n")
    error = told(documents({"paths": [str(path)]}), tmp_path)
    assert error.startswith(f"data.sources[0].paths[0] (='{path}")
    assert message in error


def test_json_lines_without_the_key_name_file_line_and_the_keys_there_are(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"content": "x", "id": 1}])
    assert told(documents({"paths": [path]}), tmp_path) == (
        f"data.sources[0].column (='text') is not a key of {path}, line 1, which has 'content', 'id'; use one of these"
    )


def test_parquet_without_the_column_names_file_and_the_columns_there_are(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", content=["x"], id=[1])
    assert told(documents({"paths": [path]}), tmp_path) == (
        f"data.sources[0].column (='text') is not a column of {path}, which has 'content', 'id'; use one of these"
    )
    error = told(documents({"paths": [path], "column": "id"}), tmp_path)
    assert f"is a column of int64 in {path}, not text; name a column of strings" in error


def test_a_row_without_text_is_named(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", text=["x", None])
    with refused("wrong_type", "data.sources[0].paths[0]"):
        list(build(documents({"paths": [path]})).documents())


@pytest.mark.parametrize("content", [b"", b"PAR1", b"x" * 100, b"PAR1" + b"x" * 92 + b"\x58\0\0\0PAR1"])
def test_what_is_no_parquet_is_refused(tmp_path, content):
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    spec = documents({"paths": [str(path)]})
    for act in (lambda: check(spec, [str(tmp_path)]), lambda: list(build(spec).documents())):
        with pytest.raises(
            SpecError, match=r"data.sources\[0\].paths\[0\] \(='.*a.parquet'\) (is not|cannot be read as)"
        ):
            act()


def test_a_text_file_that_is_not_utf8_is_named_with_the_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nd\xe9j\xe0")
    error = told(documents({"paths": [f"{tmp_path}/a.txt"]}), tmp_path)
    assert "a.txt, line 3') is not UTF-8 text at byte 10 of the file; save the file as UTF-8" in error


def test_a_look_at_a_long_text_does_not_stop_at_a_character_that_it_cuts(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" + "é".encode() * (5 << 20))
    check(documents({"paths": [f"{tmp_path}/a.txt"]}), [str(tmp_path)])


def test_data_without_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text(" \n\t\n")
    with refused("empty", "data.sources[0].paths"):
        list(build(documents({"paths": [f"{tmp_path}/a.txt"]})).documents())


def test_files_lie_under_the_roots(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "roots").mkdir()
    with refused("not_allowed", "data.sources[0].paths[0]"):
        check(documents({"paths": [f"{tmp_path}/a.txt"]}), [str(tmp_path / "roots")])


def test_half_a_surrogate_pair_is_a_sign_that_files_can_hold(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ['{"text": "a\\ud800b"}'])
    assert [document.text for document in build(documents({"paths": [path]})).documents()] == ["a?b"]


def test_equal_documents_are_held_out_together_wherever_they_stand(tmp_path):
    rows = [{"text": f"document {index % 500}"} for index in range(1000)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    other = write_jsonl(tmp_path / "b.jsonl", [{"text": f"more {index}"} for index in range(50)] + rows[::-1])

    def held_out(given, share=0.1):
        spec = documents({"paths": [given]}, held_out=share)
        return {document.text: document.is_held_out for document in build(spec).documents()}

    found, among_others = held_out(path), held_out(other)
    assert 20 < sum(found.values()) < 80
    assert {text: among_others[text] for text in found} == found
    assert {text for text, held in found.items() if held} <= {
        text for text, held in held_out(path, 0.2).items() if held
    }
    assert not any(held_out(path, 0.0).values())


def test_a_look_loads_nothing_heavy(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", text=["x"])
    program = f"""
import sys
from moe.data.sequences import check
from moe.spec import DocumentsSpec
check(DocumentsSpec(corpus="documents", sources=({{"paths": ({path!r},)}},)), ["{tmp_path}"])
assert not {{"torch", "tokenizers", "numpy", "pyarrow"}} & set(sys.modules)
import moe.data.sequences
for name in moe.data.sequences.__all__:
    getattr(moe.data.sequences, name)
assert "torch" not in sys.modules and "pyarrow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
