"""Facts that determine the rows of a stream."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from moe.data.sequences.stream.shards import ShardList
from moe.spec import ChatSpec, JobSpec, StreamableSpec, stream_of
from moe.spec.sequences import MIN_WINDOW_BYTES_PER_TOKEN

_STREAMABLE: TypeAdapter[StreamableSpec] = TypeAdapter(Annotated[StreamableSpec, Field(discriminator="corpus")])
_NUM_SHORT = 4
"""Windows at the beginning of a partition that are shorter than others."""


@dataclass(frozen=True)
class StreamPlan:
    """Shards, partitions and windows of a job's stream."""

    data: StreamableSpec
    shards: ShardList
    seed: int
    num_partitions: int
    num_groups: int
    """Token groups of a batch."""
    rows_per_group: int
    window_bytes: int
    """Bytes of text in a window of one partition; at most its part of one pass."""

    @classmethod
    def of_job(cls, spec: JobSpec, shards: ShardList) -> "StreamPlan":
        data = spec.data
        assert isinstance(data, StreamableSpec)
        stream = stream_of(data)
        assert stream is not None
        num_partitions = stream.num_partitions(spec.num_groups)
        window_bytes = stream.window_bytes(data.max_tokens, num_partitions)
        # A window longer than a pass would hold documents several times.
        pass_bytes = round(sum(source.num_bytes * source.text_per_byte for source in shards.sources)) // num_partitions
        return cls(
            data=data,
            shards=shards,
            seed=spec.train.seed,
            num_partitions=num_partitions,
            num_groups=spec.num_groups,
            rows_per_group=spec.group_tokens // data.max_tokens,
            window_bytes=min(window_bytes, max(pass_bytes, MIN_WINDOW_BYTES_PER_TOKEN * data.max_tokens)),
        )

    @cached_property
    def text_shares(self) -> tuple[float, ...]:
        """Share of each source in the text: its weight times its estimated text, by the sum over all sources."""
        texts = [
            weight * source.text_per_byte * max(1, source.num_bytes)
            for weight, source in zip(self.data.source_weights.values(), self.shards.sources, strict=True)
        ]
        total = fsum(texts)
        return tuple(text / total for text in texts)

    @cached_property
    def key(self) -> str:
        """Hash of what a position depends on: positions are those of streams with the same key only."""
        facts = [self.shards.fingerprint(), self.seed, self.num_partitions, self.window_bytes, self.text_shares,
                 self.data.max_tokens, self.data.held_out,
                 *([self.data.packing] if isinstance(self.data, ChatSpec) else [])]  # fmt: skip
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    def text_bytes(self, source: int, num_windows: int) -> int:
        """Bytes of text of a source that the first windows of a partition hold. The first ones are shorter, a sixteenth
        of a window and then twice as much each, so that training starts early."""
        sixteenths = 2 ** min(num_windows, _NUM_SHORT) - 1 + 16 * max(0, num_windows - _NUM_SHORT)
        return int(sixteenths * self.window_bytes * self.text_shares[source] / 16)

    def partition_of(self, group: int) -> int:
        """Partition that the rows of a token group come from."""
        return group * self.num_partitions // self.num_groups

    def groups_of(self, partition: int) -> range:
        """Token groups of a partition; at least one."""
        first, stop = (-(-number * self.num_groups // self.num_partitions) for number in (partition, partition + 1))
        return range(first, stop)

    def rows_per_step(self, partition: int) -> int:
        """Rows that every step takes from a partition."""
        return len(self.groups_of(partition)) * self.rows_per_group

    def to_plain(self) -> dict[str, Any]:
        """The plan as JSON, for the process that reads the stream; the shards apart."""
        return {
            "data": self.data.model_dump(mode="json"), "seed": self.seed, "num_partitions": self.num_partitions,
            "num_groups": self.num_groups, "rows_per_group": self.rows_per_group, "window_bytes": self.window_bytes,
        }  # fmt: skip

    @classmethod
    def of_plain(cls, plain: dict[str, Any], shards: bytes, roots: Sequence[str] | None) -> "StreamPlan":
        """The plan that `to_plain` wrote. Raises SpecError if a shard is gone."""
        data = _STREAMABLE.validate_python(plain["data"])
        return cls(**{**plain, "data": data}, shards=ShardList.from_bytes(shards, roots))
