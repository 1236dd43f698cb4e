"""The writing system of a language, determined from its text."""

import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache


def main_script(texts: Iterable[str]) -> str:
    """Script of most letters of the texts: `Latin`, `Cyrillic`, `CJK`, ...; empty without letters.

    Format fields and untranslated names count too, so a language in another script still shows some Latin.
    """
    scripts: Counter[str] = Counter()
    for character, count in Counter("".join(texts)).items():
        if character.isalpha():
            scripts[_script(character)] += count
    return max(scripts, key=lambda script: (scripts[script], script)) if scripts else ""


@cache
def _script(letter: str) -> str:
    """First word of a letter's Unicode name: `Latin` for `LATIN SMALL LETTER A`."""
    word = unicodedata.name(letter, "").partition(" ")[0]
    return word if word == "CJK" else word.capitalize()
