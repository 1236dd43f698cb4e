"""A prepared corpus in words, for logs and reports."""

from typing import Any

from moe.data.pairs.cleaning import RULES


def describe(stats: dict[str, Any]) -> list[str]:
    """Lines about the pairs that were read, left out by each rule, and kept, from `PreparedPairs.stats`."""
    pairs, langs = stats["pairs"], stats["languages"]
    num_pairs = sum(pairs.values())
    lines = [f"{stats['read']:,} pairs read from {stats['files']:,} files, {num_pairs:,} kept"]
    lines += [f"  {count:,} left out: {RULES[rule]}" for rule, count in stats["dropped"].items() if count]
    if stats.get("bad"):
        lines.append(f"  {stats['bad']:,} left out: unusable (data.on_bad: skip)")
    if stats.get("unreadable"):
        lines.append(f"  {len(stats['unreadable']):,} unreadable catalogs")
    sizes = [sum(lang[part] for part in pairs) for lang in langs.values()]
    lines.append(
        f"{len(langs)} languages, {sum(size >= 500 for size in sizes)} of them with at least "
        f"500 pairs; {stats['distinct_targets']:,} distinct translations"
    )
    lines.append(
        f"{pairs['train']:,} pairs for training; held out: {pairs['unseen']:,} whose English is "
        f"in no language's training, {pairs['seen']:,} whose English is in another language's "
        "training"
    )
    tokens = stats["train_tokens"]
    lines.append(
        f"{tokens['source'] / max(1, pairs['train']):.1f} source and "
        f"{tokens['target'] / max(1, pairs['train']):.1f} target tokens per pair, "
        f"{tokens['source'] + tokens['target']:,} in all"
    )
    return lines
