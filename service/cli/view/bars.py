"""Text bar chart of expert loads, in eighths of a character cell."""

from collections.abc import Sequence

from rich.text import Text

EIGHTHS = " ▁▂▃▄▅▆▇█"
UNUSED = "×"
WIDEST_BAR = 5
LOW, HIGH = 0.5, 2.0
"""Loads between these multiples of an even share count as balanced."""


def load_bars(shares: Sequence[float], width: int, height: int) -> list[Text]:
    """`height` rows of at most `width` cells, top first. `shares`: multiples of an even share. With more experts
    than cells, a bar is the mean of neighbours."""
    shares = _bin_shares(shares, width)
    cells = width // max(1, len(shares))
    bar, gap = (min(cells - 1, WIDEST_BAR), 1) if cells >= 2 else (1, 0)
    tallest = max([*shares, 1e-9])
    rows = []
    for row in reversed(range(height)):
        text = Text(no_wrap=True)
        for share in shares:
            eighths = round(8 * height * share / tallest) - 8 * row
            mark = EIGHTHS[max(0, min(8, eighths))]
            if row == 0 and eighths <= 0:
                mark = UNUSED if share == 0 else EIGHTHS[1]
            text.append(mark * bar, style=_style(share))
            text.append(" " * gap)
        rows.append(text)
    return rows


def experts_per_bar(num_experts: int, width: int) -> int:
    """Experts per bar of a chart `width` cells wide."""
    return -(-num_experts // max(1, width))


def _bin_shares(shares: Sequence[float], width: int) -> list[float]:
    num_experts = experts_per_bar(len(shares), width)
    bins = [shares[first : first + num_experts] for first in range(0, len(shares), num_experts)]
    return [sum(members) / len(members) for members in bins]


def _style(share: float) -> str:
    if share == 0:
        return "bold red"
    return "green" if LOW <= share <= HIGH else "yellow"
