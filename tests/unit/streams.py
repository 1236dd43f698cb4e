"""Small streams for tests: files of documents, windows written in this process, and a slow obvious reference."""

import gzip
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe.data.conversations.template import ChatTemplate
from moe.data.draws import permutation, seeded_generator
from moe.data.sequences.packing import pack
from moe.data.sequences.stream import order
from moe.data.sequences.stream.builder import WindowBuilder
from moe.data.sequences.stream.order import WindowPosition
from moe.data.sequences.stream.plan import StreamPlan
from moe.data.sequences.stream.sampler import StreamSampler
from moe.data.sequences.stream.shards import ShardList
from moe.data.sequences.stream.window import PartitionReader
from moe.data.text import is_held_out
from moe.data.tokenizer import TextForm, Tokenizer
from moe.spec import JobSpec
from tests.unit.data_corpora import WORDS
from tests.unit.documents import job

TOKENIZER = Tokenizer.train([" ".join(WORDS)] * 3, 290, TextForm.DOCUMENTS)


def texts_of(name: str, num_documents: int, seed: int = 0, max_words: int = 40) -> list[str]:
    """Different documents of several lengths, some of them empty."""
    draws = random.Random(f"{name} {seed}")
    return [
        ""
        if draws.random() < 0.05
        else f"{name}:{index} " + " ".join(draws.choices(WORDS, k=draws.randint(1, max_words)))
        for index in range(num_documents)
    ]


def write_shards(folder: Path, name: str, texts_by_shard: Sequence[Sequence[str]]) -> str:
    """Write compressed JSON Lines files; return the pattern that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, texts in enumerate(texts_by_shard):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}-{index:03}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    return f"{folder}/{name}-*.jsonl.gz"


def stream_job(sources: list[dict[str, Any]], *, max_tokens: int = 16, rows: int = 8, **stream: Any) -> JobSpec:
    """A job on streamed sources, with a token group for each of the `rows` of a batch."""
    seed = stream.pop("seed", 0)
    stream = {"shuffle_bytes": 64 * max_tokens * stream.get("partitions", min(4, rows)), **stream}
    data = {"corpus": "documents", "sources": sources, "max_tokens": max_tokens, "held_out": 0.1, "stream": stream}
    return job(data, batch_tokens=rows * max_tokens, seed=seed)


def plan_of(spec: JobSpec) -> StreamPlan:
    return StreamPlan.of_job(spec, ShardList.of_spec(spec.data, None))


class LocalBuilder(WindowBuilder):
    """Writes each window when it is waited for, without a process, which would take half a second to start."""

    def __init__(
        self,
        plan: StreamPlan,
        waits_s: Sequence[float] = (),
        tokenizer: Tokenizer = TOKENIZER,
        template: ChatTemplate | None = None,
    ) -> None:
        self._plan, self._waits_s, self._tokenizer, self._template = plan, waits_s, tokenizer, template
        self._readers: dict[int, PartitionReader] = {}
        self._requests: dict[int, tuple[WindowPosition, Path]] = {}

    def request(self, partition: int, start: WindowPosition, folder: Path) -> None:
        assert partition not in self._requests
        self._requests[partition] = start, folder

    def wait(self, partition: int) -> WindowPosition:
        if partition not in self._readers:
            self._readers[partition] = PartitionReader(
                self._plan, partition, self._tokenizer, self._template, self._waits_s
            )
        return self._readers[partition].write_window(*self._requests.pop(partition))

    def close(self) -> None:
        self._requests.clear()


def sampler_of(plan: StreamPlan, folder: Path, groups: range | None = None) -> StreamSampler:
    return StreamSampler(plan, groups or range(plan.num_groups), folder / "windows", LocalBuilder(plan))


def reference(plan: StreamPlan, texts_by_source: list[list[list[str]]], num_steps: int) -> list[list[Any]]:
    """The global batches of the first steps, from documents in memory by source and shard: of each row its tokens,
    documents and labels, and its tokens by source."""
    partitions = [_rows_of_partition(plan, texts_by_source, partition) for partition in range(plan.num_partitions)]
    batches = []
    for _ in range(num_steps):
        rows = [
            next(partitions[plan.partition_of(group)])
            for group in range(plan.num_groups) for _ in range(plan.rows_per_group)
        ]  # fmt: skip
        batches.append(rows)
    return batches


def _rows_of_partition(plan: StreamPlan, texts_by_source: list[list[list[str]]], partition: int) -> Iterator[Any]:
    """(tokens, documents, labels, tokens by source) of the rows of a partition, one by one."""
    length = plan.data.max_tokens
    sources = [_documents(plan, index, texts, partition) for index, texts in enumerate(texts_by_source)]
    read = [0] * len(sources)
    window = 0
    while True:
        first_window, documents = window, list[tuple[int, list[int]]]()
        while not documents:
            window += 1
            for index, source in enumerate(sources):
                windows = sum([1 / 16, 1 / 8, 1 / 4, 1 / 2, *[1.0] * window][:window])
                while read[index] < int(windows * plan.window_bytes * plan.text_shares[index]):
                    text = next(source)
                    read[index] += len(text.encode())
                    ids = [TOKENIZER.bos_id, *TOKENIZER.encode(text), TOKENIZER.eos_id]
                    documents.append((index, ids))
        packing = pack(np.array([len(ids) - 1 for _, ids in documents]), length)
        rows = []
        for row in range(packing.num_rows):
            tokens, numbers, labels, counts = [0] * length, [-1] * length, [-1] * length, defaultdict(int)
            place = 0
            for number, piece in enumerate(range(packing.row_starts[row], packing.row_starts[row + 1])):
                source, ids = documents[packing.documents[piece]]
                for position in range(packing.starts[piece], packing.starts[piece] + packing.lengths[piece]):
                    tokens[place], numbers[place], labels[place] = ids[position], number, ids[position + 1]
                    counts[source] += 1
                    place += 1
            rows.append((tokens, numbers, labels, [counts[index] for index in range(len(sources))]))
        generator = seeded_generator(plan.seed, first_window, stream=order._DRAWS_OF_WINDOWS, substream=partition)
        for row in permutation(generator, len(rows)):
            yield rows[row]


def _documents(plan: StreamPlan, source: int, texts_by_shard: list[list[str]], partition: int) -> Iterator[str]:
    """Documents for training of one source in one partition, pass after pass."""
    num_strides = -(-plan.num_partitions // len(texts_by_shard))
    pieces = [(shard, stride) for shard in range(len(texts_by_shard)) for stride in range(num_strides)]
    number = pass_number = 0
    while True:
        generator = seeded_generator(plan.seed, pass_number, stream=order._DRAWS_OF_PASSES, substream=source)
        for index in permutation(generator, len(pieces)):
            shard, stride = pieces[index]
            if number % plan.num_partitions == partition:
                for text in texts_by_shard[shard][stride::num_strides]:
                    if text and not is_held_out(text, plan.data.held_out, b"shardyard held-out documents"):
                        yield text
            number += 1
        pass_number += 1
