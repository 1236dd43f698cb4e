"""Item of a section, and its digest."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Item:
    """A name, and JSON content that must not change."""

    name: str
    content: Any
    numbers: tuple[float, ...] = ()
    """Figures that `--tolerance` compares where digests differ."""

    @property
    def text(self) -> str:
        """Canonical JSON of the content."""
        return json.dumps(self.content, sort_keys=True, indent=1, ensure_ascii=False, default=str)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


Items = Iterator[Item]
