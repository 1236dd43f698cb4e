"""Digest of a folder's weights, independent of file names and locations."""

import hashlib
from collections.abc import Sequence

from moe.interchange.catalog import catalog
from moe.interchange.hub_folder import HubFolder
from moe.interchange.tensor_reader import TensorReader
from moe.storage.tensor_header import HeaderEntry

_BYTES, _NUM_SAMPLES = 4096, 3


def digest_of(url: str, roots: Sequence[str] | None) -> str:
    """Digest of the names, shapes and dtypes of all tensors, and of 4 KiB at the start, middle and end of each. Detects
    weights that were trained, merged or quantized, but not every change of a single value. Raises SpecError if the
    folder cannot be read."""
    folder_catalog = catalog(HubFolder(url, roots))
    weights, digest = TensorReader(folder_catalog.tensors, folder_catalog.files), hashlib.sha256()
    try:
        for name, tensor in sorted(folder_catalog.tensors.items()):
            for entry in tensor.entries:
                digest.update(repr((name, entry.dtype, entry.shape)).encode())
                last = max(0, entry.num_bytes - _BYTES)
                for sample in range(_NUM_SAMPLES):
                    first = last * sample // (_NUM_SAMPLES - 1)
                    region = (first, min(first + _BYTES, entry.num_bytes))
                    plain = HeaderEntry(name, "U8", (entry.num_bytes,), entry.file, entry.begin)
                    digest.update(weights.raw(plain, (region,)).numpy().tobytes())
    finally:
        weights.close()
    return digest.hexdigest()[:32]
