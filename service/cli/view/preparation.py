"""Data preparation of a run, in words."""

from typing import TYPE_CHECKING

from service.cli.view.amounts import duration
from service.cli.view.printable import printable

if TYPE_CHECKING:
    from moe.records import PreparationRecord


def preparation_in_words(preparation: "PreparationRecord") -> str:
    """Progress of data preparation, with an estimate of the time left if there is one."""
    left = preparation.seconds_left
    return printable(preparation.in_words()) + (f"  {duration(left)} left" if left is not None else "")
