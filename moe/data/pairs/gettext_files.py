"""The messages of one gettext catalog, compiled (.mo) or not (.po)."""

import gettext
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import polib

_MAGIC = 0x950412DE
_CONTEXT_END = "\x04"


class UnreadableCatalog(ValueError):
    """A catalog that is damaged, or not a catalog."""


def read_catalog(path: Path) -> Iterator[tuple[str, str]]:
    """(translation, message) of every translated entry, with contexts left out and plurals paired.

    A message with a plural yields its singular with the form for one, and its plural with every other form. Raises
    UnreadableCatalog.
    """
    entries = _read_po(path) if path.suffix == ".po" else _read_mo(path.read_bytes())
    plural_form_of_one = 0
    for message, translation in entries:
        if not message:
            plural_form_of_one = _form_of_one(translation)
            continue
        message = message.rpartition(_CONTEXT_END)[2]
        if "\0" not in message:
            yield translation, message
            continue
        singular, _, plural = message.partition("\0")
        forms = translation.split("\0")
        for index, form in enumerate(forms):
            yield form, singular if index == plural_form_of_one and len(forms) > 1 else plural


def _read_mo(content: bytes) -> Iterator[tuple[str, str]]:
    """(message, translation) entries of a compiled catalog, unprocessed; the empty message translates to the header."""
    try:
        order = "<" if struct.unpack_from("<I", content)[0] == _MAGIC else ">"
        magic, _, num_entries, messages_at, translations_at = struct.unpack_from(f"{order}5I", content)
        if magic != _MAGIC:
            raise UnreadableCatalog("is not a compiled catalog")
        messages = struct.unpack_from(f"{order}{2 * num_entries}I", content, messages_at)
        translations = struct.unpack_from(f"{order}{2 * num_entries}I", content, translations_at)
    except struct.error:
        raise UnreadableCatalog("is truncated") from None
    charset = "utf-8"
    for index in range(num_entries):
        length, start = messages[2 * index : 2 * index + 2]
        message = content[start : start + length]
        translated_length, translated_start = translations[2 * index : 2 * index + 2]
        translation = content[translated_start : translated_start + translated_length]
        if len(message) != length or len(translation) != translated_length:
            raise UnreadableCatalog("is truncated")
        if not message:
            charset = _charset(translation)
        try:
            yield message.decode(charset), translation.decode(charset)
        except (UnicodeDecodeError, LookupError) as error:
            raise UnreadableCatalog(f"is not text in its charset: {error}") from None


def _read_po(path: Path) -> Iterator[tuple[str, str]]:
    """The same for an uncompiled catalog; entries that are fuzzy, obsolete or untranslated are left out."""
    try:
        catalog = polib.pofile(str(path))
    except (OSError, ValueError, LookupError) as error:
        raise UnreadableCatalog(str(error)) from None
    yield "", "\n".join(f"{key}: {value}" for key, value in catalog.metadata.items())
    for entry in catalog.translated_entries():
        if entry.msgid_plural:
            forms = [entry.msgstr_plural[index] for index in sorted(entry.msgstr_plural)]
            yield f"{entry.msgid}\0{entry.msgid_plural}", "\0".join(forms)
        else:
            yield entry.msgid, entry.msgstr


def _charset(header: bytes) -> str:
    for line in header.decode("utf-8", "replace").splitlines():
        if line.lower().startswith("content-type:") and "charset=" in line:
            return line.partition("charset=")[2].strip() or "utf-8"
    return "utf-8"


def _form_of_one(header: str) -> int:
    for line in header.splitlines():
        if line.lower().startswith("plural-forms:"):
            rule = line.partition("plural=")[2].strip().rstrip(";").strip()
            return _plural_rule(rule)(1) if rule else 0
    return 0


@cache
def _plural_rule(rule: str) -> Callable[[int], int]:
    """The rule `n != 1`, `n%10==1 && ...` as a function of n; the English rule if it cannot be parsed."""
    try:
        return gettext.c2py(rule)
    except ValueError:
        return lambda n: int(n != 1)
