"""Plans as pictures: SVG, the same byte for byte for the same plan."""

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
    shortened,
    text_width,
)
from moe.sharding.explain.cards import Arrow, Card, Parameter, cards_of
from moe.sharding.explain.explain import (
    Plan,
    in_bytes,
    in_seconds,
    kind_in_words,
    memory_in_words,
    mesh_in_words,
    shape_in_words,
)
from moe.sharding.planned import of_words

_GAP, _BELOW = 22, 3
_NARROWEST, _WIDEST = 140, 256
_MOST_NAMED, _MOST_ARROWS = 12, 5
_THINNEST, _THICKEST = 2.0, 14.0
_DOUBLINGS = 12
"""From the thinnest arrow to the thickest: what has fewer bytes is as thin."""

_WHOLE = "#f3f5f7"
_AXES = (BLUES, OCHRES, GREENS)
"""Of each mesh axis: colours of dimensions 0, 1, 2 and more, then the pale one behind names."""


def drawn(plan: Plan) -> str:
    """SVG: modules from left to right in the order of use, those that repeat as one, their parameters coloured by
    placement; collectives as arrows as thick as the logarithm of their bytes, forward above, backward below; memory by
    kind."""
    cards = cards_of(plan)
    sheet = _Sheet(plan, [each.num_bytes for card in cards for each in card.arrows])
    y = _rows(sheet, cards, _legend(sheet, cards, _head(sheet)))
    return sheet.text(_memory(sheet, y) + MARGIN)


class _Sheet:
    """The picture while it is drawn."""

    def __init__(self, plan: Plan, sizes: Sequence[int]) -> None:
        self.plan, self.axes = plan, list(plan.mesh)
        self.most = max(sizes, default=1)
        svg = Svg(f"Plan of a module on {mesh_in_words(plan.mesh)}")
        self.add, self.write, self.text = svg.add, svg.write, svg.text

    def thickness(self, num_bytes: int) -> float:
        """Grows with the logarithm of the bytes."""
        share = 1 + math.log2(num_bytes / self.most) / _DOUBLINGS
        return _THINNEST + max(0.0, share) * (_THICKEST - _THINNEST)


def _head(sheet: _Sheet) -> float:
    plan = sheet.plan
    sheet.write(MARGIN, 34, f"{plan.num_devices:,} x {plan.cluster.device}, mesh: {mesh_in_words(plan.mesh)}", 18,
                font_weight="bold")  # fmt: skip
    moved = sum(each.num_bytes for each in plan.collectives)
    said = f"A step of {in_seconds(plan.step_s)} predicted; each rank holds {in_bytes(plan.memory.total)} "
    said += f"and exchanges {in_bytes(moved)} in {len(plan.collectives):,} collectives."
    if plan.micro_batches > 1:
        said += f" The batch goes through in {plan.micro_batches} parts."
    sheet.write(MARGIN, 55, said, 12, fill=PALE_INK)
    return 72


def _swatch(
    sheet: _Sheet, x: float, y: float, axis: int, dim: int | None, parent: ElementTree.Element | None = None
) -> None:
    """A square for one axis: filled, with the number of the dimension that it cuts, or hollow."""
    fill = PAPER if dim is None else _AXES[axis % len(_AXES)][min(dim, 3)]
    stroke = "#b5bdc6" if dim is None else fill
    sheet.add("rect", parent, x=float(x), y=float(y), width=14, height=14, rx=3, fill=fill, stroke=stroke)
    if dim is not None:
        ink = PAPER if dim < 2 else INK
        sheet.write(x + 7, y + 11, str(dim), 10, parent, fill=ink, text_anchor="middle", font_weight="bold")


def _legend(sheet: _Sheet, cards: Sequence[Card], y: float) -> float:
    """What colours and arrows mean, on as many lines as it takes."""
    cuts = {
        (axis, each.dim)
        for card in cards for parameter in card.parameters for axis, each in enumerate(of_words(parameter.placements))
        if each.dim is not None
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
        said = f"Of two squares the left one is of {sheet.axes[0]}, the right one of {sheet.axes[1]}."
        sheet.write(MARGIN, y + 11, said, fill=PALE_INK)
    y += LINE
    if any(card.arrows for card in cards):
        said = (
            "Arrows are collectives: forward above, backward below, as thick as the logarithm of their bytes "
        )
        said += f"(at most {in_bytes(sheet.most)}). "
    else:
        said = "Nothing is exchanged. "
    if any(card.count > 1 for card in cards):
        said += "Of modules that repeat, all together."
    sheet.write(MARGIN, y + 11, said, fill=PALE_INK)
    return y + LINE + 8


@dataclass(frozen=True)
class _Placed:
    """A card with its measures."""

    card: Card
    width: float
    named: tuple[Parameter, ...]
    rest: tuple[str, ...]
    """Words on what is not named: small parameters of many, buffers."""
    forward: tuple[tuple[Arrow, str], ...]
    backward: tuple[tuple[Arrow, str], ...]

    @property
    def height(self) -> float:
        lines = len(self.named) + len(self.rest)
        return 30 + lines * LINE + (4 if lines else 0)


def _placed(sheet: _Sheet, card: Card) -> _Placed:
    named, rest = card.parameters, []
    if len(named) > _MOST_NAMED:
        most = sorted(range(len(named)), key=lambda at: (-named[at].num_bytes, at))[: _MOST_NAMED - 1]
        others = [each for at, each in enumerate(named) if at not in most]
        rest.append(f"{len(others)} smaller ones, {in_bytes(sum(each.num_bytes for each in others))}")
        named = tuple(named[at] for at in sorted(most))
    if card.num_buffers:
        buffers = "a buffer" if card.num_buffers == 1 else f"{card.num_buffers} buffers"
        rest.append(f"{buffers}, {in_bytes(card.buffer_bytes)}")
    forward, backward = (_told(sheet, card, phase) for phase in ("forward", "backward"))
    wanted = [text_width(_title(card), 12) * 1.06 + 24]
    wanted += [
        text_width(each.name, 10.5) + text_width(in_bytes(each.num_bytes), 10) + 28 + 17 * len(sheet.axes)
        for each in named
    ]
    width = min(max(_NARROWEST, *wanted), _WIDEST)
    width = max(width, *(text_width(words, 10) + 6 for _, words in (*forward, *backward)), 0)
    return _Placed(card, width, named, tuple(rest), forward, backward)


def _title(card: Card) -> str:
    return card.title if card.count == 1 else f"{card.title}  x {card.count}"


def _told(sheet: _Sheet, card: Card, phase: str) -> tuple[tuple[Arrow, str], ...]:
    """Arrows of one pass with their words; the smallest of many become one."""
    every = [each for each in card.arrows if each.phase == phase]
    told = [(each, _words(sheet, each)) for each in every]
    if len(told) > _MOST_ARROWS:
        rest = every[_MOST_ARROWS - 1 :]
        count, num_bytes = sum(each.count for each in rest), sum(each.num_bytes for each in rest)
        other = Arrow(phase, "others", rest[0].axis, count, num_bytes)
        told = [*told[: _MOST_ARROWS - 1], (other, f"{count} others, {in_bytes(num_bytes)}")]
    return tuple(told)


def _words(sheet: _Sheet, arrow: Arrow) -> str:
    over = f" over {arrow.axis}" if len(sheet.axes) > 1 else ""
    times = f"{arrow.count} x " if arrow.count > 1 else ""
    return f"{times}{kind_in_words(arrow.kind)}{over}, {in_bytes(arrow.num_bytes)}"


def _lane(sheet: _Sheet, arrow: Arrow) -> float:
    """Height of an arrow with its words."""
    return 15 + sheet.thickness(arrow.num_bytes) + 8


def _lanes(sheet: _Sheet, told: Iterable[tuple[Arrow, str]]) -> float:
    return sum(_lane(sheet, arrow) for arrow, _ in told)


def _rows(sheet: _Sheet, cards: Sequence[Card], y: float) -> float:
    every = [_placed(sheet, card) for card in cards]
    for row in _broken(every):
        above = max(_lanes(sheet, each.forward) for each in row)
        x, top = float(MARGIN), y + above
        for each in row:
            _card(sheet, each, x, top)
            x += each.width
            if each is not every[-1]:
                _onward(sheet, x + _GAP / 2, top + 15)
            x += _GAP
        y = max(top + each.height + _BELOW + _lanes(sheet, each.backward) for each in row) + 18
    return y


def _broken(every: Sequence[_Placed]) -> Iterator[list[_Placed]]:
    """Cards by row."""
    row: list[_Placed] = []
    used = 0.0
    for each in every:
        if row and used + each.width > WIDTH - 2 * MARGIN:
            yield row
            row, used = [], 0.0
        row.append(each)
        used += each.width + _GAP
    if row:
        yield row


def _onward(sheet: _Sheet, x: float, y: float) -> None:
    """A sign between two cards: the one comes after the other."""
    sheet.add("path", d=f"M{x - 3:.1f} {y - 5:.1f}l6 5l-6 5", fill="none", stroke="#9aa4ae", stroke_width=1.5)


def _card(sheet: _Sheet, placed: _Placed, x: float, top: float) -> None:
    card = placed.card
    group = sheet.add("g", class_="block", data_block=card.title, data_count=card.count)
    y = top - _lanes(sheet, placed.forward)
    for arrow, words in placed.forward:
        _arrow(sheet, group, arrow, words, x, y, placed.width)
        y += _lane(sheet, arrow)
    sheet.add("rect", group, class_="card", x=x, y=top, width=placed.width, height=placed.height, rx=6, fill=PAPER,
              stroke="#8c959f")  # fmt: skip
    sheet.write(
        x + 10, top + 19, shortened(_title(card), 12 * 1.06, placed.width - 20), 12, group, font_weight="bold"
    )
    y = top + 30
    for each in placed.named:
        _parameter(sheet, group, each, x + 6, y, placed.width - 12)
        y += LINE
    for words in placed.rest:
        sheet.write(x + 10, y + 13, words, 10, group, fill=PALE_INK)
        y += LINE
    y = top + placed.height + _BELOW
    for arrow, words in placed.backward:
        _arrow(sheet, group, arrow, words, x, y, placed.width)
        y += _lane(sheet, arrow)


def _parameter(
    sheet: _Sheet, group: ElementTree.Element, parameter: Parameter, x: float, y: float, width: float
) -> None:
    placements = of_words(parameter.placements)
    cut = next((axis for axis, each in enumerate(placements) if each.dim is not None), None)
    fill = _WHOLE if cut is None else _AXES[cut % len(_AXES)][-1]
    row = sheet.add("g", group, class_="parameter")
    sheet.add(
        "title", row
    ).text = f"{parameter.name} {shape_in_words(parameter.shape, parameter.placements, sheet.axes)}"
    sheet.add("rect", row, x=x, y=y, width=width, height=LINE - 2, rx=3, fill=fill)
    for axis, each in enumerate(placements):
        _swatch(sheet, x + 2 + 17 * axis, y + 2, axis, each.dim, row)
    begin = x + 4 + 17 * len(placements)
    held = in_bytes(parameter.num_bytes)
    sheet.write(x + width - 4, y + 13, held, 10, row, fill=PALE_INK, text_anchor="end")
    room = x + width - 8 - text_width(held, 10) - begin
    sheet.write(begin, y + 13, shortened(parameter.name, 10.5, room), 10.5, row)


def _arrow(
    sheet: _Sheet, group: ElementTree.Element, arrow: Arrow, words: str, x: float, y: float, width: float
) -> None:
    """From left to right in the forward pass, from right to left in the backward pass."""
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
    """Memory by kind, as one bar."""
    plan, told = sheet.plan, memory_in_words(sheet.plan)
    total = plan.memory.total
    sheet.add("line", x1=MARGIN, y1=y, x2=WIDTH - MARGIN, y2=y, stroke=RULE)
    said = f"Memory on each rank, predicted: {in_bytes(total)} of {in_bytes(plan.cluster.memory_bytes)}"
    sheet.write(MARGIN, y + 22, said, 12, font_weight="bold")
    x, y, room = float(MARGIN), y + 32, WIDTH - 2 * MARGIN
    colours = dict(zip((each for each, _ in told), MEMORY, strict=False))
    for what, size in told:
        width = room * size / total
        sheet.add(
            "rect", class_="memory", x=x, y=y, width=width, height=18, fill=colours[what], data_bytes=size
        )
        x += width
    x, y = float(MARGIN), y + 26
    for what, size in told:
        words = f"{what} {in_bytes(size)}"
        if x + 18 + text_width(words, 11) > WIDTH - MARGIN:
            x, y = float(MARGIN), y + LINE
        sheet.add("rect", x=x, y=y, width=12, height=12, rx=2, fill=colours[what])
        x = sheet.write(x + 17, y + 10, words) + 18
    return y + 14
