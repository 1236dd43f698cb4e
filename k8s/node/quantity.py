"""Kubernetes' quantities of CPUs and bytes."""

from decimal import Decimal

SUFFIXES = {"": Decimal(1), "m": Decimal("0.001"), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9),
            "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40)}  # fmt: skip


def parse_quantity(text: str | int) -> Decimal:
    """Value of a quantity such as "200m" or "3Gi"."""
    number = str(text).rstrip("kmKMGTi")
    return Decimal(number) * SUFFIXES[str(text)[len(number) :]]
