"""Client settings, the only place that reads them from the environment."""

import os
from dataclasses import dataclass, field

DEFAULT_URL = "http://127.0.0.1:8321"


@dataclass(frozen=True)
class ClientSettings:
    """`SHARDYARD_URL` and `SHARDYARD_TOKEN`, or defaults. No pydantic, since every command reads them."""

    url: str = field(default_factory=lambda: os.environ.get("SHARDYARD_URL", DEFAULT_URL))
    token: str | None = field(default_factory=lambda: os.environ.get("SHARDYARD_TOKEN"), repr=False)
