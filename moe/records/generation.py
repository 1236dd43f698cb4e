"""How a generated text ended."""

from dataclasses import dataclass
from typing import Literal

from moe.records.json_record import JsonRecord

Reason = Literal["end", "max_tokens", "stop"]


@dataclass(frozen=True)
class Ending(JsonRecord):
    """Why a generated text ended, and its length."""

    reason: Reason
    """`end`: an end-of-text token; `max_tokens`: the token limit; `stop`: a stop string."""
    num_tokens: int
    """Generated tokens, without the end-of-text token."""
