"""SVG writer of the pictures of plans."""

import math
from xml.etree import ElementTree

WIDTH = 1000
MARGIN, LINE = 16, 20
_FONT = "system-ui, 'Segoe UI', Helvetica, Arial, 'Liberation Sans', sans-serif"
_EM = 0.6

INK, PALE_INK, RULE, PAPER = "#1f2328", "#59636e", "#d1d9e0", "#ffffff"
BLUES = ("#1a56a8", "#4a86cf", "#7fb0e6", "#a9cbf0", "#e8f1fb")
OCHRES = ("#a84a06", "#d87624", "#eda25f", "#f3c296", "#fdf0e4")
GREENS = ("#1d7a46", "#43a56d", "#7cc79b", "#a9dcbe", "#e6f6ec")
"""Shades, darkest first, then the background of names."""
MEMORY = ("#5b4a9c", "#8474c4", "#ada1de", "#c9a227", "#2f8f8b", "#8fb8b5", "#b8bfc7")


class Svg:
    """Sheet of width `WIDTH`; equal calls give equal bytes."""

    def __init__(self, title: str) -> None:
        self.root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "font-family": _FONT})
        ElementTree.SubElement(self.root, "title").text = title

    def add(
        self, kind: str, parent: ElementTree.Element | None = None, **about: object
    ) -> ElementTree.Element:
        """Add an element; `_` in attribute names becomes `-`."""
        attributes = {
            name.rstrip("_").replace("_", "-"): f"{value:.1f}".removesuffix(".0")
            if isinstance(value, float)
            else str(value)
            for name, value in about.items()
        }
        return ElementTree.SubElement(self.root if parent is None else parent, kind, attributes)

    def write(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 11,
        parent: ElementTree.Element | None = None,
        **about: object,
    ) -> float:
        """Write text, and return the x position after it."""
        element = self.add("text", parent, x=float(x), y=float(y), font_size=size, **{"fill": INK, **about})
        element.text = text
        return x + text_width(text, size)

    def text(self, height: float) -> str:
        """The SVG text, with a background of this height."""
        self.root.set("viewBox", f"0 0 {WIDTH} {math.ceil(height)}")
        self.root.set("width", str(WIDTH))
        self.root.set("height", str(math.ceil(height)))
        paper = ElementTree.Element("rect", {
            "x": "0.5", "y": "0.5", "width": str(WIDTH - 1), "height": str(math.ceil(height) - 1), "rx": "8",
            "fill": PAPER, "stroke": RULE,
        })  # fmt: skip
        self.root.insert(1, paper)
        ElementTree.indent(self.root, " ")
        return ElementTree.tostring(self.root, encoding="unicode") + "\n"


def text_width(text: str, size: float) -> float:
    """Approximate width."""
    return len(text) * size * _EM


def truncate(text: str, size: float, room: float) -> str:
    """Return the end of the text, if it is wider than `room`."""
    letters = int(room / (size * _EM))
    return text if len(text) <= letters else "…" + text[len(text) - letters + 1 :]
