"""Listings: one line per item, in columns cut or dropped on narrow terminals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

GAP = 2
ALWAYS_SHOWN = 0


@dataclass(frozen=True)
class Column:
    """One column of a listing."""

    label: str
    cells: Sequence[Text]
    can_shrink: int = ALWAYS_SHOWN
    """Order in which columns are dropped, highest first; 0: never dropped or cut."""
    min_width: int | None = None
    """Width down to which cells may be cut; None for identifiers and numbers."""
    right: bool = False

    @property
    def width(self) -> int:
        """Width at which nothing is cut."""
        return max(map(cell_len, (self.label, *(cell.plain for cell in self.cells))))

    @property
    def least_width(self) -> int:
        if self.min_width is None:
            return self.width
        return min(self.width, max(self.min_width, cell_len(self.label)))


def print_listing(columns: Sequence[Column], console: "Console", room: int | None) -> list[str]:
    """Print a header and rows, at most `room` cells wide if possible (None: uncut); returns the labels of dropped
    columns. Identifiers stay whole even if the terminal must wrap them."""
    widths = fit_columns(columns, room)
    visible_columns = [(column, widths[column.label]) for column in columns if column.label in widths]
    lines = [_line([_fit_cell(Text(column.label, "bold"), column, width) for column, width in visible_columns])]
    for row in range(max((len(column.cells) for column in columns), default=0)):
        lines.append(_line([_fit_cell(column.cells[row], column, width) for column, width in visible_columns]))
    console.print(Text("\n").join(lines), soft_wrap=True)
    return [column.label for column in columns if column.label not in widths]


def fit_columns(columns: Sequence[Column], room: int | None) -> dict[str, int]:
    """Widths of the visible columns, by label. Columns are dropped until the others fit at their least width; the
    remaining room goes to cut columns, those dropped last first."""
    if room is None:
        return {column.label: column.width for column in columns}
    visible_columns = list(columns)
    while _total([column.least_width for column in visible_columns]) > room:
        candidates = [column for column in visible_columns if column.can_shrink != ALWAYS_SHOWN]
        if not candidates:
            break
        visible_columns.remove(max(candidates, key=lambda column: column.can_shrink))
    spare = max(0, room - _total([column.least_width for column in visible_columns]))
    widths = {column.label: column.least_width for column in visible_columns}
    for column in sorted(visible_columns, key=lambda column: column.can_shrink):
        extra = min(spare, column.width - column.least_width)
        widths[column.label] += extra
        spare -= extra
    return widths


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * max(0, len(widths) - 1)


def _fit_cell(cell: Text, column: Column, width: int) -> Text:
    """The cell cut or padded to `width` terminal cells; CJK characters take two."""
    text = cell.copy()
    text.truncate(width, overflow="ellipsis")
    padding = width - cell_len(text.plain)
    if column.right:
        return Text.assemble(" " * padding, text)
    return Text.assemble(text, " " * padding)


def _line(cells: Sequence[Text]) -> Text:
    line = Text(" " * GAP).join(cells)
    line.rstrip()
    return line
