"""Digest of a folder's weights: another model's differs, whatever its files are called and wherever they lie."""

import hashlib
from collections.abc import Sequence

from moe.interchange.catalog import catalog
from moe.interchange.headers import Entry
from moe.interchange.hub_folder import HubFolder
from moe.interchange.stored import Stored

_BYTES = 4096
"""Of each tensor: trained, merged or quantised otherwise, it differs in nearly all of its values."""


def digest_of(url: str, roots: Sequence[str] | None) -> str:
    """Of the names, shapes and dtypes of all tensors and of the beginning of each: not every byte is read. Raises
    SpecError for a folder that cannot be read."""
    found = catalog(HubFolder(url, roots))
    stored, digest = Stored(found.held, found.files), hashlib.sha256()
    try:
        for name in sorted(found.held):
            entry = found.held[name].entry
            digest.update(repr((name, entry.dtype, entry.shape)).encode())
            begin = Entry(name, "U8", (entry.num_bytes,), entry.file, entry.begin)
            digest.update(stored.raw(begin, ((0, min(_BYTES, entry.num_bytes)),)).numpy().tobytes())
    finally:
        stored.close()
    return digest.hexdigest()[:32]
