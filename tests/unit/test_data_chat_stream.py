"""Streams of conversations, with documents beside them: the batches of a slow reading, for any ranks and from any
position; and unusable records."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe.data.conversations import rendering, template
from moe.data.conversations.records import conversation_of
from moe.data.draws import permutation, seeded_generator
from moe.data.sequences import PreparedSequences, check, prepare, prepared
from moe.data.sequences.packing import Packing, pack, pack_apart, pack_whole
from moe.data.sequences.stream import order, sample
from moe.data.sequences.stream.builder import prepared_template
from moe.data.sequences.stream.builder_process import BuilderProcess
from moe.data.sequences.stream.plan import StreamPlan
from moe.data.sequences.stream.sampler import StreamRows, StreamSampler
from moe.data.sequences.stream.shards import ShardList
from moe.data.text import is_held_out
from moe.spec import ChatSpec
from tests.refusals import expect_problem
from tests.unit import chats
from tests.unit.chats import STRUCTURES
from tests.unit.documents import job
from tests.unit.streams import LocalBuilder
from tests.unit.test_data_conversations import GOOD, PLAIN, VOCABULARY, reading, tokenizer_of, write

L, ROWS = 96, 6
Piece = tuple[list[int], list[int]]
"""(input ids, labels, -1 where nothing is learned)"""


@dataclass
class Corpus:
    """Records by source and shard: two sources of conversations, and one of documents."""

    folder: Path
    seed: int = 0
    num_shards: Sequence[int] = (3, 1, 2)
    weights: Sequence[float] = (1.0, 2.0, 0.5)
    fields: dict[str, Any] = field(default_factory=dict)
    stream: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.records: list[list[list[dict[str, Any]]]] = [
            [[self._record(rng, index) for _ in range(rng.randrange(12, 30))] for _ in range(number)]
            for index, number in enumerate(self.num_shards)
        ]
        for index, shards in enumerate(self.records):
            for number, rows in enumerate(shards):
                write(self.folder / "data" / f"{index}-{number}.jsonl", rows)

    @staticmethod
    def _record(rng: random.Random, index: int) -> dict[str, Any]:
        if index < 2:
            return chats.conversation(rng, STRUCTURES["chatml"])
        return {"body": " ".join(chats.some_text(rng) for _ in range(rng.randrange(1, 30)))}

    @property
    def spec(self) -> ChatSpec:
        sources: list[dict[str, Any]] = [
            {"name": name, "paths": [f"{self.folder}/data/{index}-*.jsonl"], "weight": weight}
            for index, (name, weight) in enumerate(zip(("big", "small", "web"), self.weights, strict=False))
        ][: len(self.num_shards)]
        if len(sources) > 2:
            sources[2] |= {"corpus": "documents", "column": "body"}
        return ChatSpec.model_validate({
            "corpus": "chat", "sources": sources, "max_tokens": L, "held_out": 0.2, "date": "2026-03-09",
            "stream": {"shuffle_bytes": 64 * L * self.stream.get("partitions", 4), **self.stream}, **self.fields,
        })  # fmt: skip

    def prepare(self) -> PreparedSequences:
        return prepare(self.spec, VOCABULARY, self.folder / "cache", tokenizer_of("chatml"))

    def plan(self, data: PreparedSequences) -> StreamPlan:
        packages = job({"corpus": "packages", "max_tokens": L}, batch_tokens=ROWS * L, seed=self.seed)
        assert data.shards is not None
        return StreamPlan.of_job(packages.model_copy(update={"data": self.spec}), data.shards)


def sampler_of(data: PreparedSequences, plan: StreamPlan, groups: range | None = None) -> StreamSampler:
    chat_template = prepared_template(plan.data, data.folder)
    builder = LocalBuilder(plan, tokenizer=data.tokenizer, template=chat_template)
    return StreamSampler(plan, groups or range(ROWS), data.folder.parent / "windows", builder)


def records_of(plan: StreamPlan, corpus: Corpus, index: int, partition: int) -> Iterator[tuple[Piece | None, int]]:
    """(piece, None if nothing of it is learned; bytes of text) of a source's records for training in a partition, pass
    after pass."""
    shards = corpus.records[index]
    num_strides = -(-plan.num_partitions // len(shards))
    pieces = [(shard, stride) for shard in range(len(shards)) for stride in range(num_strides)]
    number = pass_number = 0
    while True:
        generator = seeded_generator(plan.seed, pass_number, stream=order._DRAWS_OF_PASSES, substream=index)
        for piece in permutation(generator, len(pieces)):
            shard, stride = pieces[piece]
            if number % plan.num_partitions == partition:
                for record in shards[shard][stride::num_strides]:
                    yield from piece_of(record, plan.data.held_out)
            number += 1
        pass_number += 1


def piece_of(record: dict[str, Any], held_out: float) -> Iterator[tuple[Piece | None, int]]:
    """The piece of a record, as of `records_of`; nothing if it is held out."""
    if "body" in record:
        if not is_held_out(record["body"], held_out, b"shardyard held-out documents"):
            plain = type(PLAIN).from_str(PLAIN.to_str())
            plain.encode_special_tokens = True
            ids = [0, *plain.encode(record["body"], add_special_tokens=False).ids, 1]
            yield (ids[:-1], ids[1:]), len(record["body"].encode())
        return
    conversation = conversation_of(record)
    prompt = json.dumps(conversation.messages[: conversation.first_answer], sort_keys=True)
    if not is_held_out(prompt, held_out, b"shardyard held-out conversations"):
        ids, labels, _ = reading("chatml", record, L)
        num_bytes = len(json.dumps([[conversation.messages, conversation.tools]], ensure_ascii=False).encode())
        yield ((ids, labels) if any(label >= 0 for label in labels) else None), num_bytes


def rows_of(plan: StreamPlan, corpus: Corpus, partition: int) -> Iterator[tuple[list[Piece], list[int]]]:
    """(pieces, tokens by source) of the rows of a partition."""
    sources = [records_of(plan, corpus, index, partition) for index in range(len(corpus.records))]
    num_read, window = [0] * len(sources), 0
    while True:
        first_window, documents = window, list[tuple[int, Piece]]()
        while not documents:
            window += 1
            for index, source in enumerate(sources):
                windows = sum([1 / 16, 1 / 8, 1 / 4, 1 / 2, *[1.0] * window][:window])
                while num_read[index] < int(windows * plan.window_bytes * plan.text_shares[index]):
                    piece, num_bytes = next(source)
                    num_read[index] += num_bytes
                    documents += [(index, piece)] if piece is not None else []
        rows = packed_rows(documents, plan.data)
        generator = seeded_generator(plan.seed, first_window, stream=order._DRAWS_OF_WINDOWS, substream=partition)
        for row in permutation(generator, len(rows)):
            yield rows[row]


def packed_rows(documents: list[tuple[int, Piece]], data: Any) -> list[tuple[list[Piece], list[int]]]:
    """Rows of a window, packed source by source or together."""
    groups: list[tuple[list[tuple[int, Piece]], Any]] = []
    if data.packing == "together":
        groups = [(documents, lambda lengths: pack(lengths, L, cuts_to_fill=False))]
    else:
        for index, source in enumerate(data.sources):
            own = [document for document in documents if document[0] == index]
            is_plain = source.corpus == "documents"
            way = pack_apart if data.packing == "none" else pack if is_plain else pack_whole
            groups.append((own, lambda lengths, way=way: way(lengths, L)))
    rows = []
    for own, way in groups:
        packing: Packing = way(np.array([len(ids) for _, (ids, _) in own], np.int64))
        for row in range(packing.num_rows):
            pieces, tokens = list[Piece](), [0] * len(data.sources)
            for piece in range(packing.row_starts[row], packing.row_starts[row + 1]):
                index, (ids, labels) = own[packing.documents[piece]]
                part = slice(packing.starts[piece], packing.starts[piece] + packing.lengths[piece])
                pieces.append((ids[part], labels[part]))
                tokens[index] += int(packing.lengths[piece])
            rows.append((pieces, tokens))
    return rows


def assert_rows(actual: StreamRows, expected: Sequence[tuple[list[Piece], list[int]]]) -> None:
    for tokens, documents, labels, (pieces, _) in zip(*actual.rows, expected, strict=True):
        numbers = range(documents.max() + 1)
        found = [(tokens[documents == number].tolist(), labels[documents == number].tolist()) for number in numbers]
        assert found == [(list(ids), list(piece_labels)) for ids, piece_labels in pieces]
        assert np.all(labels[documents < 0] == -1)
    assert actual.num_targets == sum(label >= 0 for pieces, _ in expected for _, labels in pieces for label in labels)
    assert actual.tokens_by_source.tolist() == np.sum([tokens for _, tokens in expected], 0).tolist()


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render in this process, and do not try the tokenizer in another: starting one takes a third of a second, and
    trying it seconds."""

    def answers(_module: str, request: bytes, **_limits: object) -> bytes:
        return json.dumps(rendering._answers(json.loads(request))).encode()

    monkeypatch.setattr(template, "run_limited", answers)
    monkeypatch.setattr(prepared, "require_usable", lambda *_arguments: None)


CASES = [("by_source", 4, 0), ("together", 1, 1), ("none", 3, 2)]


@pytest.mark.sample(1)
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(("packing", "partitions", "seed"), CASES)
def test_batches_are_those_of_a_slow_reading_on_any_ranks_and_from_any_step(
    packing: str, partitions: int, seed: int, tmp_path: Path
) -> None:
    draws = random.Random(seed)
    weights = (1.0, 1.0, 1.0) if packing == "together" else (1.0, 2.0, 0.5)
    corpus = Corpus(tmp_path, seed, weights=weights, fields={"packing": packing}, stream={"partitions": partitions})
    data = corpus.prepare()
    plan, num_steps = corpus.plan(data), 14
    partition_rows = [rows_of(plan, corpus, partition) for partition in range(partitions)]
    expected = [[next(partition_rows[plan.partition_of(group)]) for group in range(ROWS)] for _ in range(num_steps)]
    cut = draws.randrange(1, ROWS)
    for groups in (range(cut), range(cut, ROWS)):
        sampler = sampler_of(data, plan, groups)
        for step in range(num_steps):
            if draws.random() < 0.3:  # killed, and resumed
                positions = json.loads(json.dumps(sampler.positions(step)))
                sampler.close()
                sampler = sampler_of(data, plan, groups)
                sampler.seek(step, {int(number): position for number, position in positions.items()})
            assert_rows(sampler.batch(step), expected[step][groups.start : groups.stop])
        sampler.close()


@pytest.mark.usefixtures("in_process")
def test_the_background_process_renders_the_same_windows(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path, num_shards=(1,), weights=(1.0,), stream={"partitions": 1})
    data = corpus.prepare()
    plan = corpus.plan(data)
    local = sampler_of(data, plan)
    remote = StreamSampler(plan, range(ROWS), tmp_path / "own", BuilderProcess(plan, data.folder, None, 1))
    np.testing.assert_array_equal(remote.batch(0).rows.labels, local.batch(0).rows.labels)
    remote.close()
    local.close()


@pytest.mark.usefixtures("in_process")
def test_what_is_held_out_is_evaluated_and_not_trained(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    data = corpus.prepare()
    assert data.held_out.keys() == {"big", "small", "web"}
    assert sum(store.num_documents for store in data.held_out.values()) > 5
    expected = Corpus(tmp_path, fields={"stream": None}).prepare().held_out
    for name, store in data.held_out.items():
        assert sorted(store.texts()) == sorted(expected[name].texts()), "as without a stream"
    assert data.stats["learned_by"]
    assert data.stats["stream"].keys() == data.held_out.keys()


def course_of(corpus: Corpus, num_steps: int) -> list[Any]:
    data = corpus.prepare()
    sampler = sampler_of(data, corpus.plan(data))
    try:
        return [sampler.batch(step) for step in range(num_steps)]
    finally:
        sampler.close()


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(("share", "is_enough"), [(0.001, False), (0.2, True)])
def test_refused_and_unreadable_records_are_skipped_up_to_a_share(
    share: float, is_enough: bool, tmp_path: Path
) -> None:
    corpus = Corpus(tmp_path, num_shards=(2,), fields={"on_bad": "skip", "max_bad_share": share, "held_out": 0.0})
    refused = {"messages": [{"role": "assistant", "content": ""}, {"role": "user", "content": "a"}]}
    for number, rows in enumerate(corpus.records[0]):
        write(tmp_path / "data" / f"0-{number}.jsonl", [*rows, {"messages": []}, refused, GOOD])
    if is_enough:
        course_of(corpus, 6)
        return
    with expect_problem("bad_records", "data.max_bad_share", share):
        course_of(corpus, 6)


@pytest.mark.usefixtures("in_process")
def test_a_conversation_that_the_template_refuses_stops_a_stream_where_it_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the beginning of the file, which is all that is read before training."""
    monkeypatch.setattr(sample, "READ_BYTES", 2000)
    path = tmp_path / "data" / "0-0.jsonl"
    corpus = Corpus(tmp_path, num_shards=(1,), fields={"held_out": 0.0}, stream={"partitions": 1})
    rows = [{"prompt": f"{index} " + "q" * 50, "completion": "a" * 50} for index in range(40)]
    turns = [{"role": role, "content": "a"} for role in ("user", "user", "assistant")]
    write(path, [*rows, {"messages": turns}])
    data = prepare(corpus.spec, VOCABULARY, tmp_path / "cache", tokenizer_of("turns"))
    sampler = sampler_of(data, corpus.plan(data))
    with expect_problem("unsupported", "data.sources[0].paths[0]", f"{path}, line 41"):
        for step in range(40):
            sampler.batch(step)
    sampler.close()


@pytest.mark.usefixtures("in_process")
def test_a_stream_without_an_answer_that_fits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "READ_BYTES", 2000)
    corpus = Corpus(tmp_path, num_shards=(1,), fields={"held_out": 0.0}, stream={"partitions": 1})
    data = corpus.prepare()
    write(tmp_path / "data" / "0-0.jsonl", [{"prompt": "q" * 4 * L, "completion": "a"}] * 9)
    shards = ShardList.of_spec(corpus.spec, None)
    sampler = sampler_of(data, replace(corpus.plan(data), shards=shards))
    with expect_problem("empty", "data"):
        sampler.batch(0)
    sampler.close()


@pytest.mark.usefixtures("in_process")
def test_posting_reads_the_beginnings_of_files(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path, num_shards=(9, 1, 1))
    assert check(corpus.spec, [str(tmp_path)], tokenizer_of("chatml")) == ()
    path = tmp_path / "data" / "1-0.jsonl"
    path.write_text("{broken")
    with expect_problem("invalid_syntax", "data.sources[1].paths[0]", f"{path}, line 1"):
        check(corpus.spec, [str(tmp_path)], tokenizer_of("chatml"))
