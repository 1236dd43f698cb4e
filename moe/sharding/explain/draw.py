"""Pictures of plans as SVG, deterministic for the same plan."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from moe.plan.svg import (
    BLUES,
    GREENS,
    INK,
    LINE,
    MARGIN,
    MEMORY,
    OCHRES,
    PALE_INK,
    PAPER,
    RULE,
    WIDTH,
    Svg,
    text_width,
    truncate,
)
from moe.sharding.explain.cards import Arrow, Card, CardParameter, cards_of
from moe.sharding.explain.explain import (
    Plan,
    in_bytes,
    in_seconds,
    kind_in_words,
    memory_in_words,
    mesh_in_words,
    shape_in_words,
)
from moe.sharding.plan_records import of_words

_GAP, _BELOW = 22, 3
_NARROWEST, _WIDEST = 140, 256
_MOST_NAMED, _MOST_ARROWS = 12, 5
_THINNEST, _THICKEST = 2.0, 14.0
_DOUBLINGS = 12
"""Doublings of bytes from the thinnest arrow to the thickest; arrows with fewer bytes are as thin."""

_WHOLE = "#f3f5f7"
_AXES = (BLUES, OCHRES, GREENS)
"""Colours of each mesh axis: for dimensions 0, 1, and 2 or more; then a pale one as background of names."""


def draw_svg(plan: Plan) -> str:
    """SVG picture of a plan: modules from left to right in the order of use, repeated ones as one, with parameters
    coloured by placement; collectives as arrows whose thickness is the logarithm of their bytes, those of the forward
    pass above, those of the backward pass below; memory by kind."""
    cards = cards_of(plan)
    sheet = _Sheet(plan, [arrow.num_bytes for card in cards for arrow in card.arrows])
    y = _rows(sheet, cards, _legend(sheet, cards, _head(sheet)))
    return sheet.text(_memory(sheet, y) + MARGIN)


class _Sheet:
    """The picture while it is drawn."""

    def __init__(self, plan: Plan, sizes: Sequence[int]) -> None:
        self.plan, self.axes = plan, list(plan.mesh)
        self.max_bytes = max(sizes, default=1)
        svg = Svg(f"Plan of a module on {mesh_in_words(plan.mesh)}")
        self.add, self.write, self.text = svg.add, svg.write, svg.text

    def thickness(self, num_bytes: int) -> float:
        """Thickness of an arrow, which grows with the logarithm of the bytes."""
        share = 1 + math.log2(num_bytes / self.max_bytes) / _DOUBLINGS
        return _THINNEST + max(0.0, share) * (_THICKEST - _THINNEST)


def _head(sheet: _Sheet) -> float:
    plan = sheet.plan
    sheet.write(MARGIN, 34, f"{plan.num_devices:,} x {plan.cluster.device}, mesh: {mesh_in_words(plan.mesh)}", 18,
                font_weight="bold")  # fmt: skip
    num_bytes = sum(collective.num_bytes for collective in plan.collectives)
    sentence = (
        f"A step of {in_seconds(plan.step_s)} predicted; each rank holds {in_bytes(plan.memory.total)} "
    )
    sentence += f"and exchanges {in_bytes(num_bytes)} in {len(plan.collectives):,} collectives."
    if plan.micro_batches > 1:
        sentence += f" The batch goes through in {plan.micro_batches} parts."
    sheet.write(MARGIN, 55, sentence, 12, fill=PALE_INK)
    return 72


def _swatch(
    sheet: _Sheet, x: float, y: float, axis: int, dim: int | None, parent: ElementTree.Element | None = None
) -> None:
    """Draw a square for one axis: filled, with the number of the dimension that the axis splits; or hollow."""
    fill = PAPER if dim is None else _AXES[axis % len(_AXES)][min(dim, 3)]
    stroke = "#b5bdc6" if dim is None else fill
    sheet.add("rect", parent, x=float(x), y=float(y), width=14, height=14, rx=3, fill=fill, stroke=stroke)
    if dim is not None:
        ink = PAPER if dim < 2 else INK
        sheet.write(x + 7, y + 11, str(dim), 10, parent, fill=ink, text_anchor="middle", font_weight="bold")


def _legend(sheet: _Sheet, cards: Sequence[Card], y: float) -> float:
    """Draw the legend of colours and arrows, on as many lines as necessary."""
    cuts = {
        (axis, placement.dim)
        for card in cards for parameter in card.parameters
        for axis, placement in enumerate(of_words(parameter.placements))
        if placement.dim is not None
    }  # fmt: skip
    entries: list[tuple[int, int | None, str]] = [
        (axis, dim, f"dimension {dim} cut over {sheet.axes[axis]}") for axis, dim in sorted(cuts)
    ]
    entries.append(
        (0, None, "whole on every rank" if len(sheet.axes) == 1 or not cuts else "not cut over that axis")
    )
    x = float(MARGIN)
    for axis, dim, words in entries:
        if x + 20 + text_width(words, 11) > WIDTH - MARGIN:
            x, y = float(MARGIN), y + LINE
        _swatch(sheet, x, y, axis, dim)
        x = sheet.write(x + 20, y + 11, words) + 18
    if len(sheet.axes) > 1 and cuts:
        y += LINE
        sentence = f"Of two squares the left one is of {sheet.axes[0]}, the right one of {sheet.axes[1]}."
        sheet.write(MARGIN, y + 11, sentence, fill=PALE_INK)
    y += LINE
    if any(card.arrows for card in cards):
        sentence = (
            "Arrows are collectives: forward above, backward below, as thick as the logarithm of their bytes "
        )
        sentence += f"(at most {in_bytes(sheet.max_bytes)}). "
    else:
        sentence = "Nothing is exchanged. "
    if any(card.count > 1 for card in cards):
        sentence += "Of modules that repeat, all together."
    sheet.write(MARGIN, y + 11, sentence, fill=PALE_INK)
    return y + LINE + 8


@dataclass(frozen=True)
class _CardBox:
    """A card with its size."""

    card: Card
    width: float
    named_parameters: tuple[CardParameter, ...]
    rest: tuple[str, ...]
    """Texts for parameters that are not named, and for buffers."""
    forward: tuple[tuple[Arrow, str], ...]
    backward: tuple[tuple[Arrow, str], ...]

    @property
    def height(self) -> float:
        lines = len(self.named_parameters) + len(self.rest)
        return 30 + lines * LINE + (4 if lines else 0)


def _lay_out(sheet: _Sheet, card: Card) -> _CardBox:
    parameters, rest = card.parameters, []
    if len(parameters) > _MOST_NAMED:
        largest = sorted(range(len(parameters)), key=lambda at: (-parameters[at].num_bytes, at))[
            : _MOST_NAMED - 1
        ]
        smaller = [parameter for at, parameter in enumerate(parameters) if at not in largest]
        rest.append(
            f"{len(smaller)} smaller ones, {in_bytes(sum(parameter.num_bytes for parameter in smaller))}"
        )
        parameters = tuple(parameters[at] for at in sorted(largest))
    if card.num_buffers:
        buffers = "a buffer" if card.num_buffers == 1 else f"{card.num_buffers} buffers"
        rest.append(f"{buffers}, {in_bytes(card.buffer_bytes)}")
    forward, backward = (_label_arrows(sheet, card, phase) for phase in ("forward", "backward"))
    widths = [text_width(_title(card), 12) * 1.06 + 24]
    widths += [
        text_width(parameter.name, 10.5)
        + text_width(in_bytes(parameter.num_bytes), 10)
        + 28
        + 17 * len(sheet.axes)
        for parameter in parameters
    ]
    width = min(max(_NARROWEST, *widths), _WIDEST)
    width = max(width, *(text_width(words, 10) + 6 for _, words in (*forward, *backward)), 0)
    return _CardBox(card, width, parameters, tuple(rest), forward, backward)


def _title(card: Card) -> str:
    return card.title if card.count == 1 else f"{card.title}  x {card.count}"


def _label_arrows(sheet: _Sheet, card: Card, phase: str) -> tuple[tuple[Arrow, str], ...]:
    """Arrows of one pass with their labels; if there are many, the smallest become one."""
    arrows = [arrow for arrow in card.arrows if arrow.phase == phase]
    labels = [(arrow, _words(sheet, arrow)) for arrow in arrows]
    if len(labels) > _MOST_ARROWS:
        rest = arrows[_MOST_ARROWS - 1 :]
        count, num_bytes = sum(arrow.count for arrow in rest), sum(arrow.num_bytes for arrow in rest)
        rest_arrow = Arrow(phase, "others", rest[0].axis, count, num_bytes)
        labels = [*labels[: _MOST_ARROWS - 1], (rest_arrow, f"{count} others, {in_bytes(num_bytes)}")]
    return tuple(labels)


def _words(sheet: _Sheet, arrow: Arrow) -> str:
    over = f" over {arrow.axis}" if len(sheet.axes) > 1 else ""
    times = f"{arrow.count} x " if arrow.count > 1 else ""
    return f"{times}{kind_in_words(arrow.kind)}{over}, {in_bytes(arrow.num_bytes)}"


def _lane(sheet: _Sheet, arrow: Arrow) -> float:
    """Height of an arrow with its label."""
    return 15 + sheet.thickness(arrow.num_bytes) + 8


def _lanes(sheet: _Sheet, labels: Iterable[tuple[Arrow, str]]) -> float:
    return sum(_lane(sheet, arrow) for arrow, _ in labels)


def _rows(sheet: _Sheet, cards: Sequence[Card], y: float) -> float:
    boxes = [_lay_out(sheet, card) for card in cards]
    for row in _broken(boxes):
        above = max(_lanes(sheet, box.forward) for box in row)
        x, top = float(MARGIN), y + above
        for box in row:
            _card(sheet, box, x, top)
            x += box.width
            if box is not boxes[-1]:
                _onward(sheet, x + _GAP / 2, top + 15)
            x += _GAP
        y = max(top + box.height + _BELOW + _lanes(sheet, box.backward) for box in row) + 18
    return y


def _broken(boxes: Sequence[_CardBox]) -> Iterator[list[_CardBox]]:
    """Break the cards into rows."""
    row: list[_CardBox] = []
    x = 0.0
    for box in boxes:
        if row and x + box.width > WIDTH - 2 * MARGIN:
            yield row
            row, x = [], 0.0
        row.append(box)
        x += box.width + _GAP
    if row:
        yield row


def _onward(sheet: _Sheet, x: float, y: float) -> None:
    """Draw the sign between two cards that the second follows the first."""
    sheet.add("path", d=f"M{x - 3:.1f} {y - 5:.1f}l6 5l-6 5", fill="none", stroke="#9aa4ae", stroke_width=1.5)


def _card(sheet: _Sheet, box: _CardBox, x: float, top: float) -> None:
    card = box.card
    group = sheet.add("g", class_="block", data_block=card.title, data_count=card.count)
    y = top - _lanes(sheet, box.forward)
    for arrow, words in box.forward:
        _arrow(sheet, group, arrow, words, x, y, box.width)
        y += _lane(sheet, arrow)
    sheet.add("rect", group, class_="card", x=x, y=top, width=box.width, height=box.height, rx=6, fill=PAPER,
              stroke="#8c959f")  # fmt: skip
    sheet.write(
        x + 10, top + 19, truncate(_title(card), 12 * 1.06, box.width - 20), 12, group, font_weight="bold"
    )
    y = top + 30
    for parameter in box.named_parameters:
        _parameter(sheet, group, parameter, x + 6, y, box.width - 12)
        y += LINE
    for words in box.rest:
        sheet.write(x + 10, y + 13, words, 10, group, fill=PALE_INK)
        y += LINE
    y = top + box.height + _BELOW
    for arrow, words in box.backward:
        _arrow(sheet, group, arrow, words, x, y, box.width)
        y += _lane(sheet, arrow)


def _parameter(
    sheet: _Sheet, group: ElementTree.Element, parameter: CardParameter, x: float, y: float, width: float
) -> None:
    placements = of_words(parameter.placements)
    cut = next((axis for axis, placement in enumerate(placements) if placement.dim is not None), None)
    fill = _WHOLE if cut is None else _AXES[cut % len(_AXES)][-1]
    row = sheet.add("g", group, class_="parameter")
    sheet.add(
        "title", row
    ).text = f"{parameter.name} {shape_in_words(parameter.shape, parameter.placements, sheet.axes)}"
    sheet.add("rect", row, x=x, y=y, width=width, height=LINE - 2, rx=3, fill=fill)
    for axis, placement in enumerate(placements):
        _swatch(sheet, x + 2 + 17 * axis, y + 2, axis, placement.dim, row)
    begin = x + 4 + 17 * len(placements)
    size = in_bytes(parameter.num_bytes)
    sheet.write(x + width - 4, y + 13, size, 10, row, fill=PALE_INK, text_anchor="end")
    room = x + width - 8 - text_width(size, 10) - begin
    sheet.write(begin, y + 13, truncate(parameter.name, 10.5, room), 10.5, row)


def _arrow(
    sheet: _Sheet, group: ElementTree.Element, arrow: Arrow, words: str, x: float, y: float, width: float
) -> None:
    """Draw an arrow: from left to right in the forward pass, from right to left in the backward pass."""
    is_forward = arrow.phase == "forward"
    thick = sheet.thickness(arrow.num_bytes)
    colour = _AXES[sheet.axes.index(arrow.axis) % len(_AXES)][1] if arrow.kind != "others" else "#8c959f"
    sheet.write(x + 3, y + 11, words, 10, group, fill=INK)
    middle = y + 15 + (thick + 6) / 2
    half = (thick + 6) / 2
    head = half * 1.4
    begin, end = (x + 2, x + width - 2) if is_forward else (x + width - 2, x + 2)
    neck = end - head if is_forward else end + head
    sheet.add("line", group, class_=f"arrow {arrow.phase}", x1=begin, y1=middle, x2=neck, y2=middle, stroke=colour,
              stroke_width=f"{thick:.2f}", data_kind=arrow.kind, data_axis=arrow.axis,
              data_bytes=arrow.num_bytes)  # fmt: skip
    points = f"{neck:.1f},{middle - half:.1f} {end:.1f},{middle:.1f} {neck:.1f},{middle + half:.1f}"
    sheet.add("polygon", group, points=points, fill=colour)


def _memory(sheet: _Sheet, y: float) -> float:
    """Draw memory by kind as one bar."""
    plan, entries = sheet.plan, memory_in_words(sheet.plan)
    total = plan.memory.total
    sheet.add("line", x1=MARGIN, y1=y, x2=WIDTH - MARGIN, y2=y, stroke=RULE)
    sentence = f"Memory on each rank, predicted: {in_bytes(total)} of {in_bytes(plan.cluster.memory_bytes)}"
    sheet.write(MARGIN, y + 22, sentence, 12, font_weight="bold")
    x, y, room = float(MARGIN), y + 32, WIDTH - 2 * MARGIN
    colours = dict(zip((name for name, _ in entries), MEMORY, strict=False))
    for name, size in entries:
        width = room * size / total
        sheet.add(
            "rect", class_="memory", x=x, y=y, width=width, height=18, fill=colours[name], data_bytes=size
        )
        x += width
    x, y = float(MARGIN), y + 26
    for name, size in entries:
        words = f"{name} {in_bytes(size)}"
        if x + 18 + text_width(words, 11) > WIDTH - MARGIN:
            x, y = float(MARGIN), y + LINE
        sheet.add("rect", x=x, y=y, width=12, height=12, rx=2, fill=colours[name])
        x = sheet.write(x + 17, y + 10, words) + 18
    return y + 14
