"""End of a text that a model made."""

from dataclasses import dataclass
from typing import Literal

from moe.records.json_record import JsonRecord

Reason = Literal["end", "max_tokens", "stop"]


@dataclass(frozen=True)
class Ending(JsonRecord):
    """Why a text ended, and what it took."""

    reason: Reason
    """The model's own end, as many tokens as it was to have at most, or a stop string."""
    num_tokens: int
    """Tokens that were made of it, without the one that ended it."""
