"""Pictures of plans as SVG, deterministic for the same plan."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from moe.plan.svg import require_matplotlib, svg_of
from moe.sharding.explain.cards import Card, cards_of
from moe.sharding.explain.explain import (
    Plan,
    in_bytes,
    in_seconds,
    kind_in_words,
    memory_in_words,
    mesh_in_words,
    placed_in_words,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WHOLE = "#d1d9e0"
_SPLIT = ("#1a56a8", "#d87624", "#43a56d", "#8474c4", "#c9a227", "#7fb0e6", "#f3c296")
_EXCHANGED = ("#a84a06", "#eda25f", "#1d7a46", "#7cc79b", "#5b4a9c", "#ada1de")
_MEMORY = ("#5b4a9c", "#8474c4", "#ada1de", "#c9a227", "#2f8f8b", "#8fb8b5", "#b8bfc7")
_TITLE_LETTERS = 40
_LEGEND_LETTERS = 36


def draw_svg(plan: Plan) -> str:
    """SVG text of `figure_of`."""
    return svg_of(figure_of(plan))


def figure_of(plan: Plan) -> "Figure":
    """Figure with a row per kind of module, in the order of use, and memory by kind below.

    A row has two panels: bytes of parameters on a rank, coloured by placement, and bytes that a step exchanges,
    coloured by collective, the forward pass above the backward pass. Repeated modules are one row. Raises SpecError
    if matplotlib is not installed.
    """
    require_matplotlib("draw")
    from matplotlib.figure import Figure

    cards = cards_of(plan)
    figure = Figure(figsize=(12, 3.2 + 0.34 * len(cards)), layout="constrained")
    panels = figure.subplot_mosaic(
        [["parameters", "exchanged"], ["memory", "memory"]], height_ratios=[0.5 + 0.34 * len(cards), 0.5]
    )
    exchanged_bytes = sum(collective.num_bytes for collective in plan.collectives)
    micro_batches = f", in {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    figure.suptitle(
        f"{plan.num_devices:,} x {plan.cluster.device}, mesh: {mesh_in_words(plan.mesh)}\n"
        f"step: {in_seconds(plan.step_s)} predicted{micro_batches}; {in_bytes(exchanged_bytes)} exchanged by a rank "
        f"in {len(plan.collectives):,} collectives",
        fontsize=11,
    )
    _draw_parameters(panels["parameters"], plan, cards)
    _draw_exchanges(panels["exchanged"], cards)
    _draw_memory(panels["memory"], plan)
    return figure


def _draw_parameters(axes: "Axes", plan: Plan, cards: Sequence[Card]) -> None:
    bars: list[dict[str, int]] = []
    for card in cards:
        num_bytes: dict[str, int] = {}
        for parameter in card.parameters:
            num_bytes[parameter.placements] = num_bytes.get(parameter.placements, 0) + parameter.num_bytes
        bars.append(num_bytes)
    words = {
        placements: placed_in_words(placements, plan.mesh)
        for placements in sorted({key for bar in bars for key in bar})
    }
    next_colour = cycle(_SPLIT)
    colours = {placements: next(next_colour) if "S(" in placements else _WHOLE for placements in words}
    ends = _stack(axes, list(range(len(cards))), bars, 0.7, colours, words)
    for row, end in enumerate(ends):
        if end:
            _write(axes, in_bytes(end), end, row)
    axes.set_title("parameters on a rank", fontsize=9)
    axes.set_yticks(range(len(cards)), [_title(card) for card in cards], fontsize=8)
    _finish(axes, len(cards))


def _draw_exchanges(axes: "Axes", cards: Sequence[Card]) -> None:
    bars: dict[str, list[dict[str, int]]] = {"forward": [], "backward": []}
    for card in cards:
        for phase, phase_bars in bars.items():
            num_bytes: dict[str, int] = {}
            for arrow in card.arrows:
                if arrow.phase == phase:
                    num_bytes[arrow.kind] = num_bytes.get(arrow.kind, 0) + arrow.num_bytes
            phase_bars.append(num_bytes)
    kinds = sorted({arrow.kind for card in cards for arrow in card.arrows})
    words = {kind: kind_in_words(kind) for kind in kinds}
    colours = dict(zip(kinds, cycle(_EXCHANGED), strict=False))
    for phase, shift in (("forward", -0.18), ("backward", 0.18)):
        places = [row + shift for row in range(len(cards))]
        ends = _stack(axes, places, bars[phase], 0.32, colours, words)
        for place, end in zip(places, ends, strict=True):
            if end:
                _write(axes, in_bytes(end), end, place, fontsize=7)
        words = dict.fromkeys(words, "_")  # a leading underscore keeps a label out of the legend
    axes.set_title("exchanged in a step: forward above, backward below", fontsize=9)
    axes.set_yticks([])
    _finish(axes, len(cards))


def _draw_memory(axes: "Axes", plan: Plan) -> None:
    entries = dict(memory_in_words(plan))
    words = {name: f"{name} {in_bytes(num_bytes)}" for name, num_bytes in entries.items()}
    _stack(axes, [0], [entries], 0.8, dict(zip(entries, cycle(_MEMORY), strict=False)), words)
    limit = in_bytes(plan.cluster.memory_bytes)
    axes.set_title(f"memory of a rank, predicted: {in_bytes(plan.memory.total)} of {limit}", fontsize=9)
    axes.set_yticks([])
    _finish(axes, 1)
    axes.set_xlim(0, max(plan.memory.total, 1))


def _stack(
    axes: "Axes",
    places: Sequence[float],
    bars: Sequence[Mapping[str, int]],
    height: float,
    colours: Mapping[str, str],
    words: Mapping[str, str],
) -> list[int]:
    """Draw a stacked bar at each place; returns their lengths."""
    ends = [0] * len(bars)
    for key, label in words.items():
        widths = [bar.get(key, 0) for bar in bars]
        axes.barh(places, widths, left=ends, height=height, color=colours[key], label=label)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    return ends


def _write(axes: "Axes", text: str, x: float, y: float, fontsize: float = 8) -> None:
    axes.annotate(text, (x, y), (3, 0), textcoords="offset points", va="center", fontsize=fontsize)


def _title(card: Card) -> str:
    title = card.title if card.count == 1 else f"{card.title} x {card.count}"
    return title if len(title) <= _TITLE_LETTERS else f"…{title[1 - _TITLE_LETTERS :]}"


def _finish(axes: "Axes", num_rows: int) -> None:
    axes.set_ylim(num_rows - 0.4, -0.6)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    _, labels = axes.get_legend_handles_labels()
    if labels:
        num_columns = 3 if max(map(len, labels)) <= _LEGEND_LETTERS else 1
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=num_columns, fontsize=8, frameon=False)
