"""Choice of held-out texts by their hashes alone: it depends neither on the order of a corpus nor on what else is in
it, so that adding data never moves a held-out text into training."""

import hashlib


def hash_text(text: str, key: bytes = b"") -> int:
    """Hash of a text under a key, in 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, key=key).digest(), "big")


def is_held_out(text: str, share: float, key: bytes) -> bool:
    """Whether a text is among the held-out `share` of all texts."""
    return hash_text(text, key) < share * 2**64
