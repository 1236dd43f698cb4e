"""Labels of held-out tokens, by which expert loads are counted."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe.data.conversations.conversation import TOKEN_ROLES
from moe.data.sequences import SequenceStore
from moe.records import LabelKind

_ROLE_NAMES = (*TOKEN_ROLES, "no role")


class HeldOutLabels:
    """A label for each source, or for each role of its tokens if it has conversations."""

    def __init__(self, stores: Mapping[str, SequenceStore]) -> None:
        """`stores`: held-out sequences by source."""
        self._stores = stores
        self.kind: LabelKind = "role" if any(store.role_indices for store in stores.values()) else "source"
        self.names = list[str]()
        self._first = dict[str, int]()
        """Index in `names` of each source's first label."""
        for source, store in stores.items():
            self._first[source] = len(self.names)
            self.names += [f"{source}: {_ROLE_NAMES[index]}" for index in store.role_indices] or [source]

    def indices(self, source: str, rows: NDArray[np.int64]) -> Tensor:
        """Indices in `names`, int64, of some rows of a source: of each row `[b]`, or of each token `[b, L]`."""
        store, first = self._stores[source], self._first[source]
        if not store.role_indices:
            return torch.full((len(rows),), first)
        # Padding, which has no role and makes no choices, may be beyond them.
        return first + torch.from_numpy(np.searchsorted(store.role_indices, store.roles(rows)))
