"""Micro-batches of streamed sequences: one rank's part of each global batch."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from moe.data.sequences import PreparedSequences
from moe.data.sequences.stream.builder_process import BuilderProcess
from moe.data.sequences.stream.plan import StreamPlan
from moe.data.sequences.stream.sampler import StreamRows, StreamSampler
from moe.parallel import Layout, json_collectives
from moe.parallel.problems import distinct_problems
from moe.plan import Plan
from moe.routing import BatchCounts
from moe.spec import JobSpec, Problem, SpecError
from moe.tasks.language.batches import SequencesBatch, micro_batches_of
from moe.tasks.task import RankBatch, StreamedBatches

_NUM_STORED_STEPS = 4
"""Number of steps whose counts are stored, since batches are made ahead of the step that trains."""


class StreamedSequencesBatches(StreamedBatches[SequencesBatch]):
    """Batches of a stream.

    Each rank reads the partitions of its own token groups. Since the loss is divided by the labels of all ranks, every
    batch needs their counts: they are exchanged in a process group of its own, while the previous step trains.
    """

    def __init__(self, data: PreparedSequences, spec: JobSpec, plan: Plan, layout: Layout) -> None:
        assert data.shards is not None
        self._seed, self._options, self._layout = spec.train.seed, plan.options, layout
        self._plan = StreamPlan.of_job(spec, data.shards)
        self._group = dist.new_group(backend="gloo") if json_collectives.world_size() > 1 else None
        num_threads = max(1, min(spec.resources.cpus_per_worker, os.cpu_count() or 1))
        builder = BuilderProcess(self._plan, data.folder, data.roots, num_threads)
        own_groups = layout.local_groups(spec.num_groups)
        self._sampler = StreamSampler(self._plan, own_groups, data.folder.parent / "streams", builder)
        self._tokens = {0: self._no_tokens}
        """Tokens by source before each of the last steps."""

    @property
    def _no_tokens(self) -> NDArray[np.int64]:
        return np.zeros(len(self._plan.data.source_names), np.int64)

    def seek(self, step: int, position: Any) -> str | None:
        is_own = isinstance(position, Mapping) and position.get("key") == self._plan.key
        partitions = {int(number): place for number, place in position["partitions"].items()} if is_own else {}
        self._sampler.seek(step, partitions)
        self._tokens = {step: np.array(position["tokens"], np.int64) if is_own else self._no_tokens}
        if is_own or not step:
            return None
        return "the stream begins at its start, since that of the checkpoint has other files, seed or windows"

    def __call__(self, step: int) -> RankBatch[SequencesBatch]:
        problems, rows = list[Problem](), None
        try:
            rows = self._sampler.batch(step)
        except SpecError as error:
            problems = list(error.problems)
        num_targets, tokens = self._exchange(rows, problems)
        assert rows is not None
        total = self._tokens[step] + tokens
        self._tokens = {**dict(list(self._tokens.items())[1 - _NUM_STORED_STEPS :]), step + 1: total}
        num_groups, num_tokens = self._plan.num_groups, int(tokens.sum())
        counts = BatchCounts(num_groups, num_groups * self._plan.rows_per_group, num_tokens)
        micro_batches = micro_batches_of(rows.part, step, self._seed, counts, self._options, self._layout)
        source_tokens = dict(zip(self._plan.data.source_names, total.tolist(), strict=True))
        return RankBatch(step, micro_batches, num_targets, num_tokens, source_tokens)

    def position(self, step: int) -> Any:
        partitions: dict[str, Any] = {}
        for own_partitions in json_collectives.all_gather_json(self._sampler.positions(step)):
            partitions |= own_partitions
        return {"key": self._plan.key, "tokens": self._tokens[step].tolist(), "partitions": partitions}

    def close(self) -> None:
        self._sampler.close()
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def _exchange(self, rows: StreamRows | None, problems: list[Problem]) -> tuple[int, NDArray[np.int64]]:
        """(labels of the global batch, int64 [num_sources] its tokens by source). Raises SpecError on all ranks for the
        problems of any."""
        own = {
            "problems": [problem.to_dict() for problem in problems],
            "counts": [] if rows is None else [rows.num_targets, *rows.tokens_by_source.tolist()],
        }
        answers = json_collectives.all_gather_json(own, self._group)
        if all_problems := distinct_problems(answer["problems"] for answer in answers):
            raise SpecError(all_problems)
        # Ranks that differ in other axes than those of the data have the same rows.
        sums = np.array([answer["counts"] for answer in answers]).sum(0)
        counts, remainder = np.divmod(sums, self._layout.world_size // self._layout.data_ranks)
        assert not remainder.any()
        return int(counts[0]), counts[1:]
