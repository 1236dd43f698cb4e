"""Form of all text in preparation; choice of held-out texts by their hashes alone.

The choice depends neither on the order of a corpus nor on its other texts: adding data never moves a held-out text into
training.
"""

import hashlib
import re
import unicodedata

_UNPRINTABLE = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ud800-\udfff\ufeff\ufff0-\ufffb\ufffd-\uffff]")


def normalise(text: str) -> str:
    """The text in Unicode's composed form (NFC), each run of white space one space, and none at the ends.

    Composed and decomposed spellings look the same but are different bytes, hence different tokens.
    """
    text = " ".join(text.split())
    return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)


def as_characters(text: str) -> str:
    """Text of the same length, with `?` for each half of a surrogate pair: JSON can have one, but it is not a character
    and has no UTF-8 bytes."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def has_unprintable(text: str) -> bool:
    """True for text with control characters, half surrogates, or signs of a broken decoding.

    Joiners and marks of direction (U+200C to U+200F) are kept: Persian, Malayalam or Hebrew need them.
    """
    return _UNPRINTABLE.search(text) is not None


def hash_text(text: str, key: bytes = b"") -> int:
    """Hash of a text under a key, in 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, key=key).digest(), "big")


def is_held_out(text: str, share: float, key: bytes) -> bool:
    """Whether a text is among the held-out `share` of all texts."""
    return hash_text(text, key) < share * 2**64
