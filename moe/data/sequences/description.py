"""A prepared corpus of documents in words, for logs and reports."""

from typing import Any

REASONS = {
    "empty": "nothing in them but white space",
    "not_utf8": "not UTF-8 text",
    "generated": "say that they were generated",
    "too_large": "too large to be written by hand",
    "table": "data rather than source",
    "near_duplicate": "half of their lines or more in others",
    "held_out_near_duplicate": "held out, but half of their lines or more in what is trained on",
}


def describe(stats: dict[str, Any]) -> list[str]:
    """Lines that say what was read, what was left out, and what is left, from `PreparedSequences.stats`."""
    train, held_out = stats["train"], stats["held_out"]
    lines = [
        f"prepared {train['documents']:,} documents to train on ({train['bytes'] / 1e6:.1f} MB) and "
        f"{held_out.get('documents', 0):,} held out, of {stats['files']:,} files, in "
        f"{sum(stats['seconds'].values()):.1f} s"
    ]
    lines += [
        f"  {count:,} left out: {REASONS[reason]}" for reason, count in stats["left_out"].items() if count
    ]
    lines.append(
        f"{train['tokens']:,} tokens, {train['bytes'] / train['tokens']:.2f} bytes each, in {stats['rows']['train']:,} "
        f"sequences of {stats['max_tokens']}, of which {100 * stats['waste']['train']:.2f}% is padding"
    )
    return lines
