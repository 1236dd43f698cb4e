"""Values of fields that stored jobs of earlier releases lack."""

from collections.abc import Mapping
from typing import Any


def with_former_defaults(job: Any) -> Any:
    """Return a stored job's plain data, with fields added since then set to what its release did where that is not
    their default now. Stored jobs have every field of their release, so that an absent one is newer."""
    match job:
        case {"train": {"optimizer": {"name": _} as optimizer}} if "decay_vectors" not in optimizer:
            train: Mapping[str, Any] = {**job["train"], "optimizer": {**optimizer, "decay_vectors": True}}
            return {**job, "train": train}
    return job
