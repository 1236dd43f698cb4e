"""Rules of batches of sequences: what token groups and streams must hold."""

from collections.abc import Iterator

from moe.spec.data import DataSpec, StreamableSpec
from moe.spec.errors import Problem
from moe.spec.sequences import MAX_STREAM_POSITIONS, MIN_WINDOW_BYTES_PER_TOKEN
from moe.spec.train import TrainSpec


def problems_of_sequences(data: DataSpec, train: TrainSpec, group_tokens: int) -> list[Problem]:
    """Problems of token groups and batches that do not hold whole sequences."""
    max_tokens, batch_tokens = data.max_tokens, train.batch_tokens
    problems = []
    if group_tokens % max_tokens:
        problems.append(
            Problem("not_divisible", "model.moe.group_tokens", group_tokens,
                    f"must be a multiple of data.max_tokens (={max_tokens}), since groups hold whole sequences",
                    f"use {max_tokens * max(1, group_tokens // max_tokens)}")
        )  # fmt: skip
    if group_tokens == max_tokens and batch_tokens % max_tokens:
        problems.append(Problem("not_divisible", "train.batch_tokens", batch_tokens,
                                f"must be a multiple of data.max_tokens (={max_tokens})",
                                f"use {max_tokens * max(1, batch_tokens // max_tokens)}"))  # fmt: skip
    return problems


def problems_of_stream(data: DataSpec, num_groups: int) -> Iterator[Problem]:
    """Problems of a stream with more partitions than token groups, or windows that hold too few sequences."""
    if not isinstance(data, StreamableSpec) or (stream := data.stream) is None:
        return
    num_partitions = stream.num_partitions(num_groups)
    if num_partitions > num_groups:
        yield Problem("out_of_range", "data.stream.partitions", num_partitions,
                      f"must be at most the token groups of a batch (={num_groups})",
                      f"use {max(1, num_groups)} or less, or a larger train.batch_tokens")  # fmt: skip
        return
    if (num_positions := num_partitions * len(data.source_names)) > MAX_STREAM_POSITIONS:
        yield Problem("too_large", "data.stream.partitions", num_partitions,
                      f"times the number of sources must be at most {MAX_STREAM_POSITIONS}, not {num_positions}",
                      f"use {MAX_STREAM_POSITIONS // len(data.source_names)} or less")  # fmt: skip
    least = MIN_WINDOW_BYTES_PER_TOKEN * data.max_tokens * num_partitions
    if stream.shuffle_bytes is not None and stream.shuffle_bytes < least:
        yield Problem("out_of_range", "data.stream.shuffle_bytes", stream.shuffle_bytes,
                      f"must be at least {MIN_WINDOW_BYTES_PER_TOKEN} x data.max_tokens (={data.max_tokens}) x "
                      f"partitions (={num_partitions})", f"use {least} or more, or omit it")  # fmt: skip
