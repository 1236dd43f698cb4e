"""JSONL and parallel text: what is read, and what is refused. Unusable records: test_data_bad_records.py."""

import gzip
import json

import pytest

from moe.data.pairs import check, prepare
from moe.data.pairs.corpora import build
from moe.spec import JsonlSpec, ParallelTextSpec, TextPair
from tests.refusals import expect_problem
from tests.unit.data_corpora import LANGS, job, sentences, write_jsonl

GOOD = {"source": "Haus", "target": "house", "lang": "de"}


def jsonl(*paths, **fields):
    return JsonlSpec(corpus="jsonl", paths=paths, **fields)


def text(source, target, lang="de", **fields):
    files = (TextPair(source=str(source), target=str(target), lang=lang),)
    return ParallelTextSpec(corpus="text", files=files, **fields)


def read(spec):
    return list(build(spec).pairs())


def assert_refused(spec, root, code, path, *value):
    """Both the check before a launch and reading refuse it."""
    for act in (lambda: check(spec, [str(root)]), lambda: read(spec)):
        with expect_problem(code, path, *value):
            act()


def test_jsonl_is_read_in_order(tmp_path):
    """With blank lines, a byte-order mark, other columns, compression, and other names of columns."""
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({**GOOD, "id": 3}).encode() + b"\r\n\n")
    second = write_jsonl(tmp_path / "b.jsonl", [{**GOOD, "source": "Bau\u2028m", "target": "tree"}])
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    house = ("de", "Haus", "house")
    spec = jsonl(f"{tmp_path}/a.jsonl", f"file://{second}", f"{tmp_path}/c.jsonl.gz")
    assert read(spec) == [house, ("de", "Bau\u2028m", "tree"), house]
    path = write_jsonl(tmp_path / "d.jsonl", [{"fremd": "Haus", "en": "house", "code": "de"}])
    assert read(jsonl(path, source_column="fremd", target_column="en", lang_column="code")) == [house]


def test_a_pattern_matches_files_in_order_and_a_file_named_twice_is_read_once(tmp_path):
    for name in ("b", "a", "c[1]?", "de/train", "fr/train"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / f"{name}.jsonl", [{**GOOD, "target": name}])
    (tmp_path / ".hidden.jsonl").write_text("not read")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "ja").mkdir()
    spec = jsonl(f"{tmp_path}/b.jsonl", f"{tmp_path}/*.jsonl", f"{tmp_path}/c[1]?.j*", f"{tmp_path}/*/train.jsonl")
    assert [pair.target for pair in read(spec)] == ["b", "a", "c[1]?", "de/train", "fr/train"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ({**GOOD, "lang": ""}, "invalid_value"),
        ('{"source": "Haus", "target": "house", "lang": "\\ud800"}', "invalid_value"),
        ({**GOOD, "lang": "\x1b[31mde"}, "invalid_value"),
        ("[" * 100_000, "invalid_syntax"),
        ("x" * (2 << 20), "too_large"),
    ],
    ids=["no language", "surrogate", "control character", "nesting", "long line"],
)
def test_a_broken_line_is_named_with_its_file_and_number(tmp_path, line, code):
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD, line])
    assert_refused(jsonl(path), tmp_path, code, "data.paths[0]", f"{path}, line 2")


def test_a_missing_column_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "Haus", "target": "house", "lang": "de"}])
    assert_refused(jsonl(path), tmp_path, "not_found", "data.source_column", "source")


def test_a_truncated_archive_is_refused(tmp_path):
    content = gzip.compress("".join(json.dumps(row) + "\n" for row in sentences(200)).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(content[: len(content) // 2])
    assert_refused(jsonl(f"{tmp_path}/a.jsonl.gz"), tmp_path, "unreadable", "data.paths[0]")


@pytest.mark.parametrize(("name", "code"), [("none.jsonl", "not_found"), ("*.json", "not_found"), ("", "wrong_type")])
def test_a_missing_file_is_refused(tmp_path, name, code):
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD])
    assert_refused(jsonl(path, f"{tmp_path}/{name}"), tmp_path, code, "data.paths[1]", f"{tmp_path}/{name}")


def test_a_language_without_pairs_is_refused_before_launch_in_a_small_corpus(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", sentences(3))
    with expect_problem("not_a_choice", "data.languages[1]", "qq"):
        check(jsonl(path, languages=("de", "qq")), [str(tmp_path)])
    padding = {**GOOD, "padding": "x" * 500_000}
    path = write_jsonl(tmp_path / "a.jsonl", [padding] * 12)
    check(jsonl(path, languages=("de", "qq")), [str(tmp_path)])  # only the beginning of a large file is read
    path = write_jsonl(tmp_path / "a.jsonl", [*[padding] * 12, "{broken"])
    assert_refused(jsonl(path), tmp_path, "invalid_syntax", "data.paths[0]", f"{path}, line 13")


def test_parallel_text_is_paired_line_by_line_and_files_in_order(tmp_path):
    (tmp_path / "0.de").write_bytes("Haus\r\nBaum\u2028x\n\nEnde".encode())
    (tmp_path / "0.en").write_bytes(b"house\ntree\n\nend\n")
    (tmp_path / "1.de").write_text("Katze\n")
    (tmp_path / "1.en").write_text("cat\n")
    spec = text(f"{tmp_path}/*.de", f"{tmp_path}/*.en")
    check(spec, [str(tmp_path)])
    assert [pair.target for pair in read(spec)] == ["house", "tree", "", "end", "cat"]
    (tmp_path / "2.de").write_text("Haus\n")
    assert_refused(spec, tmp_path, "mismatch", "data.files[0]", "3 source files, 2 target files")


@pytest.mark.parametrize(("num_sources", "num_targets"), [(3, 5), (5, 3), (0, 1)])
def test_unequal_numbers_of_lines_are_refused(tmp_path, num_sources, num_targets):
    (tmp_path / "de").write_text("Haus\n" * num_sources)
    (tmp_path / "en").write_text("house\n" * num_targets)
    counts = f"{num_sources} lines in {tmp_path}/de, {num_targets} in {tmp_path}/en"
    assert_refused(text(tmp_path / "de", tmp_path / "en"), tmp_path, "mismatch", "data.files[0]", counts)


def test_missing_text_files_are_named_by_their_side(tmp_path):
    (tmp_path / "de").write_text("Haus\n")
    assert_refused(text(tmp_path / "de", tmp_path / "en"), tmp_path, "not_found", "data.files[0].target")
    with expect_problem("not_a_choice", "data.languages[0]", "fr"):
        check(text(tmp_path / "de", tmp_path / "de2", languages=("fr",)), [str(tmp_path)])


def test_a_corpus_or_language_that_cleaning_empties_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{**GOOD, "target": "Haus"}] * 3)
    spec = job({"corpus": "jsonl", "paths": [path]})
    with expect_problem("empty", "data", "3 pairs read"):
        prepare(spec.data, spec.model, tmp_path / "cache")
    assert [entry.name for entry in (tmp_path / "cache").iterdir() if entry.is_dir()] == []
    write_jsonl(tmp_path / "a.jsonl", [*sentences(20), {**GOOD, "lang": "qq", "target": "Haus"}])
    spec = job({"corpus": "jsonl", "paths": [path], "languages": [*LANGS, "qq"]})
    check(spec.data, [str(tmp_path)])
    with expect_problem("not_a_choice", "data.languages[4]", "qq"):
        prepare(spec.data, spec.model, tmp_path / "cache")
