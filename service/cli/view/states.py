"""Colours of job states."""

from rich.text import Text

STATE_STYLES = {
    "queued": "cyan", "starting": "cyan", "running": "green", "succeeded": "bold green", "failed": "bold red",
    "cancelled": "bold yellow", "recovering": "bold yellow", "pausing": "yellow", "paused": "bold yellow",
    "deleting": "dim",
}  # fmt: skip


def state(name: str) -> Text:
    return Text(name, STATE_STYLES.get(name, ""))
