"""Section of docs/planner.md on kernels: errors and their limits, by regime, and what was left out."""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.kernels.fitting import Figures
from benchmarks.kernels.tables import PACKAGE, RELEASE

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"
_BEGIN, _END, _BEFORE = "<!-- kernels -->", "<!-- end of kernels -->", "<!-- tables -->"
_HEADING = "## Predicted and measured kernels"

LIMITS = {
    "products bfloat16": 0.06, "products fp8": 0.10, "experts bfloat16": 0.15, "experts fp8": 0.15,
    "attention": 0.12, "ring": 0.12, "all_to_all": 0.12, "exchange in a node": 0.12, "exchange between nodes": 0.20,
}  # fmt: skip
_TITLES = {
    "products bfloat16": "Dense products, bfloat16", "products fp8": "Dense products, fp8",
    "experts bfloat16": "Experts, bfloat16", "experts fp8": "Experts, fp8", "attention": "Attention",
    "ring": "Gathers, scatters and all-reduces in a node", "all_to_all": "All-to-all in a node",
    "exchange in a node": "Fused exchange in a node", "exchange between nodes": "Fused exchange between nodes",
}  # fmt: skip

_INTRODUCTION = f"""\
The time of a kernel is a formula with a few constants (`moe/plan/cluster/kernels.py`). For each device the constants
are fitted to times that NVIDIA measured and ships in the package {PACKAGE} {RELEASE} (Apache-2.0). If several
kernels were measured for a shape, the fastest counts. `python -m benchmarks.device_constants` fits the constants and
writes `moe/plan/cluster/measured.json`, this section, and `benchmarks/results/device_constants.json` with all errors.

In these formulas, a larger size is never faster, and a row never takes less time in a smaller kernel, since the bounds
of the search rely on both. Formulas can therefore not show the steps in time at which tiles fill up.

Errors are means of |ln(predicted / measured)| over shapes that were held out of the fit, by:

- products: the widths of the weight;
- experts: whole layers;
- attention: the number of heads;
- collectives: the size;
- exchanges in a node: the width and the number of experts; between nodes, the number of tokens."""

_LEFT_OUT = """\
What was left out, and why:

- **Products.** Only products as in a training step count: at least 2·10^10 operations, no size below 256, rows a
  multiple of 16. In smaller ones, one or two waves of tiles determine the time. All others have a weight of 0.03 in the
  fit. Tables with less than half of the shapes, measured on other machines, were not used.
- **Experts.** Only balanced loads of at least 512 tokens count, of gated experts at least 128 wide. Skewed loads were
  not fitted, except those of a single rank on A100, where only one kernel was measured with balanced loads. If experts
  are spread over ranks, kernels that process all tokens' rows are left out, since a trainer's rank has only the rows
  sent to it. So are rows that took 1.3 times as long as a larger one of the same layer. On all devices but A100, the
  fitted rates are the peak rates: the fit can hardly distinguish the time of arithmetic from the time per row.
- **Attention.** Only bfloat16 without a cache counts, of at least 512 tokens. Heads of 512 are left out, and heads of
  192 on Blackwell, where only an untuned kernel was measured. Windows with 96 heads of 64 count, although kernels took
  up to twice the predicted time. No windows were measured on A100. No backward passes were measured: they are assumed
  to take 3 times the forward pass, as in FlashAttention's papers.
- **Collectives.** Nothing was left out. 2, 4 and 8 ranks of one node were measured; on GB200 and GB300, only 2 and 4.
- **Exchanges.** Only DeepEP from 512 tokens per rank counts; dispatch and combine share one start-up time. 8 nodes are
  left out: their measured rate was a third of the rate of 4 nodes, and of the rate that DeepEP publishes for 8. Between
  nodes only H100 and H200 were measured, with nine numbers of tokens on each of 2 and 4 nodes; other devices have
  H100's constants there."""

_Table = Mapping[str, Mapping[str, Figures]]
"""Figures by device, then by kernel."""


def write_section(figures: Mapping[str, Any]) -> None:
    """Replace the section; the rest of the page stays."""
    text = PAGE.read_text()
    if _BEGIN not in text:
        head, _, tail = text.partition(_BEFORE)
        text = f"{head}{_HEADING}\n\n{_BEGIN}\n{_END}\n\n{_BEFORE}{tail}"
    head, _, rest = text.partition(_BEGIN)
    PAGE.write_text(f"{head}{_BEGIN}\n\n{section(figures)}\n\n{_END}{rest.partition(_END)[2]}")


def section(figures: Mapping[str, Any]) -> str:
    errors: _Table = figures["errors"]
    parts = [
        _INTRODUCTION,
        _summary(errors),
        _short(errors),
        _LEFT_OUT,
        "Errors by regime, with the number of rows on the device that has the most. Errors above the limit are bold:",
    ]
    for kernel in LIMITS:
        parts.append(_by_regime(kernel, errors))
        if kernel == "attention":
            parts.append(_heads(errors))
    return "\n\n".join(parts)


def _summary(errors: _Table) -> str:
    head = ["Kernel", "limit", *errors]
    lines = []
    for kernel, limit in LIMITS.items():
        cells = [_cell(device.get(kernel), limit) for device in errors.values()]
        lines.append([_TITLES[kernel], f"{limit:.2f}", *cells])
    return _table(head, lines)


def _short(errors: _Table) -> str:
    """Errors above their limit, overall or in a regime, of the worst device."""
    lines = []
    for kernel in (*LIMITS, *_widths(errors)):
        limit, title = _limit(kernel), _TITLES.get(kernel) or f"Attention, {_width(kernel)}"
        by_device = {name: device[kernel] for name, device in errors.items() if kernel in device}
        parts = {"all": by_device} | {
            regime: {name: device["by"][regime] for name, device in by_device.items() if regime in device["by"]}
            for regime in _regimes(errors, kernel, "by")
        }
        worst = {
            regime: max((device["error"], name) for name, device in part.items()) for regime, part in parts.items()
        }
        exceeding = [f"{regime} ({error:.3f} on {name})" for regime, (error, name) in worst.items() if error > limit]
        lines += [f"- {title}: {', '.join(exceeding)}." for _ in exceeding[:1]]
    return "\n".join(["Errors above their limit, on the worst device:", "", *lines])


def _limit(kernel: str) -> float:
    """Limit of a kernel; attention of any width has the limit of attention."""
    return LIMITS.get(kernel, LIMITS["attention"])


def _widths(errors: _Table) -> list[str]:
    """Names of attention by width, the narrowest first."""
    names = {
        name for kernels in errors.values() for name in kernels if name.startswith("attention ") and "," not in name
    }
    return sorted(names, key=lambda name: (not name[10:].isdigit(), len(name), name))


def _width(kernel: str) -> str:
    width = kernel.removeprefix("attention ")
    return f"heads of {width}" if width.isdigit() else width


def _regimes(errors: _Table, kernel: str, part: str) -> list[str]:
    """Names of the regimes of all devices, in their order."""
    regimes_by_device = [device[kernel].get(part, {}) for device in errors.values() if kernel in device]
    return list(dict.fromkeys(regime for regimes in regimes_by_device for regime in regimes))


def _by_regime(kernel: str, errors: _Table) -> str:
    devices = {name: device[kernel] for name, device in errors.items() if kernel in device}
    lines = [
        _line(regime, [device["by"].get(regime) for device in devices.values()], _limit(kernel))
        for regime in _regimes(errors, kernel, "by")
    ]
    lines += [
        _line(f"*not counted: {regime}*", [device.get("outside", {}).get(regime) for device in devices.values()])
        for regime in _regimes(errors, kernel, "outside")
    ]
    return _table([_TITLES[kernel], "rows", *devices], lines)


def _heads(errors: _Table) -> str:
    """Table of attention by head width and window."""
    lines = []
    for kernel in _widths(errors):
        widths = [device.get(kernel) for device in errors.values()]
        lines.append(_line(_width(kernel), widths, _limit(kernel)))
        regimes = _regimes(errors, kernel, "by")
        for regime in regimes if len(regimes) > 1 else ():
            lines.append(_line(f"– {regime}", [width and width["by"].get(regime) for width in widths], _limit(kernel)))
    untuned_figures = [device.get("attention 192, left out") for device in errors.values()]
    lines.append(_line("*not counted: heads of 192, untuned*", untuned_figures))
    return _table(["Attention by width of a head", "rows", *errors], lines)


def _line(title: str, figures: Sequence[Figures | None], limit: float = inf) -> list[str]:
    rows = max(figure["rows"] for figure in figures if figure)
    return [title, f"{rows:,}", *(_cell(figure, limit) for figure in figures)]


def _cell(figure: Figures | None, limit: float) -> str:
    if not figure or not figure["rows"]:
        return "–"
    error = f"{figure['error']:.3f}"
    return f"**{error}**" if figure["error"] > limit else error


def _table(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
