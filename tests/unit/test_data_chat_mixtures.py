"""Mixtures of conversations, with weights and with documents beside them, compared with a plain reading of each."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.data.sequences import PreparedSequences, SequenceSampler, SequenceStore, describe
from moe.data.sequences.corpora import build
from moe.data.sequences.packing import pack, pack_apart
from moe.spec import ChatSpec, PreferenceSpec, ProblemCode
from tests.refusals import expect_problem
from tests.unit import chats
from tests.unit.batch_laws import assert_function_of_step
from tests.unit.chats import STRUCTURES
from tests.unit.documents import job
from tests.unit.test_data_conversations import (
    GOOD,
    PLAIN,
    VOCABULARY,
    pieces_of,
    prepare_in,
    reading,
    tokenizer_of,
    write,
)

L = 160
Piece = tuple[list[int], list[int]]
"""(input ids, labels, -1 where nothing is learned)"""


class Mixture:
    """Two files of conversations and one of documents."""

    def __init__(self, folder: Path, seed: int = 0, num_rows: Sequence[int] = (25, 12, 18)) -> None:
        rng = random.Random(seed)
        self.folder, structure = folder, STRUCTURES["chatml"]
        self.chats = {
            name: [chats.conversation(rng, structure) for _ in range(number)]
            for name, number in zip(("big", "small"), num_rows, strict=False)
        }
        self.texts = [" ".join(chats.some_text(rng) for _ in range(rng.randrange(1, 30))) for _ in range(num_rows[2])]
        for name, rows in self.chats.items():
            write(folder / "data" / f"{name}.jsonl", rows)
        write(folder / "data" / "web.jsonl", [{"body": text} for text in self.texts])

    def spec(self, weights: Sequence[float] = (1.0, 1.0, 1.0), **fields: Any) -> ChatSpec:
        names = ("big", "small", "web")
        sources: list[dict[str, Any]] = [
            {"name": name, "paths": [f"{self.folder}/data/{name}.jsonl"], "weight": weight}
            for name, weight in zip(names, weights, strict=True)
        ]
        sources[2] |= {"corpus": "documents", "column": "body"}
        return ChatSpec(
            corpus="chat", sources=tuple(sources), max_tokens=L, **{"held_out": 0.0, "date": "2026-03-09", **fields}
        )

    def prepare(self, **fields: Any) -> PreparedSequences:
        return prepare_in(self.spec(**fields), self.folder)

    def conversations_of(self, name: str) -> list[Piece]:
        readings = [reading("chatml", row, L)[:2] for row in self.chats[name]]
        return [(ids, labels) for ids, labels in readings if any(label >= 0 for label in labels)]

    def document_ids(self, bos: int = 0, eos: int = 1) -> list[list[int]]:
        """Ids of each document; special tokens in it are plain text."""
        tokenizer = type(PLAIN).from_str(PLAIN.to_str())
        tokenizer.encode_special_tokens = True
        return [[bos, *tokenizer.encode(text, add_special_tokens=False).ids, eos] for text in self.texts]


def row_pieces(store: SequenceStore, rows: Sequence[int]) -> list[list[Piece]]:
    """Pieces of some rows, row by row."""
    pieces = []
    for tokens, documents, labels in zip(*store.rows(rows), strict=True):
        pieces.append([
            (tokens[documents == number].tolist(), labels[documents == number].tolist())
            for number in range(documents.max() + 1)
        ])  # fmt: skip
    return pieces


def is_plain(piece: Piece) -> bool:
    """Whether a piece is of a document: each of its labels is learned."""
    return all(label >= 0 for label in piece[1])


def assert_documents(pieces: Sequence[Piece], documents: Sequence[list[int]]) -> None:
    """Assert that pieces are documents, each whole or cut, every token of which is predicted once."""
    transitions = Counter(pair for ids, labels in pieces for pair in zip(ids, labels, strict=True))
    assert transitions == Counter(pair for ids in documents for pair in pairwise(ids))
    assert all(ids[1:] == labels[:-1] for ids, labels in pieces)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("packing", ["by_source", "together", "none"])
def test_rows_hold_the_conversations_and_documents_of_a_plain_reading(packing: str, seed: int, tmp_path: Path) -> None:
    mixture = Mixture(tmp_path, seed)
    corpus = mixture.prepare(packing=packing)
    train, conversations = corpus.train, {name: mixture.conversations_of(name) for name in ("big", "small")}
    expected = [piece for pieces in conversations.values() for piece in pieces]
    pieces = pieces_of(train)
    assert sorted(piece for piece in pieces if not is_plain(piece)) == sorted(expected)
    assert_documents([piece for piece in pieces if is_plain(piece)], mixture.document_ids())
    labels = train.rows(range(train.num_rows)).labels
    assert np.array_equal(train.row_targets, (labels >= 0).sum(1))
    assert train.num_targets == (labels >= 0).sum()
    assert np.array_equal(train.label_counts(VOCABULARY), np.bincount(labels[labels >= 0], minlength=VOCABULARY))
    rows = row_pieces(train, range(train.num_rows))
    if packing == "none":
        assert all(len(row) == 1 for row in rows)
    elif packing == "together":
        assert train.sources == ("together",)
        assert any({is_plain(piece) for piece in row} == {False, True} for row in rows)
    if packing != "together":
        assert train.sources == ("big", "small", "web")
        starts = train.source_rows
        by_source = [[piece for row in rows[a:b] for piece in row] for a, b in pairwise(starts)]
        assert sorted(by_source[0]) == sorted(conversations["big"])
        assert sorted(by_source[1]) == sorted(conversations["small"])
        assert all(map(is_plain, by_source[2]))
    counts = {
        name: {
            "documents": len(pieces), "tokens": sum(len(ids) for ids, _ in pieces),
            "targets": sum(label >= 0 for _, labels in pieces for label in labels),
        } for name, pieces in conversations.items()
    }  # fmt: skip
    num_tokens = sum(len(ids) - 1 for ids in mixture.document_ids())
    counts["web"] = {"documents": len(mixture.texts), "tokens": num_tokens, "targets": num_tokens}
    assert corpus.stats["train"]["counts_of"] == counts
    report = "\n".join(describe(corpus.stats))
    assert f"  web: {len(mixture.texts)} documents, {num_tokens:,} tokens\n" in report
    assert "the text that each answer adds, and all of web;" in report


@pytest.mark.slow
def test_sources_are_held_out_apart_and_documents_as_text(tmp_path: Path) -> None:
    mixture = Mixture(tmp_path, num_rows=(60, 60, 60))
    corpus = mixture.prepare(held_out=0.2, packing="together")
    assert tuple(corpus.held_out) == mixture.spec(held_out=0.2).held_out_sets == ("big", "small", "web")
    web = corpus.held_out["web"]
    held_out_texts = [text.decode() for text in web.texts()]
    assert 0 < len(held_out_texts) < 60
    assert set(held_out_texts) < set(mixture.texts)
    assert not web.has_spans
    rows = web.rows(range(web.num_rows))
    assert np.array_equal(rows.labels >= 0, rows.documents >= 0)
    assert all(corpus.held_out[name].has_spans for name in ("big", "small"))
    held_out = sum(store.num_documents for store in corpus.held_out.values())
    nothing_left = corpus.stats["nothing_left"]
    assert corpus.train.num_documents + held_out + nothing_left == 180


@pytest.mark.slow
def test_one_source_is_prepared_like_its_paths(tmp_path: Path) -> None:
    mixture = Mixture(tmp_path)
    path = f"{tmp_path}/data/big.jsonl"
    fields: dict[str, Any] = {"corpus": "chat", "held_out": 0.1, "date": "2026-03-09", "max_tokens": L}
    plain = prepare_in(ChatSpec(paths=(path,), **fields), tmp_path)
    listed = prepare_in(ChatSpec(sources=({"paths": (path,)},), **fields), tmp_path)
    assert plain.train.sources == ("conversations",)
    assert listed.train.sources == ("source-1",)
    for plain_rows, listed_rows in zip(*(c.train.rows(range(c.train.num_rows)) for c in (plain, listed)), strict=True):
        assert np.array_equal(plain_rows, listed_rows)
    weighted = mixture.spec((3.0, 1.0, 0.5))
    assert prepare_in(weighted, tmp_path).folder == mixture.prepare().folder, "weights are no part of what is prepared"


@pytest.mark.sample(1)
@pytest.mark.parametrize("packing", ["by_source", "none"])
def test_a_source_comes_as_often_as_its_weight_says_and_steps_depend_on_the_seed_alone(
    packing: str, tmp_path: Path
) -> None:
    mixture, weights = Mixture(tmp_path), (2.0, 0.5, 1.25)
    data = mixture.spec(weights, packing=packing)
    store = prepare_in(data, tmp_path).train
    fields = data.model_dump(mode="json")

    def sampler(seed: int = 0) -> SequenceSampler:
        spec = job({"corpus": "packages", "max_tokens": L}, batch_tokens=4 * L, seed=seed)
        return SequenceSampler(store, spec.model_copy(update={"data": ChatSpec(**fields)}))

    order, num_epochs = [], 8
    for step in range(-(-sampler().epoch_start(num_epochs) // 4)):
        order += sampler().batch(step).rows.tolist()
    order = order[: sampler().epoch_start(num_epochs)]
    for start, end, weight in zip(store.source_rows[:-1], store.source_rows[1:], weights, strict=True):
        assert sum(start <= row < end for row in order) == int(num_epochs * weight * (end - start))
    assert_function_of_step(sampler, [0, 3, 10_000])
    assert sampler(1).batch(0).rows.tolist() != sampler().batch(0).rows.tolist()


@pytest.mark.slow
def test_preference_pairs_have_weights(tmp_path: Path) -> None:
    for name in "ab":
        pairs = [{"prompt": f"{name} {i}", "chosen": "yes", "rejected": "no"} for i in range(9)]
        write(tmp_path / "data" / f"{name}.jsonl", pairs)
    sources = [
        {"paths": [f"{tmp_path}/data/{name}.jsonl"], "weight": weight} for name, weight in (("a", 1.0), ("b", 3.0))
    ]
    data = PreferenceSpec(corpus="preference", sources=sources, max_tokens=L, held_out=0.0)
    corpus = prepare_in(data, tmp_path)
    assert data.source_weights == {"source-1": 1.0, "source-2": 3.0}
    assert corpus.train.sources == ("source-1", "source-2")
    assert [counts["documents"] for counts in corpus.stats["train"]["counts_of"].values()] == [9, 9]
    spec = job({"corpus": "packages", "max_tokens": L}, batch_tokens=4 * L).model_copy(update={"data": data})
    sampler = SequenceSampler(corpus.train, spec)
    a_rows, b_rows = np.diff(corpus.train.source_rows)
    assert sampler.epoch_start(1) == a_rows + 3 * b_rows


def test_a_source_without_records_or_files_of_its_own_is_refused(tmp_path: Path) -> None:
    mixture = Mixture(tmp_path)
    (tmp_path / "data" / "web.jsonl").write_text('{"body": " "}\n')
    with expect_problem("empty", "data.sources[2].paths"):
        list(build(mixture.spec(), None, tokenizer_of("chatml")).documents())
    write(tmp_path / "data" / "web.jsonl", [{"text": "a"}])
    with expect_problem("not_found", "data.sources[2].column", "body"):
        list(build(mixture.spec(), None, tokenizer_of("chatml")).documents())
    data = ChatSpec(
        corpus="chat", sources=[{"paths": [f"{tmp_path}/data/*"]}, {"paths": [f"{tmp_path}/data/big.jsonl"]}]
    )
    with expect_problem("duplicate", "data.sources[1].paths", None):
        list(build(data, None, tokenizer_of("chatml")).documents())


@pytest.mark.slow
def test_faults_of_all_sources_are_reported_together(tmp_path: Path) -> None:
    mixture = Mixture(tmp_path)
    write(tmp_path / "data" / "small.jsonl", [{"a": 1}, GOOD])
    with (tmp_path / "data" / "web.jsonl").open("a") as file:
        file.write(json.dumps({"body": 3}) + "\n")
    corpus = build(mixture.spec(), None, tokenizer_of("chatml"))
    with pytest.raises(Exception, match="2 unusable records") as error:
        list(corpus.documents())
    paths = [problem.path for problem in error.value.problems]  # type: ignore[attr-defined]
    assert paths == ["data.sources[1].paths[0]", "data.sources[2].paths[0]", "data"]
    skipping = mixture.spec(on_bad="skip", max_bad_share=0.1)
    assert prepare_in(skipping, tmp_path).stats["left_out"] == {"bad": 2, "empty": 0}


@given(st.lists(st.integers(1, 200), max_size=40), st.integers(2, 64))
def test_documents_are_packed_apart_or_cut_only_where_they_must_be(document_lengths: list[int], length: int) -> None:
    lengths = np.array(document_lengths, np.int64)
    min_pieces = [-(-size // length) for size in document_lengths]
    for packing in (pack_apart(lengths, length), pack(lengths, length, cuts_to_fill=False)):
        positions = Counter(
            (document, start + place)
            for document, start, size in zip(packing.documents, packing.starts, packing.lengths, strict=True)
            for place in range(size)
        )
        assert positions == Counter((d, place) for d, size in enumerate(document_lengths) for place in range(size))
        assert np.bincount(packing.documents, minlength=len(lengths)).tolist() == min_pieces
        sizes = np.diff(np.concatenate([[0], np.cumsum(packing.lengths)])[packing.row_starts])
        assert all(0 < size <= length for size in sizes)
    assert pack_apart(lengths, length).num_rows == sum(min_pieces)


CHATS, WEB = {"paths": ["/a.jsonl"]}, {"corpus": "documents", "paths": ["/b.txt"]}


@pytest.mark.parametrize(
    ("fields", "code", "path"),
    [
        ({}, "missing", "paths"),
        ({"paths": ["/a.jsonl"], "sources": [CHATS]}, "not_applicable", "sources"),
        ({"dataset": "/a", "sources": [CHATS]}, "not_applicable", "sources"),
        ({"paths": ["/a.jsonl"], "split": "train"}, "not_applicable", "split"),
        ({"dataset": "/a/*"}, "invalid_value", "dataset"),
        ({"dataset": "/a", "split": "../b"}, "invalid_value", "split"),
        ({"sources": [WEB]}, "not_applicable", "sources"),
        ({"sources": [{**CHATS, "column": "x"}]}, "not_applicable", "sources[0].column"),
        ({"sources": [{**CHATS, "format": "jsonl"}]}, "not_applicable", "sources[0].format"),
        ({"sources": [CHATS, {**WEB, "paths": ["/b"]}]}, "missing", "sources[1].format"),
        ({"sources": [CHATS, {**WEB, "dataset": "/b"}]}, "not_applicable", "sources[1].dataset"),
        ({"sources": [CHATS, {"corpus": "documents", "dataset": "/b", "format": "arrow"}]}, "not_applicable",
         "sources[1].format"),
        ({"sources": [{**CHATS, "corpus": "preference"}]}, "not_a_choice", "sources[0].corpus"),
        ({"sources": [{**CHATS, "weight": 0.0}]}, "out_of_range", "sources[0].weight"),
        ({"sources": [{**CHATS, "name": "all"}]}, "duplicate", "sources[0].name"),
        ({"sources": [{**CHATS, "name": "source-2"}, CHATS]}, "duplicate", "sources[1].name"),
        ({"sources": [CHATS], "packing": "together"}, "requires", "packing"),
        ({"sources": [CHATS, {**WEB, "weight": 2.0}], "packing": "together"}, "not_applicable", "sources[1].weight"),
        ({"paths": ["/a.jsonl"], "packing": "whole"}, "not_a_choice", "packing"),
    ],
)  # fmt: skip
def test_wrong_mixtures_are_refused(fields: dict[str, Any], code: ProblemCode, path: str) -> None:
    with expect_problem(code, path):
        ChatSpec(corpus="chat", **fields)


@pytest.mark.parametrize("field", ["packing", "format", "column", "corpus"])
def test_preferences_have_no_documents_and_no_packing(field: str) -> None:
    value = {"packing": "none", "format": "jsonl", "column": "text", "corpus": "documents"}[field]
    fields = {field: value} if field == "packing" else {}
    sources = [{**CHATS, **({} if fields else {field: value})}]
    with expect_problem("unknown_key", "packing" if fields else f"sources[0].{field}", value):
        PreferenceSpec(corpus="preference", sources=sources, **fields)
