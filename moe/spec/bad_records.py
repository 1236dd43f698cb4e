"""Treatment of unusable records in a user's files."""

from typing import Literal

from pydantic import Field

from moe.spec.base import NonNegative, Spec


class BadRecordsFields(Spec):
    """Fields of every corpus of the user's own files."""

    on_bad: Literal["stop", "skip"] = "stop"
    """Treatment of an unusable record, such as a line that is not JSON. `stop` refuses the corpus and lists the kinds
    of such records with their numbers; `skip` leaves them out and counts them."""
    max_bad_share: NonNegative = Field(default=0.01, lt=1)
    """Share of the records that `skip` may leave out: with more, the corpus is refused."""


def fields_without_effect(data: Spec) -> set[str]:
    """Fields of a corpus without effect: those about bad records, unless they are skipped."""
    skips = isinstance(data, BadRecordsFields) and data.on_bad == "skip"
    return set() if skips else set(BadRecordsFields.model_fields)
