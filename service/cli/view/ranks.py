"""Ranks of a running job: activity, heartbeat age, GPU use."""

from collections import Counter
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from service.cli.view.amounts import duration, num_bytes
from service.cli.view.printable import printable

MAX_SHOWN = 16
OLD_S = 10.0
"""Heartbeat age that is highlighted; heartbeats are sent every 2 s."""


def rank_rows(run: dict[str, Any]) -> Table:
    """A row per rank; of many, those silent longest, then the first."""
    ranks = run["ranks"]
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(4 + any(rank.get("device") for rank in ranks)):
        table.add_column(overflow="fold")
    visible_ranks = sorted(_by_silence(ranks)[:MAX_SHOWN], key=lambda rank: int(rank["rank"]))
    for rank in visible_ranks:
        silence = Text(f"last seen {duration(rank['silent_s'])} ago", "yellow" if rank["silent_s"] >= OLD_S else "dim")
        doing = Text(f"{printable(rank['doing'])} for {duration(rank['for_s'])}")
        row: list[RenderableType] = [
            str(rank["rank"]),
            doing,
            silence,
            Text(printable(f"{rank['host']}:{rank['pid']}"), "dim"),
        ]
        if device := rank.get("device"):
            row.append(_device(device))
        table.add_row(*row)
    if (num_left := run["num_ranks"] - len(visible_ranks)) > 0:
        table.add_row("", Text(f"and {num_left:,} more", "dim"))
    if not ranks:
        table.add_row(Text("no rank is connected to the driver", "dim"))
    if run["silent_s"] >= OLD_S:
        driver = printable(f"process {run['pid']} on {run['host']}")
        table.add_row("", Text(f"as of {duration(run['silent_s'])} ago: the driver ({driver}) is silent", "yellow"))
    return table


def gpu_use(run: dict[str, Any]) -> str:
    """Use and memory of all GPUs together; "" without any."""
    devices = [rank["device"] for rank in run["ranks"] if rank.get("device")]
    if not devices:
        return ""
    used_bytes = max(device["memory_bytes"] for device in devices)
    parts = [f"{num_bytes(used_bytes)} of {num_bytes(devices[0]['memory_total_bytes'])} in use"]
    shares = [device["utilization"] for device in devices if device["utilization"] is not None]
    if shares:
        parts.insert(0, f"{sum(shares) / len(shares):.0%} busy")
    if len(devices) > 1:
        parts[-1] += " on the fullest"
        if shares:
            parts[0] += f" (least busy {min(shares):.0%})"
    return ", ".join(parts)


def describe_ranks(run: dict[str, Any]) -> Text | None:
    """One line: what most ranks do, and which are silent; None without ranks."""
    if not run["ranks"]:
        return None
    doing = Counter(printable(rank["doing"]) for rank in run["ranks"])
    line = Text(f"{run['num_ranks']:,} rank{'' if run['num_ranks'] == 1 else 's'}: ", "dim")
    line.append(", ".join(f"{words} ({count})" if len(doing) > 1 else words for words, count in doing.most_common(3)))
    if silent := [rank for rank in _by_silence(run["ranks"]) if rank["silent_s"] >= OLD_S]:
        silent_text = ", ".join(f"rank {rank['rank']} silent for {duration(rank['silent_s'])}" for rank in silent[:3])
        line.append(f"; {silent_text}" + (" and others" if len(silent) > 3 else ""), "yellow")
    if uses := gpu_use(run):
        line.append(f"; GPUs {uses}", "dim")
    return line


def _device(device: dict[str, Any]) -> str:
    memory = f"{num_bytes(device['memory_bytes'])} of {num_bytes(device['memory_total_bytes'])}"
    share = device["utilization"]
    return memory if share is None else f"{share:.0%}, {memory}"


def _by_silence(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(ranks, key=lambda rank: (rank["silent_s"] < OLD_S, -rank["silent_s"] // OLD_S, rank["rank"]))
