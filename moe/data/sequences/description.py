"""A prepared corpus of documents in words, for logs and reports."""

from collections.abc import Iterator
from typing import Any

from moe.data.conversations.conversation import NOTES

REASONS = {
    "empty": "only white space",
    "bad": "unusable records (data.on_bad: skip)",
    "not_utf8": "not UTF-8 text",
    "generated": "marked as generated",
    "too_large": "too large to be handwritten",
    "table": "data rather than source",
    "near_duplicate": "at least half of their lines in others",
    "held_out_near_duplicate": "held out, but with at least half of their lines in training",
}


def _learned_text(stats: dict[str, Any]) -> str:
    """Words for the learned part of conversations, and of documents beside them."""
    plain = f", and all of {', '.join(stats['plain_sources'])}" if stats.get("plain_sources") else ""
    return f"the assistant's, found by {stats['learned_by']}{plain}"


def _describe_sources(train: dict[str, Any]) -> Iterator[str]:
    """A line for each of several sources."""
    counts_by_source = train.get("counts_of", {})  # absent in folders of earlier releases
    if len(counts_by_source) < 2:
        return
    for name, counts in counts_by_source.items():
        targets = f", {counts['targets']:,} learned" if counts["targets"] != counts["tokens"] else ""
        yield f"  {name}: {counts['documents']:,} documents, {counts['tokens']:,} tokens{targets}"


def _describe_conversations(stats: dict[str, Any]) -> Iterator[str]:
    """Lines about conversations: those split into rows, remarks, keys not read, and the tokens that close answers."""
    counts = stats["written"]
    if counts["apart"]:
        yield (
            f"{counts['apart']:,} of {counts['conversations']:,} conversations are learned in "
            f"{counts['rows_apart']:,} rows, up to one per answer, since the chat template changes "
            "earlier answers when more messages follow"
        )
    yield from (f"{counts[name]:,} {words}" for name, words in NOTES.items() if counts[name])
    if stats["unread"]:
        yield f"ignored keys of records: {', '.join(map(repr, stats['unread']))[:400]}"
    if not stats["closed"] and stats["answers"]:
        yield "warning: no answer ends in a token that stops generation, so the model never learns to stop"
    elif stats["closers"]:
        yield f"answers end in tokens {stats['closers']}, which now also stop generation"


def _describe_stream(stats: dict[str, Any]) -> Iterator[str]:
    """Lines about a stream's files, and the held-out documents that were found at their beginnings."""
    held_out = stats["held_out"].values()
    for name, source in stats["stream"].items():
        yield (
            f"streams {name} from {source['files']:,} file{'' if source['files'] == 1 else 's'} of "
            f"{source['bytes'] / 1e6:,.1f} MB, about {source['text_bytes'] / 1e6:,.1f} MB of text"
        )
    yield (
        f"held out {sum(source_stats['documents'] for source_stats in held_out):,} documents "
        f"({sum(source_stats['bytes'] for source_stats in held_out) / 1e6:.1f} MB) at the beginnings of the files, in "
        f"{sum(stats['seconds'].values()):.1f} s"
    )


def describe(stats: dict[str, Any]) -> list[str]:
    """Lines about the documents that were read, left out and kept, from `PreparedSequences.stats`."""
    train, held_out = stats["train"], stats["held_out"].values()
    num_bytes = sum(source_stats["bytes"] for source_stats in held_out)
    files = f"{stats['files']:,} file{'' if stats['files'] == 1 else 's'}"
    if "stream" in stats:
        return [*_describe_stream(stats), *(_describe_conversations(stats) if "written" in stats else ())]
    lines = [
        f"prepared {train['documents']:,} documents for training ({train['bytes'] / 1e6:.1f} "
        f"MB) and {sum(source_stats['documents'] for source_stats in held_out):,} held out "
        f"({num_bytes / 1e6:.1f} MB), from {files}, in {sum(stats['seconds'].values()):.1f} s"
    ]
    lines += [f"  {count:,} left out: {REASONS[reason]}" for reason, count in stats["left_out"].items() if count]
    lines.append(
        f"{train['tokens']:,} tokens, {train['bytes'] / train['tokens']:.2f} bytes each, in "
        f"{train['rows']:,} sequences of {stats['max_tokens']}, with "
        f"{100 * train['waste']:.2f}% padding"
    )
    if "learned_by" not in stats:
        lines += _describe_sources(train)
    else:
        max_tokens = stats["max_tokens"] // stats["num_each"]
        lines[-1] = (
            f"{train['tokens']:,} tokens in {train['rows']:,} sequences of {stats['max_tokens']}, "
            f"with {100 * train['waste']:.2f}% padding"
        )
        lines.append(
            f"{train['targets']:,} of them are learned: {_learned_text(stats)}; "
            f"conversations truncated at {max_tokens} tokens: "
            f"{stats['cut']:,}, left out without an answer: {stats['nothing_left']:,}"
        )
        if "labels" in stats:
            labels = stats["labels"]
            lines.append(f"labels: {labels['desirable']:,} desirable answers, {labels['undesirable']:,} undesirable")
        lines += _describe_sources(train)
        lines += _describe_conversations(stats)
        if stats["alike"]:
            lines.append(f"pairs left out because their truncated answers are equal: {stats['alike']:,}")
    return lines
