"""JSONL and parallel text: what is read, and what each mistake is told."""

import gzip
import json

import pytest

from moe.data.pairs import check, prepare
from moe.data.pairs.corpora import build
from moe.spec import JsonlSpec, ParallelTextSpec, SpecError, TextPair
from tests.refusals import refused
from tests.unit.data_corpora import LANGS, job, sentences, write_jsonl

GOOD = {"source": "Haus", "target": "house", "lang": "de"}


def jsonl(*paths, **fields):
    return JsonlSpec(corpus="jsonl", paths=paths, **fields)


def text(source, target, lang="de", **fields):
    return ParallelTextSpec(
        corpus="text", files=(TextPair(source=str(source), target=str(target), lang=lang),), **fields
    )


def test_jsonl_is_read_in_order_with_blank_lines_a_byte_order_mark_and_other_columns(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({**GOOD, "id": 3}).encode() + b"\r\n\n")
    second = write_jsonl(tmp_path / "b.jsonl", [{**GOOD, "source": "Bau\u2028m", "target": "tree"}])
    pairs = list(build(jsonl(str(path), f"file://{second}")).pairs())
    assert pairs == [("de", "Haus", "house"), ("de", "Bau\u2028m", "tree")]


def test_a_pattern_is_expanded_in_order_and_a_file_named_twice_is_read_once(tmp_path):
    for name in ("b", "a", "c[1]?"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{**GOOD, "target": name}])
    (tmp_path / ".hidden.jsonl").write_text("not read")
    (tmp_path / "folder.jsonl").mkdir()
    pairs = build(jsonl(f"{tmp_path}/b.jsonl", f"{tmp_path}/*.jsonl", f"{tmp_path}/c[1]?.j*")).pairs()
    assert [pair.target for pair in pairs] == ["b", "a", "c[1]?"]


def test_folders_may_be_patterns_too(tmp_path):
    for lang in ("de", "fr"):
        (tmp_path / lang).mkdir()
        write_jsonl(tmp_path / lang / "train.jsonl", [{**GOOD, "lang": lang}])
    (tmp_path / "ja").mkdir()
    assert [pair.lang for pair in build(jsonl(f"{tmp_path}/*/train.jsonl")).pairs()] == ["de", "fr"]


def test_compressed_files_are_read_by_their_name(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    assert len(list(build(jsonl(f"{tmp_path}/a.jsonl.gz")).pairs())) == 1


def test_columns_have_the_names_that_the_spec_gives(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"fremd": "Haus", "en": "house", "code": "de"}])
    spec = jsonl(path, source_column="fremd", target_column="en", lang_column="code")
    assert list(build(spec).pairs()) == [("de", "Haus", "house")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "line 2') is not JSON: Expecting property name"),
        ("[1, 2]", "line 2') is a list, not an object"),
        ("null", "line 2') is null, not an object"),
        ({**GOOD, "source": None}, "line 2') has a 'source' that is null, not text"),
        ({**GOOD, "target": 3}, "line 2') has a 'target' that is a number, not text"),
        ({**GOOD, "lang": ""}, "line 2') has a 'lang' (='') that is not a language code"),
        (
            '{"source": "Haus", "target": "house", "lang": "\\ud800"}',
            "line 2') has a 'lang' (='\\ud800') that is not a language code",
        ),
        ({**GOOD, "lang": "\x1b[31mde"}, "line 2') has a 'lang' (='\\x1b[31mde') that is not a language code"),
        ("[" * 100_000, "line 2') is not JSON"),
        ("x" * (2 << 20), "line 2') is longer than 1048576 bytes"),
    ],
)
def test_a_broken_line_is_named_with_its_file_and_number(tmp_path, line, message):
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD, line])
    for act in (lambda: check(jsonl(path), [str(tmp_path)]), lambda: list(build(jsonl(path)).pairs())):
        with pytest.raises(SpecError) as error:
            act()
        assert str(error.value).startswith("data.paths[0] (='")
        assert message in str(error.value)


def test_a_missing_column_is_named_with_the_columns_there_are(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "Haus", "target": "house", "lang": "de"}])
    with refused("not_found", "data.source_column", "source") as error:
        check(jsonl(path), [str(tmp_path)])
    (problem,) = error.value.problems
    assert (problem.path, problem.value) == ("data.source_column", "source")
    assert problem.rule.endswith("a.jsonl, line 1, which has 'text', 'target', 'lang'")


def test_bytes_that_are_not_utf8_are_placed(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json.dumps(GOOD).encode() + b'\n{"source": "\xff"}\n')
    with refused("invalid_encoding", "data.paths[0]"):
        check(jsonl(f"{tmp_path}/a.jsonl"), [str(tmp_path)])


def test_a_cut_off_archive_is_an_error_and_no_shorter_corpus(tmp_path):
    whole = gzip.compress("".join(json.dumps(row) + "\n" for row in sentences(200)).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with refused("unreadable", "data.paths[0]"):
        list(build(jsonl(f"{tmp_path}/a.jsonl.gz")).pairs())


@pytest.mark.parametrize(
    ("name", "message"), [("none.jsonl", "does not exist"), ("*.json", "matches no file"), ("", "is a folder")]
)
def test_a_file_that_is_not_there_is_an_error_at_its_place(tmp_path, name, message):
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD])
    with pytest.raises(SpecError) as error:
        check(jsonl(path, f"{tmp_path}/{name}"), [str(tmp_path)])
    (problem,) = error.value.problems
    assert problem.path == "data.paths[1]"
    assert problem.rule == message


def test_a_language_that_a_small_corpus_lacks_is_seen_before_launch(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", sentences(3))
    with refused("not_a_choice", "data.languages[1]", "qq") as error:
        check(jsonl(path, languages=("de", "qq")), [str(tmp_path)])
    assert str(error.value) == ("data.languages[1] (='qq') has no pairs in this corpus; use one of de, fr, ja, ru")


def test_check_looks_for_languages_in_the_beginning_of_a_large_corpus_only(tmp_path):
    padding = {**GOOD, "padding": "x" * 500_000}
    path = write_jsonl(tmp_path / "a.jsonl", [padding] * 12)
    check(jsonl(path, languages=("de", "qq")), [str(tmp_path)])  # of which languages come later is not known
    path = write_jsonl(tmp_path / "a.jsonl", [*[padding] * 12, "{broken"])
    for act in (lambda: check(jsonl(path), [str(tmp_path)]), lambda: list(build(jsonl(path)).pairs())):
        with pytest.raises(SpecError, match="line 13"):
            act()


def test_parallel_text_is_paired_line_by_line(tmp_path):
    (tmp_path / "de").write_bytes("Haus\r\nBaum\u2028x\n\nEnde".encode())
    (tmp_path / "en").write_bytes(b"house\ntree\n\nend\n")
    spec = text(tmp_path / "de", tmp_path / "en")
    check(spec, [str(tmp_path)])
    assert [pair.target for pair in build(spec).pairs()] == ["house", "tree", "", "end"]


@pytest.mark.parametrize(("num_sources", "num_targets"), [(3, 5), (5, 3), (0, 1)])
def test_unequal_numbers_of_lines_are_an_error_with_both(tmp_path, num_sources, num_targets):
    (tmp_path / "de").write_text("Haus\n" * num_sources)
    (tmp_path / "en").write_text("house\n" * num_targets)
    with refused("mismatch", "data.files[0]") as error:
        check(text(tmp_path / "de", tmp_path / "en"), [str(tmp_path)])
    (problem,) = error.value.problems
    assert problem.path == "data.files[0]"
    assert problem.value == f"{num_sources} lines in {tmp_path}/de, {num_targets} in {tmp_path}/en"


def test_text_files_are_named_by_their_side(tmp_path):
    (tmp_path / "de").write_text("Haus\n")
    with refused("not_found", "data.files[0].target"):
        check(text(tmp_path / "de", tmp_path / "en"), [str(tmp_path)])
    with refused("not_a_choice", "data.languages[0]", "fr"):
        check(text(tmp_path / "de", tmp_path / "de2", languages=("fr",)), [str(tmp_path)])


def test_patterns_on_both_sides_pair_files_in_order(tmp_path):
    for index in range(2):
        (tmp_path / f"{index}.de").write_text(f"Haus {index}\n")
        (tmp_path / f"{index}.en").write_text(f"house {index}\n")
    pairs = list(build(text(f"{tmp_path}/*.de", f"{tmp_path}/*.en")).pairs())
    assert pairs == [("de", "Haus 0", "house 0"), ("de", "Haus 1", "house 1")]
    (tmp_path / "2.de").write_text("Haus\n")
    with refused("mismatch", "data.files[0]", "3 source files, 2 target files"):
        list(build(text(f"{tmp_path}/*.de", f"{tmp_path}/*.en")).pairs())


def test_a_corpus_of_nothing_fit_says_what_was_left_out(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{**GOOD, "target": "Haus"}] * 3)
    spec = job({"corpus": "jsonl", "paths": [path]})
    with refused("empty", "data", "3 pairs read"):
        prepare(spec.data, spec.model, tmp_path / "cache")
    assert [entry.name for entry in (tmp_path / "cache").iterdir() if entry.is_dir()] == []


def test_a_language_that_cleaning_empties_is_named(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [*sentences(20), {**GOOD, "lang": "qq", "target": "Haus"}])
    spec = job({"corpus": "jsonl", "paths": [path], "languages": [*LANGS, "qq"]})
    check(spec.data, [str(tmp_path)])
    with refused("not_a_choice", "data.languages[4]", "qq"):
        prepare(spec.data, spec.model, tmp_path / "cache")
