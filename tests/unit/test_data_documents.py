"""Users' documents: what is read from each format, and what is refused. Unusable records: test_data_bad_records.py."""

import gzip
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from moe.data.data_file import DataFile
from moe.data.faults import Faults
from moe.data.locations import Location
from moe.data.readers.text_reader import TextReader
from moe.data.sequences import check
from moe.data.sequences.corpora import build
from moe.spec import DocumentsSpec, SpecError
from tests.refusals import expect_problem
from tests.unit.data_corpora import write_jsonl

PLACE = "data.sources[0].paths[0]"


def documents(*sources, **fields):
    return DocumentsSpec(corpus="documents", sources=sources, **{"held_out": 0.0, **fields})


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


def read(spec):
    return [(document.source, document.text) for document in build(spec).documents()]


def assert_refused(spec, root, code, path, *value):
    """Both the check before a launch and reading refuse it."""
    for act in (lambda: check(spec, [str(root)]), lambda: read(spec)):
        with expect_problem(code, path, *value):
            act()


@pytest.mark.slow
def test_documents_of_every_format_come_source_by_source_unchanged(tmp_path):
    odd = " two  spaces\r\n\tand a tab\u2028é "
    lines = write_jsonl(tmp_path / "a.jsonl", [{"text": odd, "id": 1}, '{"text": "a\\ud800b"}'])
    rows = write_parquet(tmp_path / "b.parquet", body=[odd, "c"], other=[1, 2])
    words = write_parquet(tmp_path / "e.parquet", text=pyarrow.array(["x", "y", "x"]).dictionary_encode())
    large = write_parquet(tmp_path / "f.parquet", text=pyarrow.array(["z"], pyarrow.large_string()))
    (tmp_path / "c.txt").write_bytes(odd.encode("utf-8-sig"))  # as some editors begin a file
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"d\n"))
    spec = documents(
        {"name": "lines", "paths": [lines]},
        {"name": "rows", "paths": [rows], "column": "body"},
        {"paths": [f"{tmp_path}/*.txt", f"{tmp_path}/d.txt.gz"]},
        {"name": "words", "paths": [words, large]},
    )
    check(spec, [str(tmp_path)])
    assert read(spec) == [
        ("lines", odd), ("lines", "a?b"), ("rows", odd), ("rows", "c"), ("source-3", odd), ("source-3", "d\n"),
        *(("words", word) for word in "xyxz"),
    ]  # fmt: skip


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("letter", ["\u00e9", "\u5929", "\U0001f600"])
def test_a_text_is_cut_between_its_characters(tmp_path, mark, letter):
    path, size = tmp_path / "a.txt", len(letter.encode())
    file = DataFile(PLACE, Location("file", str(path)))
    for limit in range(20, 28):
        path.write_bytes(mark + letter.encode() * 40)
        assert [record.values["text"] for record in TextReader().records(file, Faults(), limit)] == [
            letter * ((limit + 1 - len(mark)) // size)
        ]
        path.write_bytes(mark + letter.encode() * 3 + b"\n\xff" + letter.encode() * 40)
        for max_bytes in (None, limit):
            faults = Faults()
            assert not list(TextReader().records(file, faults, max_bytes))
            with expect_problem("invalid_encoding", PLACE, f"{path}, line 2"):
                faults.require_none()


def test_a_file_of_two_sources_belongs_to_the_first(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    single, all_files = {"paths": [f"{tmp_path}/a.txt"]}, {"paths": [f"{tmp_path}/*.txt"]}
    assert read(documents(single, all_files)) == [("source-1", "a"), ("source-2", "b")]
    with expect_problem("duplicate", "data.sources[1].paths", None):
        check(documents(all_files, single), [str(tmp_path)])


def test_a_missing_column_is_named_with_the_existing_ones(tmp_path):
    lines = write_jsonl(tmp_path / "a.jsonl", [{"content": "x", "id": 1}])
    rows = write_parquet(tmp_path / "a.parquet", content=["x"], id=[1])
    for path in (lines, rows):
        assert_refused(documents({"paths": [path]}), tmp_path, "not_found", "data.sources[0].column", "text")
    spec = documents({"paths": [rows], "column": "id"})
    assert_refused(spec, tmp_path, "wrong_type", "data.sources[0].column", "id")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"x" * 100, b"PAR1" + b"x" * 92 + b"\x58\0\0\0PAR1"])
def test_an_invalid_parquet_file_is_refused(tmp_path, content):
    (tmp_path / "a.parquet").write_bytes(content)
    spec = documents({"paths": [f"{tmp_path}/a.parquet"]})
    for act in (lambda: check(spec, [str(tmp_path)]), lambda: read(spec)):
        with pytest.raises(SpecError) as error:
            act()
        (problem,) = error.value.problems
        assert (problem.code, problem.path) in (("corrupt", PLACE), ("unreadable", PLACE))


def test_files_must_be_under_the_roots(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with expect_problem("not_allowed", PLACE):
        check(documents({"paths": [f"{tmp_path}/a.txt"]}), [str(tmp_path / "roots")])


def test_equal_documents_are_held_out_together_in_any_corpus(tmp_path):
    rows = [{"text": f"document {index % 500}"} for index in range(1000)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    longer_path = write_jsonl(tmp_path / "b.jsonl", [{"text": f"more {index}"} for index in range(50)] + rows[::-1])

    def held_out(path, share=0.1):
        spec = documents({"paths": [path]}, held_out=share)
        return {document.text: document.is_held_out for document in build(spec).documents()}

    marks, among_others = held_out(path), held_out(longer_path)
    assert 20 < sum(marks.values()) < 80
    assert {text: among_others[text] for text in marks} == marks
    larger_share = held_out(path, 0.2)
    assert all(larger_share[text] for text, is_held_out in marks.items() if is_held_out)
    assert not any(held_out(path, 0.0).values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "spec", "heavy"),
    [("pairs", "JsonlSpec(corpus='jsonl', paths=('{}/a.jsonl',))", "{'django', 'pycountry'}"),
     ("sequences", "DocumentsSpec(corpus='documents', sources=({{'paths': ('{}/a.parquet',)}},))", "{'pyarrow'}")],
)  # fmt: skip
def test_a_check_loads_nothing_heavy_and_names_are_loaded_without_torch(tmp_path, package, spec, heavy):
    write_jsonl(tmp_path / "a.jsonl", [{"source": "Haus", "target": "house", "lang": "de"}])
    write_parquet(tmp_path / "a.parquet", text=["x"])
    program = f"""
import sys
from moe.data.{package} import check
from moe.spec import DocumentsSpec, JsonlSpec
check({spec.format(tmp_path)}, ["{tmp_path}"])
assert not {{"torch", "tokenizers", "numpy", "pyarrow"}} & set(sys.modules)
import moe.data.{package} as package
for name in package.__all__:
    getattr(package, name)
assert not {{"torch"}} & set(sys.modules) and not {heavy} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
