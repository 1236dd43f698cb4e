"""Records that a plan consists of: plain data. No torch."""

from dataclasses import asdict, dataclass

from moe.sharding.placement import AxisPlacement, Placements
from moe.spec import spec_error


@dataclass(frozen=True)
class Collective:
    """One collective of a step."""

    kind: str
    axis: str
    num_bytes: int
    """Bytes that one rank sends; of a gather, bytes that it receives."""
    tensor: str
    """Name of a parameter, `gradient of NAME`, `inputs.0`, or of an operator whose result it is."""
    phase: str
    where: str | None
    """The user's line whose operator needs it."""
    block: str | None = None
    """Path of the module that needs it; for a parameter or a gradient, the module that has the parameter."""


@dataclass(frozen=True)
class StoredTensor:
    """A parameter or a buffer."""

    name: str
    kind: str
    shape: list[int]
    dtype: str


@dataclass(frozen=True)
class Memory:
    """Predicted bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    kept: int
    """Bytes that the forward pass saves for the backward pass."""
    inputs: int
    largest_operator: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class PricedLayout:
    """A layout of a mesh that was priced."""

    mesh: dict[str, int]
    step_s: float | None
    """Predicted seconds of a step; None if nothing fits in memory."""
    memory_bytes: int | None
    micro_batches: int = 1
    recompute: bool = False
    layout: str = ""
    """`data parallel`, `fully sharded`, `searched` or `from hints`; empty if nothing fits."""


def in_words(placements: Placements) -> str:
    """Placements as text: `S(0) R`."""
    return " ".join(map(str, placements))


def parse_placements(text: str) -> Placements:
    """Placements from text. Raises SpecError for other text."""
    return tuple(_axis_placement(word) for word in text.split())


def _axis_placement(text: str) -> AxisPlacement:
    if text == "R":
        return AxisPlacement()
    kind, _, rest = text.partition("(")
    value = rest.rstrip(")")
    if kind == "S" and value.isdigit():
        return AxisPlacement(dim=int(value))
    if kind == "P" and value in ("sum", "max", "min"):
        return AxisPlacement(combine=value)  # type: ignore[arg-type]
    raise spec_error("invalid_syntax", "plan", text, "is not a placement", "plan again")
