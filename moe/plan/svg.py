"""matplotlib figures as SVG text; equal figures give equal bytes. matplotlib is an extra."""

import io
from typing import TYPE_CHECKING

from moe.spec import spec_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INSTALL = "pip install 'shardyard[pictures]'"


def require_matplotlib(path: str) -> None:
    """Raise SpecError, with `path` as the place, if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise spec_error("not_installed", path, None, "needs matplotlib, which is not installed", INSTALL) from None


def svg_of(figure: "Figure") -> str:
    """SVG text of a figure, without date or version."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.hashsalt": "shardyard", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
