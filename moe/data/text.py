"""The form in which text enters everything that follows."""

import re
import unicodedata

_UNPRINTABLE = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ud800-\udfff\ufeff\ufff0-\ufffb\ufffd-\uffff]")


def normalise(text: str) -> str:
    """The text in Unicode's composed form (NFC), each run of white space one space, and none at the ends.

    Composed and decomposed spellings look alike but are different bytes, hence different tokens.
    """
    text = " ".join(text.split())
    return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)


def as_characters(text: str) -> str:
    """Text of the same length, with `?` for each half of a surrogate pair: JSON can have one, but it is no character
    and has no UTF-8 bytes."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def has_unprintable(text: str) -> bool:
    """True for text with control characters, half surrogates, or signs of a broken decoding.

    Joiners and marks of direction (U+200C to U+200F) are kept: Persian, Malayalam or Hebrew need them.
    """
    return _UNPRINTABLE.search(text) is not None
