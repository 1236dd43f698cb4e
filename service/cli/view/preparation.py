"""Data preparation of a run, in words."""

from typing import TYPE_CHECKING

from service.cli.view.amounts import duration
from service.cli.view.printable import printable

if TYPE_CHECKING:
    from moe.records import PreparationRecord


def describe_preparation(preparation: "PreparationRecord") -> str:
    """Progress of data preparation, with the estimated time left."""
    left = preparation.seconds_left
    return printable(preparation.in_words()) + (f"  {duration(left)} left" if left is not None else "")
