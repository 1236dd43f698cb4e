"""Unusable records: all reported before a job is launched, or skipped up to a share."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from moe.data.corpus import CHECK_BYTES
from moe.data.data_file import DataFile
from moe.data.faults import MAX_EXAMPLES, MAX_KINDS, DeadlineExceeded, Faults
from moe.data.lines import Lines
from moe.data.locations import Location
from moe.data.pairs import corpora as pairs
from moe.data.sequences import check, prepare
from moe.data.sequences.conversation_reader import conversation_reader
from moe.data.sequences.corpora import build
from moe.spec import DocumentsSpec, JsonlSpec, ParallelTextSpec, Problem, SpecError
from tests.unit.chats import ANSWER, USER
from tests.unit.test_data_conversations import VOCABULARY, chat, tokenizer_of

FILLING = 40_000
"""Number of good records that are longer together than what is checked in the service's own process."""
BAD: dict[str, list[bytes]] = {
    "documents": [b"{", b"[1]", b'{"body": "x"}', b'{"text": 3}', b'{"text": "\xe9"}', b'{"text": null}'],
    "jsonl": [b"{", b"7", b'{"source": "x"}', b'{"source": 1, "target": "a", "lang": "de"}', b"\xff",
              b'{"source": "x", "target": "y", "lang": "?"}'],
    "chat": [b"{", b"null", b'{"messages": []}', b'{"messages": [{"role": "x", "content": "y"}]}', b'{"a": 1}',
             b"\xff"],
    "preference": [b"{", b'{"prompt": "q", "chosen": "a"}', b'{"prompt": "q", "chosen": "a", "rejected": "a"}',
                   b"\xff"],
    "unpaired_preference": [b"{", b'{"prompt": "q", "completion": "a"}',
                            b'{"prompt": "q", "completion": "a", "label": 1}', b'{"prompt": "q", "label": true}',
                            b'{"prompt": "q", "chosen": "a", "rejected": "b"}',
                            b'{"prompt": "q", "completion": "a", "label": true, "chosen": "a"}',
                            b'{"prompt": "q", "completion": "a", "label": true, "kto_tag": false}', b"\xff"],
}  # fmt: skip
GOOD: dict[str, Any] = {
    "documents": {"text": "some text " * 12},
    "jsonl": {"source": "Quelle " * 15, "target": "source " * 15, "lang": "de"},
    "chat": {"messages": [USER, {"role": "assistant", "content": "answer " * 15}]},
    "preference": {"prompt": "q " * 50, "chosen": "a", "rejected": "b"},
    "unpaired_preference": {"prompt": "q " * 50, "completion": "a", "label": False},
}


def spec_of(corpus: str, path: Path, **fields: Any) -> Any:
    if corpus == "documents":
        return DocumentsSpec(corpus="documents", sources=({"paths": (str(path),)},), **{"held_out": 0.0, **fields})
    if corpus == "jsonl":
        return JsonlSpec(corpus="jsonl", paths=(str(path),), **fields)
    return chat(path.parent, corpus=corpus, **fields)


def text_spec(folder: Path, **fields: Any) -> ParallelTextSpec:
    files = ({"source": f"{folder}/de", "target": f"{folder}/en", "lang": "de"},)
    return ParallelTextSpec(corpus="text", files=files, **fields)


def problems_of(data: Any, root: Path, template: str = "chatml") -> tuple[Problem, ...]:
    """Problems reported when a job with this data is posted."""
    try:
        if isinstance(data, JsonlSpec | ParallelTextSpec):
            pairs.check(data, [str(root)])
        else:
            check(data, [str(root)], tokenizer_of(template))
    except SpecError as error:
        return error.problems
    return ()


def corpus_of(data: Any) -> Any:
    is_pairs = isinstance(data, JsonlSpec | ParallelTextSpec)
    return pairs.build(data, None) if is_pairs else build(data, None, tokenizer_of("chatml"))


def write_lines(path: Path, *lines: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


@pytest.mark.sample(3)
@pytest.mark.parametrize("num_before", [1, FILLING], ids=["at once", "far behind"])
@pytest.mark.parametrize("corpus", BAD)
def test_every_kind_of_bad_record_is_reported_where_a_job_is_posted(
    corpus: str, num_before: int, tmp_path: Path
) -> None:
    good, bad = json.dumps(GOOD[corpus]).encode(), BAD[corpus]
    assert len(good) * FILLING > CHECK_BYTES
    path = write_lines(tmp_path / "data" / "a.jsonl", *[good] * num_before, *bad, good, *bad * 3)
    problems = problems_of(spec_of(corpus, path), tmp_path)
    messages = [str(problem) for problem in problems]
    for number in range(num_before + 1, num_before + 1 + len(bad)):
        place = rf"{re.escape(f'{path}, line {number}')}\b"
        assert sum(re.search(place, message) is not None for message in messages) == 1, (place, messages)
    assert all("1 of 4 such faults" in message for message in messages[:-1])
    assert problems[-1].code == "bad_records"
    assert f"{4 * len(bad):,} unusable records among {num_before + 1 + 4 * len(bad):,}" in messages[-1]


@pytest.mark.sample(2)
@pytest.mark.parametrize("corpus", BAD)
def test_bad_records_are_skipped_up_to_a_share(corpus: str, tmp_path: Path) -> None:
    good, bad = json.dumps(GOOD[corpus]).encode(), BAD[corpus]
    path = write_lines(tmp_path / "data" / "a.jsonl", *[good] * 94, *bad)
    share = len(bad) / (94 + len(bad))
    enough = spec_of(corpus, path, on_bad="skip", max_bad_share=round(share + 0.001, 4))
    assert problems_of(enough, tmp_path) == ()
    if corpus == "jsonl":
        reading = corpus_of(enough)
        assert (len(list(reading.pairs())), reading.facts()["bad"]) == (94, len(bad))
    else:
        stats = prepare(enough, VOCABULARY, tmp_path / "cache", tokenizer_of("chatml")).stats
        assert (stats["train"]["documents"], stats["left_out"]["bad"]) == (94, len(bad))
    less = spec_of(corpus, path, on_bad="skip", max_bad_share=round(share - 0.001, 4))
    with pytest.raises(SpecError) as error:
        list(corpus_of(less).pairs() if corpus == "jsonl" else corpus_of(less).documents())
    for problem in (problems_of(less, tmp_path)[-1], error.value.problems[-1]):
        assert (problem.path, problem.value) == ("data.max_bad_share", less.max_bad_share)


@pytest.mark.slow
def test_records_that_a_template_refuses_are_skipped_likewise(tmp_path: Path) -> None:
    rows = [{"messages": [USER, ANSWER, ANSWER] if index in (3, 4, 17) else [USER, ANSWER]} for index in range(30)]
    path = write_lines(tmp_path / "data" / "a.jsonl", *(json.dumps(row).encode() for row in rows))
    assert problems_of(chat(path.parent), tmp_path) == (), "chatml renders any order"
    problem = problems_of(chat(path.parent), tmp_path, "turns")[0]
    assert (problem.value, "1 of 3 such faults" in problem.rule) == (f"{path}, line 4", True)
    enough, less = (chat(path.parent, on_bad="skip", max_bad_share=share) for share in (0.1, 0.09))
    assert problems_of(enough, tmp_path, "turns") == ()
    assert problems_of(less, tmp_path, "turns")[-1].path == "data.max_bad_share"
    corpus = prepare(enough, VOCABULARY, tmp_path / "cache", tokenizer_of("turns"))
    assert (corpus.train.num_documents, corpus.stats["left_out"]["bad"]) == (27, 3)


@pytest.mark.slow
def test_rows_of_parquet_are_checked_likewise(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["text", None, "more", None, None]}), path)
    with pytest.raises(SpecError) as error:
        list(corpus_of(spec_of("documents", path)).documents())
    for problems in (problems_of(spec_of("documents", path), tmp_path), error.value.problems):
        assert problems[0].value == f"{path}, row 2"
        assert "3 unusable records" in problems[-1].rule
    assert problems_of(spec_of("documents", path, on_bad="skip", max_bad_share=0.6), tmp_path) == ()
    (tmp_path / "chat").mkdir()
    column = pyarrow.array([[USER, ANSWER], None, [USER, ANSWER]])
    pyarrow.parquet.write_table(pyarrow.table({"messages": column}), tmp_path / "chat" / "a.parquet")
    assert problems_of(chat(tmp_path / "chat"), tmp_path)[0].value == f"{tmp_path}/chat/a.parquet, row 2"


def test_a_bad_line_of_parallel_text_removes_its_translation_and_counts_once(tmp_path: Path) -> None:
    write_lines(tmp_path / "de", b"eins", b"\xff", b"drei")
    write_lines(tmp_path / "en", b"one", b"two", b"three")
    assert problems_of(text_spec(tmp_path), tmp_path)[0].value == f"{tmp_path}/de, line 2"
    skip = text_spec(tmp_path, on_bad="skip", max_bad_share=0.5)
    assert problems_of(skip, tmp_path) == ()
    complete = [(pair.source, pair.target) for pair in corpus_of(skip).pairs() if pair.source and pair.target]
    assert complete == [("eins", "one"), ("drei", "three")]
    write_lines(tmp_path / "de", *[b"\xff"] * 6, *[b"eins"] * 4)
    write_lines(tmp_path / "en", *[b"one"] * 10)
    faults = Faults()
    list(corpus_of(text_spec(tmp_path)).records(faults))
    assert (faults.num_bad, faults.num_records) == (6, 10)
    assert problems_of(skip, tmp_path)[-1].path == "data.max_bad_share"


def test_reports_are_bounded(tmp_path: Path) -> None:
    rows = [json.dumps({chr(97 + index % 26) * (1 + index % 50): 1}).encode() for index in range(5000)]
    kinds = [b'{"text": %s}' % value for value in (b"1", b"null", b"[]", b"{}", b"true")]
    problems = problems_of(spec_of("documents", write_lines(tmp_path / "a.jsonl", *rows, *kinds * 500)), tmp_path)
    assert 1 < len(problems) <= MAX_KINDS + 2
    assert all(str(problem).count("line ") <= MAX_EXAMPLES + 2 for problem in problems)
    assert sum(len(str(problem)) for problem in problems) < 50_000


def test_a_share_without_skipping_changes_no_key(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", *[json.dumps(GOOD["documents"]).encode()] * 3)
    plain, variant = spec_of("documents", path), spec_of("documents", path, max_bad_share=0.3)
    first, second = (prepare(data, VOCABULARY, tmp_path / "c", tokenizer_of("chatml")).key for data in (plain, variant))
    assert first == second


@pytest.mark.parametrize("corpus", ["documents", "jsonl", "chat"])
def test_a_pass_ends_at_its_deadline_though_every_record_is_bad(corpus: str, tmp_path: Path) -> None:
    data = spec_of(corpus, write_lines(tmp_path / "a.jsonl", *[b"{"] * 100))
    faults = Faults.from_spec(data, deadline=0.0)
    with pytest.raises(DeadlineExceeded):
        list(corpus_of(data).records(faults))
    assert faults.num_records == 0, "the first record read after the deadline ends the pass"


@pytest.mark.slow
def test_bad_records_do_not_extend_what_a_check_reads(tmp_path: Path) -> None:
    num_lines, faults = CHECK_BYTES // 2, Faults()
    path = write_lines(tmp_path / "a.jsonl", *[b"{[{[{[{"] * num_lines)
    file = DataFile("data", Location("file", str(path)))
    assert not list(conversation_reader(file).records(file, faults, CHECK_BYTES))
    assert 0 < faults.num_records < num_lines


def test_a_line_without_end_is_read_up_to_the_limit(tmp_path: Path) -> None:
    file, faults = DataFile("data", Location("file", str(write_lines(tmp_path / "a.txt", b"x" * 5000, b"y")))), Faults()
    lines = Lines(file, 1000, max_line_bytes=100, faults=faults)
    assert list(lines) == [(1, "")]
    assert not lines.has_ended, "the rest of the line is not read"
    assert (faults.num_records, faults.num_bad) == (1, 1)
    lines = Lines(file, max_line_bytes=100, faults=Faults())
    assert (list(lines), lines.has_ended) == ([(1, ""), (2, "y")], True)
