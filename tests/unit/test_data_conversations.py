"""The corpora `chat`, `preference` and `unpaired_preference`, from users' files to training rows."""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from moe.data.sequences import ModelTokenizer, PreparedSequences, SequenceSampler, SequenceStore, check, prepare
from moe.data.sequences.corpora import build
from moe.data.sequences.packing import pack_whole
from moe.spec import ChatSpec, PreferenceSpec, UnpairedPreferenceSpec
from tests.grid import num_cases
from tests.refusals import expect_problem
from tests.unit import chats
from tests.unit.chats import ANSWER, DATE, OTHER, STRUCTURES, TAKES_TURNS, USER
from tests.unit.documents import job
from tests.unit.published_templates import read_template

VOCABULARY = 480
GOOD = {"prompt": "q", "completion": "a"}
PLAIN = tokenizers.Tokenizer.from_str(chats.tokenizer_json())


def tokenizer_of(name: str) -> ModelTokenizer:
    """Tokenizer with a template of STRUCTURES, with TAKES_TURNS ("turns"), or with a published one."""
    source = STRUCTURES[name].source if name in STRUCTURES else TAKES_TURNS if name == "turns" else read_template(name)
    return ModelTokenizer(chats.tokenizer_files(source), eos_id=1, bos_id=0)


def chat(folder: Path, *, corpus: str = "chat", **fields: Any) -> Any:
    kinds = {"chat": ChatSpec, "preference": PreferenceSpec, "unpaired_preference": UnpairedPreferenceSpec}
    return kinds[corpus](corpus=corpus, paths=(f"{folder}/*",), date=DATE.isoformat(), **{"held_out": 0.0, **fields})


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write a file of records. Returns its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.parent


def prepare_in(data: Any, folder: Path, name: str = "chatml", **further: Any) -> PreparedSequences:
    return prepare(data, VOCABULARY, folder / "cache", tokenizer_of(name), **further)


def check_in(data: Any, folder: Path, name: str = "chatml") -> None:
    check(data, [str(folder)], tokenizer_of(name))


def reading(name: str, row: dict[str, Any], max_tokens: int) -> tuple[list[int], list[int], list[int]]:
    """(input ids, labels, -1 where nothing is learned, all ids) of a conversation, from a plain reading."""
    pieces = STRUCTURES[name].read(row["messages"], row.get("tools"))
    learned_chars = [is_learned for piece, is_learned in pieces for _ in piece]
    encoding = PLAIN.encode("".join(piece for piece, _ in pieces), add_special_tokens=False)
    labels = [id if any(learned_chars[a:b]) else -1 for id, (a, b) in zip(encoding.ids, encoding.offsets, strict=True)]
    return encoding.ids[:-1][:max_tokens], labels[1:][:max_tokens], encoding.ids


def pieces_of(store: SequenceStore) -> list[tuple[list[int], list[int]]]:
    """(input ids, labels) of each document of each row."""
    pieces = []
    for tokens, documents, labels in zip(*store.rows(np.arange(store.num_rows)), strict=True):
        for number in range(documents.max() + 1):
            is_own = documents == number
            first = is_own.argmax()
            assert np.array_equal(np.flatnonzero(is_own), np.arange(first, first + is_own.sum())), "in one piece"
            pieces.append((tokens[is_own].tolist(), labels[is_own].tolist()))
        assert np.all(labels[documents < 0] == -1)
    return pieces


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", STRUCTURES)
def test_each_conversation_is_whole_in_one_row_with_the_labels_of_a_plain_reading(name: str, tmp_path: Path):
    rng = random.Random(f"rows of {name}")
    rows = [chats.conversation(rng, STRUCTURES[name]) for _ in range(num_cases(60))]
    write(tmp_path / "data" / "a.jsonl", rows[:7])
    folder = write(tmp_path / "data" / "b.jsonl", rows[7:])
    for max_tokens in (1000, 90):
        corpus = prepare_in(chat(folder, max_tokens=max_tokens), tmp_path, name)
        readings = [reading(name, row, max_tokens) for row in rows]
        expected = [(read, labels) for read, labels, _ in readings if any(label >= 0 for label in labels)]
        cut = sum(len(ids) - 1 > max_tokens for _, _, ids in readings)
        assert sorted(pieces_of(corpus.train)) == sorted(expected)
        assert (corpus.stats["cut"], corpus.stats["nothing_left"]) == (cut, len(rows) - len(expected))
        assert (max_tokens == 1000) == (cut == 0)
        assert corpus.train.num_targets == sum(label >= 0 for _, labels in expected for label in labels)
        assert corpus.train.num_documents == len(expected)
        labels = corpus.train.rows(range(corpus.train.num_rows)).labels
        assert np.array_equal(corpus.train.row_targets, (labels >= 0).sum(1))
        counts = np.bincount(labels[labels >= 0], minlength=VOCABULARY)
        assert np.array_equal(corpus.train.label_counts(VOCABULARY), counts)


@pytest.mark.slow
def test_parquet_holds_the_same_as_lines(tmp_path: Path):
    rng = random.Random(3)
    rows = [chats.conversation(rng, STRUCTURES["chatml"]) for _ in range(30)]
    calling = next(message for row in rows for message in row["messages"] if "tool_calls" in message)
    calling["tool_calls"][0]["function"]["arguments"]["day"] = "today"
    write(tmp_path / "lines" / "a.jsonl", rows)
    (tmp_path / "parquet").mkdir()
    table = pyarrow.Table.from_pylist([{"tools": None, **row} for row in rows])
    pyarrow.parquet.write_table(table, tmp_path / "parquet" / "a.parquet")
    check_in(chat(tmp_path / "parquet"), tmp_path)
    lines, parquet = (prepare_in(chat(tmp_path / form, max_tokens=2000), tmp_path) for form in ("lines", "parquet"))
    assert pieces_of(lines.train) == pieces_of(parquet.train)


def random_pair(rng: random.Random) -> dict[str, Any]:
    prompt = chats.conversation(rng, STRUCTURES["llama"])["messages"]
    last = prompt.pop()
    return {"prompt": prompt, "chosen": [last], "rejected": [{**last, "content": last["content"] + " not"}]}


def test_both_answers_of_a_pair_are_neighbours_the_preferred_one_first(tmp_path: Path):
    rng = random.Random(5)
    rows = [random_pair(rng) for _ in range(40)]
    corpus = prepare_in(
        chat(write(tmp_path / "data" / "a.jsonl", rows), corpus="preference", max_tokens=600), tmp_path, "llama"
    )
    assert corpus.train.num_linked == 2
    expected = []
    for row in rows:
        pair = []
        prompt = "".join(text for text, _ in STRUCTURES["llama"].read(row["prompt"], None))
        num_prompt_ids = len(PLAIN.encode(prompt, add_special_tokens=False).ids)
        for key in ("chosen", "rejected"):
            read, labels, _ = reading("llama", {"messages": [*row["prompt"], *row[key]]}, 300)
            pair.append((read, [-1] * min(num_prompt_ids, len(labels)) + labels[num_prompt_ids:]))
        if pair[0] != pair[1] and all(any(label >= 0 for label in labels) for _, labels in pair):
            expected.append(tuple(pair))
    assert len(expected) > 20
    pieces = pieces_of(corpus.train)
    assert sorted(zip(pieces[::2], pieces[1::2], strict=True)) == sorted(expected)
    documents = corpus.train.rows(range(corpus.train.num_rows)).documents
    assert np.array_equal(corpus.train.row_targets, (documents.max(1) + 1) // 2)
    assert corpus.train.num_documents == len(expected)
    spec = job({"corpus": "packages", "max_tokens": 600}, batch_tokens=1200)
    batch = SequenceSampler(corpus.train, spec).batch(3)
    assert batch.num_targets == corpus.train.row_targets[batch.rows].sum()


def labelled(store: SequenceStore) -> list[tuple[list[int], list[int], bool]]:
    """(input ids, labels, whether it is desirable) of each document of each row."""
    rows = np.arange(store.num_rows)
    labels = store.desirable(rows)
    numbers = store.rows(rows).documents.max(1) + 1
    flags = [bool(label) for row, number in zip(labels, numbers, strict=True) for label in row[:number]]
    return [(*piece, flag) for piece, flag in zip(pieces_of(store), flags, strict=True)]


FORMS = ("prompt and completion", "messages", "Alpaca")


@pytest.mark.parametrize("kind", ["labelled", "pairs"])
def test_labelled_answers_of_every_form_are_the_same_documents(kind: str, tmp_path: Path) -> None:
    """Only the last answer is learned. Pairs become an answer of each label; labelled ones have each form in turn."""
    system, rows, expected = {"role": "system", "content": "s"}, [], []
    for number in range(30):
        earlier = [system, {**USER, "content": f"before {number}"}, {**ANSWER, "content": "earlier"}]
        question, answers = {**USER, "content": f"why {number}?"}, (f"since {number} is good", f"bad {number}")
        form = "pairs" if kind == "pairs" else FORMS[number % 3]
        prompt = [*earlier, question] if form != "Alpaca" else [question]
        both = kind == "pairs"
        for is_desirable in (True, False) if both else (number % 4 > 0,):
            answer = {**ANSWER, "content": answers[not is_desirable]}
            given = "".join(text for text, _ in STRUCTURES["llama"].read(prompt, None))
            read, labels, _ = reading("llama", {"messages": [*prompt, answer]}, 600)
            num_given = len(PLAIN.encode(given, add_special_tokens=False).ids)
            expected.append((read, [-1] * num_given + labels[num_given:], is_desirable))
            if not both:
                record = {
                    "prompt and completion": {"prompt": prompt, "completion": [answer], "label": is_desirable},
                    "messages": {"messages": [*prompt, answer], "label": is_desirable},
                    "Alpaca": {"instruction": question["content"], "output": answer["content"],
                               "kto_tag": is_desirable},
                }[form]  # fmt: skip
                rows.append(record)
        if both:
            rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    folder, report = write(tmp_path / "data" / "a.jsonl", rows), list[str]()
    data = chat(folder, corpus="unpaired_preference", max_tokens=600)
    corpus = prepare_in(data, tmp_path, "llama", report=report.append)
    assert sorted(labelled(corpus.train)) == sorted(expected)
    assert (corpus.train.num_linked, corpus.train.num_documents) == (1, len(expected))
    documents = corpus.train.rows(range(corpus.train.num_rows)).documents
    assert np.array_equal(corpus.train.row_targets, documents.max(1) + 1)
    num_desirable = sum(label for *_, label in expected)
    assert f"labels: {num_desirable} desirable answers, {len(expected) - num_desirable} undesirable" in report
    if kind == "pairs":
        order = [document.is_desirable for document in build(data, None, tokenizer_of("llama")).documents()]
        assert order == [True] * 30 + [False] * 30, "as in TRL"
    assert prepare_in(chat(folder, corpus="unpaired_preference", max_tokens=600, held_out=0.3), tmp_path,
                      "llama").held_out["conversations"].has_labels  # fmt: skip


def test_records_of_both_kinds_are_refused_with_their_place(tmp_path: Path) -> None:
    labelled_record = {"prompt": "q", "completion": "a", "label": True}
    pair = {"prompt": "q", "chosen": "b", "rejected": "c"}
    for first, second in ((labelled_record, pair), (pair, labelled_record)):
        folder = write(tmp_path / "data" / "a.jsonl", [first])
        write(folder / "b.jsonl", [first, second])
        for act in (check_in, prepare_in):
            with expect_problem("invalid_value", "data.paths[0]", f"{folder}/b.jsonl, line 2"):
                act(chat(folder, corpus="unpaired_preference"), tmp_path)


def test_answers_to_the_same_prompt_are_held_out_together(tmp_path: Path):
    rows = [{"prompt": f"question {number // 4}", "completion": f"answer {number}"} for number in range(400)]
    corpus = prepare_in(chat(write(tmp_path / "data" / "a.jsonl", rows), held_out=0.3), tmp_path)
    held_out = corpus.held_out["conversations"]
    assert 50 < held_out.num_documents < 200
    answers = [held_out.text(index).decode() for index in range(held_out.num_documents)]
    numbers = {int(text.removeprefix("answer ").removesuffix("<|im_end|>\n")) for text in answers}
    assert all({4 * (number // 4) + sibling for sibling in range(4)} <= numbers for number in numbers)
    prompt = PLAIN.decode(held_out.beginning(0).tolist(), skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>user\nquestion ")
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert held_out.num_bytes == sum(map(len, answers))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(20, 60), st.sampled_from([1, 2]))
def test_packing_cuts_nothing_and_keeps_pairs_together(lengths: list[int], length: int, num_linked: int):
    lengths = lengths * num_linked
    length = max(length, 2 * max(lengths))
    packing = pack_whole(np.array(lengths, np.int64), length, num_linked)
    assert sorted(packing.documents.tolist()) == list(range(len(lengths)))
    assert not packing.starts.any()
    assert packing.lengths.tolist() == [lengths[document] for document in packing.documents]
    row_lengths = []
    for first, stop in zip(packing.row_starts[:-1], packing.row_starts[1:], strict=True):
        documents = packing.documents[first:stop].tolist()
        row_lengths.append(sum(lengths[document] for document in documents))
        pairs = [document // num_linked for document in documents]
        assert documents == [pair * num_linked + member for pair in pairs[::num_linked] for member in range(num_linked)]
    # Best fit leaves no two rows that would fit into one.
    row_lengths.sort()
    assert row_lengths[-1] <= length
    assert len(row_lengths) < 2 or row_lengths[0] + row_lengths[1] > length


def test_a_record_that_the_template_refuses_is_named_with_its_line(tmp_path: Path):
    """Before a launch, and while the corpus is prepared. Other bad records: test_data_bad_records.py."""
    folder = write(tmp_path / "data" / "a.jsonl", [GOOD, {"messages": [ANSWER, OTHER]}])
    for act in (check_in, prepare_in):
        with expect_problem("unsupported", "data.paths[0]", f"{folder}/a.jsonl, line 2"):
            act(chat(folder), tmp_path, "turns")


def test_half_a_surrogate_pair_is_replaced_and_nesting_without_end_refused(tmp_path: Path):
    folder = write(tmp_path / "data" / "a.jsonl", [{"prompt": "q \ud800", "completion": "a \udc00 b"}])
    ((_, labels),) = pieces_of(prepare_in(chat(folder), tmp_path).train)
    assert PLAIN.decode([label for label in labels if label >= 0]) == "a ? b\n"
    deep: Any = "x"
    for _ in range(sys.getrecursionlimit() - 60):
        deep = [deep]
    (folder / "a.jsonl").write_text(json.dumps({"messages": [USER, ANSWER], "tools": [deep]}) + "\n")
    with expect_problem("invalid_syntax", "data.paths[0]"):
        prepare_in(chat(folder), tmp_path)


def test_what_has_no_records_or_no_answers_is_refused(tmp_path: Path):
    folder = write(tmp_path / "data" / "a.jsonl", [])
    with expect_problem("empty", "data.paths[0]"):
        check_in(chat(folder), tmp_path)
    with expect_problem("empty", "data.paths"):
        prepare_in(chat(folder), tmp_path)
    write(folder / "a.jsonl", [{"prompt": "a long question " * 20, "completion": "a"}])
    with expect_problem("empty", "data", None):
        prepare_in(chat(folder, max_tokens=16), tmp_path)
    with expect_problem("not_allowed", "data.paths[0]"):
        check_in(chat(folder), tmp_path / "elsewhere")
    (folder / "a.jsonl").unlink()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"]}), folder / "a.parquet")
    with expect_problem("missing", "data.paths[0]"):
        check_in(chat(folder), tmp_path)


@pytest.mark.slow
def test_the_key_follows_template_and_date_and_the_report_says_how_answers_are_found(tmp_path: Path):
    folder = write(tmp_path / "data" / "a.jsonl", [GOOD] * 3)
    report: list[str] = []
    keys = [prepare_in(chat(folder), tmp_path, name, report=report.append).key for name in ("llama", "chatml", "llama")]
    keys.append(prepare_in(chat(folder).model_copy(update={"date": "2026-03-10"}), tmp_path, "llama").key)
    assert (keys[0] == keys[2], len(set(keys))) == (True, 3)
    prepare_in(chat(folder), tmp_path, "chatml, marked", report=report.append)
    text = "\n".join(report)
    assert "the assistant's, found by the text that each answer adds; conversations truncated at 512 tokens: 0" in text
    assert "the assistant's, found by the template's generation marks" in text


def test_answers_in_rows_of_their_own_and_ignored_keys_are_counted_and_reported(tmp_path: Path):
    report: list[str] = []
    messages = [USER, {**ANSWER, "thinking": "t"}, USER, OTHER]
    folder = write(tmp_path / "data" / "a.jsonl", [{"messages": messages, "id": 1, "source": "x"}, GOOD])
    corpus = prepare_in(chat(folder), tmp_path, "qwen3", report=report.append)
    assert corpus.train.num_documents == 3
    assert corpus.stats["written"] | {"thoughts": 0} == {
        "conversations": 2, "apart": 1, "rows_apart": 2, "thoughts": 0, "contents": 0, "openings": 0, "calls": 0,
    }  # fmt: skip
    assert corpus.stats["unread"] == ["id", "source"]
    text = "\n".join(report)
    assert "1 of 2 conversations are learned in 2 rows" in text
    assert "ignored keys of records: 'id', 'source'" in text
    assert (corpus.stats["answers"], corpus.stats["closed"], corpus.stats["closers"]) == (3, 3, [4])
    assert corpus.ends == {1, 4}
    pair = {"prompt": "q", "chosen": [ANSWER, USER, OTHER], "rejected": "c"}
    write(folder / "a.jsonl", [{"prompt": "q", "chosen": "b", "rejected": "c"}, pair])
    with expect_problem("unsupported", "data.paths[0]"):  # its first answer needs a row of its own
        check_in(chat(folder, corpus="preference"), tmp_path, "qwen3")


def test_pairs_with_equal_truncated_answers_are_left_out_and_counted(tmp_path: Path):
    pair = {"prompt": "q", "chosen": "a " * 60 + "b", "rejected": "a " * 60 + "c"}
    report: list[str] = []
    folder = write(tmp_path / "data" / "a.jsonl", [pair, {"prompt": "q", "chosen": "b", "rejected": "c"}])
    corpus = prepare_in(chat(folder, corpus="preference", max_tokens=80), tmp_path, report=report.append)
    assert (corpus.train.num_documents, corpus.stats["alike"], corpus.stats["cut"]) == (1, 1, 1)
    text = "\n".join(report)
    assert "truncated at 40 tokens: 1, left out without an answer: 0" in text
    assert "pairs left out because their truncated answers are equal: 1" in text
