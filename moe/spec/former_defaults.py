"""Values of fields that stored jobs of earlier releases lack."""

from collections.abc import Mapping
from typing import Any


def with_former_defaults(job: Any) -> Any:
    """Return the fields of a stored job, with those that its release lacked set to what that release did, where today's
    default differs. A stored job has every field of its release, so a missing one is newer."""
    match job:
        case {"train": {"optimizer": {"name": _} as optimizer}} if "decay_vectors" not in optimizer:
            train: Mapping[str, Any] = {**job["train"], "optimizer": {**optimizer, "decay_vectors": True}}
            return {**job, "train": train}
    return job
