"""Records that cannot be learned from: all told before a job is launched, or left out up to a share."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from moe.data.corpus import CHECK_BYTES
from moe.data.data_file import DataFile
from moe.data.faults import MAX_EXAMPLES, MAX_KINDS, Faults, OutOfTime
from moe.data.lines import Lines
from moe.data.locations import Location
from moe.data.pairs import corpora as pairs
from moe.data.sequences import check, prepare
from moe.data.sequences.conversation_files import records
from moe.data.sequences.corpora import build
from moe.spec import DocumentsSpec, JsonlSpec, ParallelTextSpec, Problem, SpecError
from tests.unit.test_data_conversations import VOCABULARY, chat, tokenizer_of

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
FILLING = 40_000
"""Good records that are longer together than what is looked at in the service's own process."""
BAD: dict[str, list[bytes]] = {
    "documents": [b"{", b"[1]", b'{"body": "x"}', b'{"text": 3}', b'{"text": "\xe9"}', b'{"text": null}'],
    "jsonl": [b"{", b"7", b'{"source": "x"}', b'{"source": 1, "target": "a", "lang": "de"}', b"\xff",
              b'{"source": "x", "target": "y", "lang": "?"}'],
    "chat": [b"{", b"null", b'{"messages": []}', b'{"messages": [{"role": "x", "content": "y"}]}', b'{"a": 1}',
             b"\xff"],
    "preference": [b"{", b'{"prompt": "q", "chosen": "a"}', b'{"prompt": "q", "chosen": "a", "rejected": "a"}',
                   b"\xff"],
}  # fmt: skip
GOOD: dict[str, Any] = {
    "documents": {"text": "some text " * 12},
    "jsonl": {"source": "Quelle " * 15, "target": "source " * 15, "lang": "de"},
    "chat": {"messages": [TURNS[0], {"role": "assistant", "content": "answer " * 15}]},
    "preference": {"prompt": "q " * 50, "chosen": "a", "rejected": "b"},
}


def spec_of(corpus: str, path: Path, **fields: Any) -> Any:
    if corpus == "documents":
        return DocumentsSpec(corpus="documents", sources=({"paths": (str(path),)},), **{"held_out": 0.0, **fields})
    if corpus == "jsonl":
        return JsonlSpec(corpus="jsonl", paths=(str(path),), **fields)
    return chat(path.parent, corpus=corpus, **fields)


def look(data: Any, root: Path) -> tuple[Problem, ...]:
    """Problems that are told where a job is posted; none where there are none."""
    act: Callable[[], object] = lambda: check(data, [str(root)], tokenizer_of("chatml"))  # noqa: E731
    if isinstance(data, JsonlSpec | ParallelTextSpec):
        act = lambda: pairs.check(data, [str(root)])  # noqa: E731
    try:
        act()
    except SpecError as error:
        return error.problems
    return ()


def written(path: Path, *lines: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


@pytest.mark.parametrize("num_before", [1, FILLING], ids=["at once", "far behind"])
@pytest.mark.parametrize("corpus", BAD)
def test_every_kind_of_bad_record_is_told_where_a_job_is_posted(corpus: str, num_before: int, tmp_path: Path) -> None:
    good = json.dumps(GOOD[corpus]).encode()
    assert len(good) * FILLING > CHECK_BYTES
    bad = BAD[corpus]
    path = written(tmp_path / "data" / "a.jsonl", *[good] * num_before, *bad, good, *bad * 3)
    problems = look(spec_of(corpus, path), tmp_path)
    places = [f"{path}, line {num_before + 1 + at}" for at in range(len(bad))]
    told = [str(problem) for problem in problems]
    for place in places:
        assert sum(re.search(rf"{re.escape(place)}\b", each) is not None for each in told) == 1, (place, told)
    assert all("1 of 4 alike" in each for each in told[:-1])
    assert problems[-1].code == "bad_records"
    assert f"{4 * len(bad):,} unusable records among {num_before + 1 + 4 * len(bad):,}" in told[-1]


@pytest.mark.sample(2)
@pytest.mark.parametrize("corpus", BAD)
def test_bad_records_are_skipped_up_to_a_share(corpus: str, tmp_path: Path) -> None:
    good, bad = json.dumps(GOOD[corpus]).encode(), BAD[corpus]
    path = written(tmp_path / "data" / "a.jsonl", *[good] * 94, *bad)
    share = len(bad) / (94 + len(bad))
    enough = spec_of(corpus, path, on_bad="skip", max_bad_share=round(share + 0.001, 4))
    assert look(enough, tmp_path) == ()
    if corpus == "jsonl":
        reading = pairs.build(enough, None)
        assert len(list(reading.pairs())) == 94
        assert reading.facts()["bad"] == len(bad)
    else:
        stats = prepare(enough, VOCABULARY, tmp_path / "cache", tokenizer_of("chatml")).stats
        assert stats["train"]["documents"] == 94
        assert stats["left_out"]["bad"] == len(bad)
    less = spec_of(corpus, path, on_bad="skip", max_bad_share=round(share - 0.001, 4))
    problems = look(less, tmp_path)
    assert problems[-1].path == "data.max_bad_share"
    assert problems[-1].value == less.max_bad_share
    with pytest.raises(SpecError) as error:
        list(
            pairs.build(less, None).pairs()
            if corpus == "jsonl"
            else build(less, None, tokenizer_of("chatml")).documents()
        )
    assert error.value.problems[-1].path == "data.max_bad_share"


@pytest.mark.slow
def test_what_a_template_refuses_is_skipped_likewise(tmp_path: Path) -> None:
    good, bad = {"messages": TURNS}, {"messages": [*TURNS, TURNS[1]]}
    rows = [json.dumps(bad if at in (3, 4, 17) else good).encode() for at in range(30)]
    written(tmp_path / "data" / "a.jsonl", *rows)
    problems = look(chat(tmp_path / "data"), tmp_path)
    assert problems == (), "chatml writes any order"

    def refusal(**fields: Any) -> tuple[Problem, ...]:
        try:
            check(chat(tmp_path / "data", **fields), [str(tmp_path)], tokenizer_of("mistral"))
        except SpecError as error:
            return error.problems
        return ()

    problems = refusal()
    assert problems[0].value == f"{tmp_path}/data/a.jsonl, line 4"
    assert "1 of 3 alike" in problems[0].rule
    assert refusal(on_bad="skip", max_bad_share=0.1) == ()
    assert refusal(on_bad="skip", max_bad_share=0.09)[-1].path == "data.max_bad_share"
    data = chat(tmp_path / "data", on_bad="skip", max_bad_share=0.1)
    found = prepare(data, VOCABULARY, tmp_path / "cache", tokenizer_of("mistral"))
    assert found.train.num_documents == 27
    assert found.stats["left_out"]["bad"] == 3


def test_rows_of_parquet_are_looked_at_likewise(tmp_path: Path) -> None:
    values = ["text", None, "more", None, None]
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), tmp_path / "a.parquet")
    problems = look(spec_of("documents", tmp_path / "a.parquet"), tmp_path)
    assert problems[0].value == f"{tmp_path}/a.parquet, row 2"
    assert "3 unusable records" in problems[-1].rule
    assert look(spec_of("documents", tmp_path / "a.parquet", on_bad="skip", max_bad_share=0.6), tmp_path) == ()
    column = pyarrow.array([TURNS, None, TURNS])
    (tmp_path / "chat").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"messages": column}), tmp_path / "chat" / "a.parquet")
    problems = look(chat(tmp_path / "chat"), tmp_path)
    assert problems[0].value == f"{tmp_path}/chat/a.parquet, row 2"


def test_a_bad_line_of_parallel_text_takes_its_translation_along(tmp_path: Path) -> None:
    written(tmp_path / "de", b"eins", b"\xff", b"drei")
    written(tmp_path / "en", b"one", b"two", b"three")
    files = ({"source": f"{tmp_path}/de", "target": f"{tmp_path}/en", "lang": "de"},)
    stop = ParallelTextSpec(corpus="text", files=files)
    assert look(stop, tmp_path)[0].value == f"{tmp_path}/de, line 2"
    skip = ParallelTextSpec(corpus="text", files=files, on_bad="skip", max_bad_share=0.5)
    assert look(skip, tmp_path) == ()
    whole = [pair for pair in pairs.build(skip, None).pairs() if pair.source and pair.target]
    assert [(pair.source, pair.target) for pair in whole] == [("eins", "one"), ("drei", "three")]


def test_what_is_told_is_bounded(tmp_path: Path) -> None:
    rows = [json.dumps({chr(97 + at % 26) * (1 + at % 50): 1}).encode() for at in range(5000)]
    kinds = [b'{"text": %s}' % value for value in (b"1", b"null", b"[]", b"{}", b"true")]
    path = written(tmp_path / "a.jsonl", *rows, *kinds * 500)
    problems = look(spec_of("documents", path), tmp_path)
    assert 1 < len(problems) <= MAX_KINDS + 2
    assert all(str(problem).count("line ") <= MAX_EXAMPLES + 2 for problem in problems)
    assert sum(len(str(problem)) for problem in problems) < 50_000


def test_what_is_never_skipped_changes_no_key(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", *[json.dumps(GOOD["documents"]).encode()] * 3)
    plain = prepare(spec_of("documents", path), VOCABULARY, tmp_path / "cache", tokenizer_of("chatml"))
    other = spec_of("documents", path, max_bad_share=0.3)
    assert prepare(other, VOCABULARY, tmp_path / "cache", tokenizer_of("chatml")).key == plain.key


def test_a_pass_ends_at_its_deadline_though_every_record_is_bad(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", *[b"{"] * 100)
    for corpus in ("documents", "jsonl", "chat"):
        data = spec_of(corpus, path)
        reading = pairs.build(data, None) if corpus == "jsonl" else build(data, None, tokenizer_of("chatml"))
        faults = Faults.from_spec(data, deadline=0.0)
        with pytest.raises(OutOfTime):
            list(reading.records(faults))
        assert faults.num_records == 0, "the first record read after the deadline ends the pass"


@pytest.mark.slow
def test_bad_records_do_not_stretch_what_a_check_reads(tmp_path: Path) -> None:
    num_lines = CHECK_BYTES // 2
    path = tmp_path / "data" / "a.jsonl"
    path.parent.mkdir()
    path.write_bytes(b"{[{[{[{\n" * num_lines)
    faults = Faults()
    assert not list(records(DataFile("data", Location("file", str(path))), faults, CHECK_BYTES))
    assert 0 < faults.num_records < num_lines


def test_a_line_without_end_is_read_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 5000 + b"\n" + b"y\n")
    place = Location("file", str(path))
    faults = Faults()
    lines = Lines(DataFile("data", place), 1000, max_line_bytes=100, faults=faults)
    assert list(lines) == [(1, "")]
    assert not lines.has_ended, "the rest of the line was not looked for"
    assert (faults.num_records, faults.num_bad) == (1, 1)
    lines = Lines(DataFile("data", place), max_line_bytes=100, faults=Faults())
    assert list(lines) == [(1, ""), (2, "y")]
    assert lines.has_ended


def test_bad_lines_of_parallel_text_count_once(tmp_path: Path) -> None:
    written(tmp_path / "de", *[b"\xff"] * 6, *[b"eins"] * 4)
    written(tmp_path / "en", *[b"one"] * 10)
    files = ({"source": f"{tmp_path}/de", "target": f"{tmp_path}/en", "lang": "de"},)
    faults = Faults()
    list(pairs.build(ParallelTextSpec(corpus="text", files=files), None).records(faults))
    assert (faults.num_bad, faults.num_records) == (6, 10)
    skip = ParallelTextSpec(corpus="text", files=files, on_bad="skip", max_bad_share=0.5)
    assert look(skip, tmp_path)[-1].path == "data.max_bad_share"
