"""The corpora `chat` and `preference`, from users' files to rows that are learned from."""

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.data.sequences import ModelTokenizer, PreparedSequences, SequenceSampler, SequenceStore, check, prepare
from moe.data.sequences.packing import pack_whole
from moe.parallel import Layout
from moe.spec import ChatSpec, PreferenceSpec, SpecError
from moe.tasks.batch_context import BatchContext
from moe.tasks.language import build_model
from moe.tasks.language.batches import SequencesBatch
from moe.tasks.language.loss import loss_of
from tests.grid import num_cases
from tests.parity.language_models import ATTENTIONS, language_model
from tests.refusals import refused
from tests.unit import chats
from tests.unit.chats import DATE, STRUCTURES
from tests.unit.documents import job
from tests.unit.published_templates import published

VOCABULARY = 480


def tokenizer_of(name: str) -> ModelTokenizer:
    return ModelTokenizer(chats.tokenizer_files(STRUCTURES[name].source), eos_id=1, bos_id=0)


def chat(folder: Path, *, corpus: str = "chat", **fields: Any) -> Any:
    kind = ChatSpec if corpus == "chat" else PreferenceSpec
    return kind(corpus=corpus, paths=(f"{folder}/*",), date=DATE.isoformat(), **{"held_out": 0.0, **fields})


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(data: Any, folder: Path, name: str = "chatml", **further: Any) -> PreparedSequences:
    return prepare(data, VOCABULARY, folder / "cache", tokenizer_of(name), **further)


def reading(name: str, row: dict[str, Any], most: int) -> tuple[list[int], list[int], list[int]]:
    """(ids read, labels, -1 where nothing is learned, all ids) of a conversation, from a plain reading."""
    pieces = STRUCTURES[name].read(row["messages"], row.get("tools"))
    text, learned = ("".join(piece for piece, _ in pieces), [is_learned for piece, is_learned in pieces for _ in piece])
    found = tokenizers.Tokenizer.from_str(chats.tokenizer_json()).encode(text, add_special_tokens=False)
    labels = [id if any(learned[a:b]) else -1 for id, (a, b) in zip(found.ids, found.offsets, strict=True)]
    return found.ids[:-1][:most], labels[1:][:most], found.ids


def pieces_of(store: SequenceStore) -> list[tuple[list[int], list[int]]]:
    """What is read and predicted of each document of each row."""
    found = []
    for tokens, documents, labels in zip(*store.rows(np.arange(store.num_rows)), strict=True):
        for number in range(documents.max() + 1):
            of = documents == number
            assert np.array_equal(np.flatnonzero(of), np.arange(of.argmax(), of.argmax() + of.sum())), "in one piece"
            found.append((tokens[of].tolist(), labels[of].tolist()))
        assert np.all(labels[documents < 0] == -1)
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", STRUCTURES)
def test_each_conversation_lies_whole_in_one_row_with_what_a_plain_reading_says(name: str, tmp_path: Path):
    rng = random.Random(f"rows of {name}")
    rows = [chats.conversation(rng, STRUCTURES[name]) for _ in range(num_cases(60))]
    write(tmp_path / "data" / "a.jsonl", rows[:7])
    write(tmp_path / "data" / "b.jsonl", rows[7:])
    for most in (1000, 90):
        found = prepared(chat(tmp_path / "data", max_tokens=most), tmp_path, name)
        expected, cut, nothing_left = [], 0, 0
        for row in rows:
            read, labels, ids = reading(name, row, most)
            cut += len(ids) - 1 > most
            nothing_left += not any(label >= 0 for label in labels)
            if any(label >= 0 for label in labels):
                expected.append((read, labels))
        assert sorted(pieces_of(found.train)) == sorted(expected)
        assert (found.stats["cut"], found.stats["nothing_left"]) == (cut, nothing_left)
        assert (most == 1000) == (cut == 0)
        assert found.train.num_targets == sum(label >= 0 for _, labels in expected for label in labels)
        assert found.train.num_documents == len(expected)
        labels = found.train.rows(range(found.train.num_rows)).labels
        assert np.array_equal(found.train.row_targets, (labels >= 0).sum(1))
        counts = np.bincount(labels[labels >= 0], minlength=VOCABULARY)
        assert np.array_equal(found.train.label_counts(VOCABULARY), counts)


@pytest.mark.slow
def test_parquet_holds_the_same_as_lines(tmp_path: Path):
    rng = random.Random(3)
    rows = [chats.conversation(rng, STRUCTURES["chatml"]) for _ in range(30)]
    called = [each for row in rows for each in row["messages"] if "tool_calls" in each]
    called[0]["tool_calls"][0]["function"]["arguments"]["day"] = "today"
    write(tmp_path / "lines" / "a.jsonl", rows)
    (tmp_path / "parquet").mkdir()
    table = pyarrow.Table.from_pylist([{"tools": None, **row} for row in rows])
    pyarrow.parquet.write_table(table, tmp_path / "parquet" / "a.parquet")
    check(chat(tmp_path / "parquet"), [str(tmp_path)], tokenizer_of("chatml"))
    lines, parquet = (prepared(chat(tmp_path / each, max_tokens=2000), tmp_path) for each in ("lines", "parquet"))
    assert pieces_of(lines.train) == pieces_of(parquet.train)


def pair(rng: random.Random) -> dict[str, Any]:
    row = chats.conversation(rng, STRUCTURES["gemma"])
    last = row["messages"].pop()
    return {"prompt": row["messages"], "chosen": [last], "rejected": [{**last, "content": last["content"] + " not"}]}


def test_both_answers_of_a_pair_lie_side_by_side_the_preferred_one_first(tmp_path: Path):
    rng = random.Random(5)
    rows = [pair(rng) for _ in range(40)]
    write(tmp_path / "data" / "a.jsonl", rows)
    found = prepared(chat(tmp_path / "data", corpus="preference", max_tokens=400), tmp_path, "gemma")
    assert found.train.num_each == 2
    pieces = pieces_of(found.train)
    expected = []
    for row in rows:
        both = []
        for key in ("chosen", "rejected"):
            read, labels, _ = reading("gemma", {"messages": [*row["prompt"], *row[key]]}, 200)
            given = [each for each in row["prompt"] if each["role"] == "assistant"]
            assert given or any(label >= 0 for label in labels)
            shown = "".join(text for text, _ in STRUCTURES["gemma"].read(row["prompt"], None))
            head = tokenizers.Tokenizer.from_str(chats.tokenizer_json()).encode(shown, add_special_tokens=False).ids
            both.append((read, [-1] * min(len(head), len(labels)) + labels[len(head) :]))
        expected.append(both)
    learned = [
        both for both in expected if both[0] != both[1] and all(any(each >= 0 for each in labels) for _, labels in both)
    ]
    assert sorted(zip(pieces[::2], pieces[1::2], strict=True)) == sorted(map(tuple, learned))
    documents = found.train.rows(range(found.train.num_rows)).documents
    assert np.array_equal(found.train.row_targets, (documents.max(1) + 1) // 2)
    assert found.train.num_documents == len(learned)
    spec = job({"corpus": "packages", "max_tokens": 400}, batch_tokens=800)
    batch = SequenceSampler(found.train, spec).batch(3)
    assert batch.num_targets == found.train.row_targets[batch.rows].sum()


def test_answers_to_the_same_are_held_out_together(tmp_path: Path):
    rows = [{"prompt": f"question {number // 4}", "completion": f"answer {number}"} for number in range(400)]
    write(tmp_path / "data" / "a.jsonl", rows)
    found = prepared(chat(tmp_path / "data", held_out=0.3), tmp_path)
    held_out = found.held_out["conversations"]
    assert 50 < held_out.num_documents < 200
    answers = {held_out.text(at).decode() for at in range(held_out.num_documents)}
    numbers = {int(text.removeprefix("answer ").removesuffix("<|im_end|>\n")) for text in answers}
    assert all({4 * (number // 4) + each for each in range(4)} <= numbers for number in numbers)
    tokenizer = tokenizers.Tokenizer.from_str(chats.tokenizer_json())
    asked = tokenizer.decode(held_out.beginning(0).tolist(), skip_special_tokens=False)
    assert asked.startswith("<|im_start|>user\nquestion ")
    assert asked.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert held_out.num_bytes == sum(len(held_out.text(at)) for at in range(held_out.num_documents))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(20, 60), st.sampled_from([1, 2]))
def test_nothing_is_cut_in_packing_and_what_belongs_together_stays_so(lengths: list[int], length: int, num_each: int):
    lengths = lengths * num_each if num_each == 2 else lengths
    length = max(length, 2 * max(lengths))
    found = pack_whole(np.array(lengths, np.int64), length, num_each)
    assert sorted(found.documents.tolist()) == list(range(len(lengths)))
    assert not found.starts.any()
    assert found.lengths.tolist() == [lengths[document] for document in found.documents]
    for first, stop in zip(found.row_starts[:-1], found.row_starts[1:], strict=True):
        documents = found.documents[first:stop].tolist()
        assert sum(lengths[document] for document in documents) <= length
        groups = [document // num_each for document in documents]
        assert documents == [group * num_each + at for group in groups[::num_each] for at in range(num_each)]
    # Best fit leaves no two rows that would go into one.
    filled = sorted(
        sum(found.lengths[first:stop]) for first, stop in zip(found.row_starts[:-1], found.row_starts[1:], strict=True)
    )
    assert len(filled) < 2 or filled[0] + filled[1] > length


@pytest.mark.sample(1)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_packed_conversations_are_learned_as_each_by_itself(attention: str, tmp_path: Path):
    rng = random.Random(attention)
    write(tmp_path / "data" / "a.jsonl", [chats.conversation(rng, STRUCTURES["chatml"]) for _ in range(12)])
    store = prepared(chat(tmp_path / "data", max_tokens=700), tmp_path).train
    assert max(store.rows(range(store.num_rows)).documents.max(1)) > 0
    spec = language_model(attention, router="softmax_topk", top_k=2, num_experts=4)
    spec = spec.model_copy(update={"vocab_size": VOCABULARY})
    model = build_model(spec, dtype=torch.float64)
    context, layout = BatchContext(training=False, rows_per_group=1), Layout.single()
    packed = loss_of(model, SequencesBatch.from_part(store.rows(range(store.num_rows)), context, layout))
    packed.objective.backward()
    together = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    total = 0.0
    for tokens, labels in pieces_of(store):
        each = SequencesBatch(torch.tensor([tokens]), torch.tensor([labels]), context)
        alone = loss_of(model, each)
        alone.objective.backward()
        total += float(alone.nll)
    assert float(packed.nll) == pytest.approx(total, rel=1e-11)
    for name, each in model.named_parameters():
        if name in together:
            torch.testing.assert_close(together[name], each.grad, rtol=1e-9, atol=1e-11, msg=name)


GOOD = {"prompt": "q", "completion": "a"}


@pytest.mark.parametrize(
    ("rows", "rule"),
    [
        ([GOOD, {"messages": [{"role": "user", "content": "q"}]}], r"a\.jsonl, line 2'\) has no message of the role"),
        ([GOOD, GOOD, {"messages": [{"role": "x", "content": "q"}]}], r"messages\[0\] with the unknown role 'x'"),
        ([GOOD, {"text": "x"}], r"line 2'\) has the keys 'text', but none of messages"),
        ([GOOD, {"messages": [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]}],
         r"line 2'\) has a conversation that the chat template of model.from refuses it: roles must take turns"),
    ],
)  # fmt: skip
def test_a_bad_record_is_told_with_file_and_line_before_anything_is_launched(
    rows: list[dict[str, Any]], rule: str, tmp_path: Path
):
    write(tmp_path / "data" / "a.jsonl", rows)
    for act in (
        lambda: check(chat(tmp_path / "data"), [str(tmp_path)], tokenizer_of("mistral")),
        lambda: prepared(chat(tmp_path / "data"), tmp_path, "mistral"),
    ):
        with pytest.raises(SpecError, match=r"data\.paths\[0\] \(=.*" + rule):
            act()


def test_what_json_can_write_and_text_cannot_hold_is_learned_or_refused(tmp_path: Path):
    write(tmp_path / "data" / "a.jsonl", [{"prompt": "q \ud800", "completion": "a \udc00 b"}])
    store = prepared(chat(tmp_path / "data", held_out=0.0), tmp_path).train
    (document,) = pieces_of(store)
    tokenizer = tokenizers.Tokenizer.from_str(chats.tokenizer_json())
    assert tokenizer.decode([id for id in document[1] if id >= 0]) == "a ? b\n"
    deep: Any = "x"
    for _ in range(sys.getrecursionlimit() - 60):
        deep = [deep]
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "tools": [deep]}
    (tmp_path / "data" / "a.jsonl").write_text(json.dumps(row) + "\n")
    with refused("invalid_syntax", "data.paths[0]"):
        prepared(chat(tmp_path / "data"), tmp_path)


def test_what_has_no_records_or_no_answers_is_refused(tmp_path: Path):
    write(tmp_path / "data" / "a.jsonl", [])
    with refused("empty", "data.paths[0]"):
        check(chat(tmp_path / "data"), [str(tmp_path)], tokenizer_of("chatml"))
    with refused("empty", "data.paths"):
        prepared(chat(tmp_path / "data"), tmp_path)
    write(tmp_path / "data" / "a.jsonl", [{"prompt": "a long question " * 20, "completion": "a"}])
    with refused("empty", "data", None):
        prepared(chat(tmp_path / "data", max_tokens=16), tmp_path)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"]}), tmp_path / "data" / "a.parquet")
    (tmp_path / "data" / "a.jsonl").unlink()
    with refused("missing", "data.paths[0]"):
        check(chat(tmp_path / "data"), [str(tmp_path)], tokenizer_of("chatml"))


def test_another_template_or_day_is_other_data(tmp_path: Path):
    write(tmp_path / "data" / "a.jsonl", [GOOD])
    keys = {
        prepared(chat(tmp_path / "data"), tmp_path, "llama").key,
        prepared(chat(tmp_path / "data"), tmp_path, "chatml").key,
        prepared(chat(tmp_path / "data").model_copy(update={"date": "2026-03-10"}), tmp_path, "llama").key,
    }
    assert len(keys) == 3
    assert prepared(chat(tmp_path / "data"), tmp_path, "llama").key in keys


def test_a_model_of_chats_is_told_what_it_learns(tmp_path: Path):
    said = []
    write(tmp_path / "data" / "a.jsonl", [GOOD] * 3)
    for name in ("chatml", "chatml, marked"):
        prepared(chat(tmp_path / "data"), tmp_path, name, report=said.append)
    told = "\n".join(said)
    assert "the assistant's, found by the text that each answer adds; conversations truncated at 512 tokens: 0" in told
    assert "the assistant's, found by the template's generation marks" in told


def test_what_is_written_otherwise_or_not_read_is_counted_and_said(tmp_path: Path):
    said: list[str] = []
    thinking = {"role": "assistant", "content": "a", "thinking": "t"}
    messages = [{"role": "user", "content": "q"}, thinking, {"role": "user", "content": "r"},
                {"role": "assistant", "content": "b"}]  # fmt: skip
    write(tmp_path / "data" / "a.jsonl", [{"messages": messages, "id": 1, "source": "x"}, GOOD])
    tokenizer = ModelTokenizer(chats.tokenizer_files(published("qwen3")), eos_id=1, bos_id=0)
    found = prepare(chat(tmp_path / "data"), VOCABULARY, tmp_path / "cache", tokenizer, report=said.append)
    assert found.train.num_documents == 3
    assert found.stats["written"] | {"thoughts": 0} == {
        "conversations": 2, "apart": 1, "rows_apart": 2,
        "thoughts": 0, "contents": 0, "openings": 0, "calls": 0}  # fmt: skip
    assert found.stats["unread"] == ["id", "source"]
    told = "\n".join(said)
    assert (
        "1 of 2 conversations are learned in 2 rows, up to one per answer, since "
        "the chat template changes earlier answers once more messages follow" in told
    )
    assert "ignored keys of records: 'id', 'source'" in told
    assert (found.stats["answers"], found.stats["closed"], found.stats["closers"]) == (3, 3, [4])
    assert found.ends == {1, 4}


def test_an_answer_of_a_pair_that_needs_several_rows_is_refused(tmp_path: Path):
    end = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
    row = {"prompt": "q", "chosen": [*end, {"role": "assistant", "content": "b"}], "rejected": "c"}
    write(tmp_path / "data" / "a.jsonl", [{"prompt": "q", "chosen": "b", "rejected": "c"}, row])
    tokenizer = ModelTokenizer(chats.tokenizer_files(published("qwen3")), eos_id=1, bos_id=0)
    with refused("unsupported", "data.paths[0]"):
        check(chat(tmp_path / "data", corpus="preference"), [str(tmp_path)], tokenizer)


def test_files_outside_the_roots_are_refused(tmp_path: Path):
    write(tmp_path / "data" / "a.jsonl", [GOOD])
    with tempfile.TemporaryDirectory() as other, refused("not_allowed", "data.paths[0]"):
        check(chat(tmp_path / "data"), [other], tokenizer_of("chatml"))


def test_pairs_that_are_alike_up_to_the_cut_are_left_out_and_counted(tmp_path: Path):
    same = {"prompt": "q", "chosen": "a " * 60 + "b", "rejected": "a " * 60 + "c"}
    said: list[str] = []
    write(tmp_path / "data" / "a.jsonl", [same, {"prompt": "q", "chosen": "b", "rejected": "c"}])
    found = prepared(chat(tmp_path / "data", corpus="preference", max_tokens=80), tmp_path, report=said.append)
    assert (found.train.num_documents, found.stats["alike"], found.stats["cut"]) == (1, 1, 1)
    assert "truncated at 40 tokens: 1, left out without an answer: 0" in "\n".join(said)
    assert "pairs left out because their truncated answers are equal: 1" in "\n".join(said)
