"""Kubernetes quantities: bytes and cores as its users write them."""

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator

from moe.spec.errors import RuleError

_QUANTITY = re.compile(r"(?P<number>\d+(\.\d*)?|\.\d+)(?P<suffix>|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)")
_FACTORS = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", start=1)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", start=1)},
}


_MAX_CORES = 1_000_000
_MAX_BYTES = 2**60


def parse_quantity(quantity: Any) -> Decimal:
    """Value of a quantity: `16Gi`, `500m`, `8` or a number. Raises RuleError."""
    match = None if isinstance(quantity, bool) else _QUANTITY.fullmatch(str(quantity).strip())
    if match is None:
        raise RuleError("invalid_value", "must be a quantity of Kubernetes", "write it as 16Gi, 500m or 8")
    return Decimal(match["number"]) * _FACTORS[match["suffix"]]


def _parse_bytes(quantity: Any) -> int:
    size = parse_quantity(quantity)
    if not 1 <= size <= _MAX_BYTES or size != int(size):
        raise RuleError("out_of_range", "must be a positive whole number of bytes, up to 1Ei", "write it as 16Gi")
    return int(size)


def _parse_cores(quantity: Any) -> float:
    cores = parse_quantity(quantity)
    if not 0 < cores <= _MAX_CORES or cores * 1000 != int(cores * 1000):
        raise RuleError("out_of_range", "must be a positive number of thousandths of a core, up to a million cores",
                        "write it as 500m or 8")  # fmt: skip
    return float(cores)


MemoryBytes = Annotated[int, BeforeValidator(_parse_bytes)]
"""Bytes, also written as `16Gi`."""
Cores = Annotated[float, BeforeValidator(_parse_cores)]
"""CPU cores, also written as `500m`."""


def format_bytes(size_bytes: int) -> str:
    """Bytes as a quantity with the largest exact binary suffix."""
    suffixes = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
    power = 0
    while power < len(suffixes) - 1 and size_bytes % 1024 == 0 and size_bytes:
        size_bytes //= 1024
        power += 1
    return f"{size_bytes}{suffixes[power]}"


def format_cores(cores: float) -> str:
    """Cores as a quantity: `8`, `1500m`."""
    millicores = round(cores * 1000)
    return f"{millicores // 1000}" if millicores % 1000 == 0 else f"{millicores}m"
