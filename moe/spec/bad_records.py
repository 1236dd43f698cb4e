"""Handling of unusable records in a user's files."""

from typing import Literal

from pydantic import Field

from moe.spec.base import NonNegative, Spec


class BadRecordsFields(Spec):
    """Fields of every corpus of the user's own files."""

    on_bad: Literal["stop", "skip"] = "stop"
    """Unusable records, such as lines that are not JSON: `stop` refuses the corpus and counts them by kind; `skip`
    drops and counts them."""
    max_bad_share: NonNegative = Field(default=0.01, lt=1)
    """Maximum share of records that `skip` may drop; above it, the corpus is refused."""


def fields_without_effect(data: Spec) -> set[str]:
    """Fields of a corpus without effect: those about bad records, unless they are skipped."""
    skips = isinstance(data, BadRecordsFields) and data.on_bad == "skip"
    return set() if skips else set(BadRecordsFields.model_fields)
