"""Message catalogs: the pairs of their entries, and the catalogs that are read."""

import struct

import polib
import pytest

from moe.data.pairs import check
from moe.data.pairs.catalogs import Catalogs
from moe.data.pairs.gettext_files import UnreadableCatalog, read_catalog
from moe.spec import CatalogsSpec
from tests.refusals import expect_problem, expect_problems

POLISH = "nplurals=3; plural=(n==1 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2);"
SINGULAR_LAST = "nplurals=3; plural=(n==1 ? 2 : n==2 ? 1 : 0);"
PLAIN = {("Plik", "File"), ("Otwarte", "Open")}


def book_of(plural_forms, *entries):
    book = polib.POFile()
    book.metadata = {"Content-Type": "text/plain; charset=utf-8", "Plural-Forms": plural_forms}
    book.extend(polib.POEntry(**entry) for entry in entries)
    return book


def catalog(plural_forms="nplurals=2; plural=(n != 1);"):
    return book_of(
        plural_forms, {"msgid": "File", "msgstr": "Plik"}, {"msgid": "Open", "msgstr": "Otwarte", "msgctxt": "state"},
        {"msgid": "%d day", "msgid_plural": "%d days", "msgstr_plural": {0: "%d dzień", 1: "%d dni", 2: "%d dnia"}},
        {"msgid": "Not yet", "msgstr": ""}, {"msgid": "Guessed", "msgstr": "Zgadnięte", "flags": ["fuzzy"]},
    )  # fmt: skip


ONE_FORM = book_of("nplurals=1; plural=0;", {"msgid": "a day", "msgid_plural": "%d days", "msgstr_plural": {0: "%d日"}})


@pytest.mark.parametrize(
    ("book", "pairs"),
    [
        (catalog(POLISH), PLAIN | {("%d dzień", "%d day"), ("%d dni", "%d days"), ("%d dnia", "%d days")}),
        (catalog(SINGULAR_LAST), PLAIN | {("%d dnia", "%d day"), ("%d dni", "%d days"), ("%d dzień", "%d days")}),
        (ONE_FORM, {("%d日", "%d days")}),
    ],
    ids=["Polish", "singular last", "one form"],
)
@pytest.mark.parametrize("kind", ["mo", "po"])
def test_plurals_are_paired_by_the_catalog_s_rule_and_contexts_and_fuzzy_entries_left_out(tmp_path, kind, book, pairs):
    path = tmp_path / f"x.{kind}"
    (book.save_as_mofile if kind == "mo" else book.save)(str(path))
    assert set(read_catalog(path)) == pairs


def test_big_endian_catalogs_and_other_charsets_are_read(tmp_path):
    header, message, translation = b"Content-Type: text/plain; charset=iso-8859-2\n", b"Year", "Rok ł".encode("latin2")
    texts = [b"", message, header, translation]
    starts = [28 + 32 + sum(len(text) + 1 for text in texts[:index]) for index in range(4)]
    table = [number for text, start in zip(texts, starts, strict=True) for number in (len(text), start)]
    content = struct.pack(">7I", 0x950412DE, 0, 2, 28, 44, 0, 0) + struct.pack(">8I", *table)
    (tmp_path / "x.mo").write_bytes(content + b"".join(text + b"\0" for text in texts))
    assert list(read_catalog(tmp_path / "x.mo")) == [("Rok ł", "Year")]


@pytest.mark.parametrize("damage", [lambda b: b"PK" + b[2:], lambda b: b[:10], lambda b: b[:-20], lambda b: b""])
def test_a_damaged_catalog_is_refused(tmp_path, damage):
    path = tmp_path / "x.mo"
    catalog().save_as_mofile(str(path))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UnreadableCatalog):
        list(read_catalog(path))


def system_catalogs(tmp_path, *languages):
    for language in languages:
        folder = tmp_path / "locale" / language / "LC_MESSAGES"
        folder.mkdir(parents=True)
        catalog().save_as_mofile(str(folder / "app.mo"))
    return tmp_path / "locale"


def system_corpus(folder, *languages):
    spec = CatalogsSpec(corpus="catalogs", sources=("system",), languages=languages or None)
    return Catalogs(spec, system_folder=folder)


def test_system_catalogs_are_read_english_ones_left_out_and_damaged_ones_reported(tmp_path):
    folder = system_catalogs(tmp_path, "pl", "pl_PL", "sr@latin", "en_GB", "en@quot", "csb")
    (folder / "csb" / "LC_MESSAGES" / "app.mo").write_bytes(b"broken")
    corpus = system_corpus(folder)
    assert {pair.lang for pair in corpus.pairs()} == {"pl", "pl_PL", "sr@latin"}
    assert corpus.facts()["unreadable"] == ["system/csb/LC_MESSAGES/app.mo is truncated"]
    with expect_problem("not_found", "data.sources", ["system"]):
        system_corpus(tmp_path / "none").check()


def test_the_fingerprint_follows_the_content_of_the_languages_that_are_read(tmp_path):
    folder = system_catalogs(tmp_path, "pl", "cs")
    all_languages, polish = (system_corpus(folder, *languages).fingerprint() for languages in ((), ("pl",)))
    book_of(POLISH, {"msgid": "New", "msgstr": "Nové"}).save_as_mofile(str(folder / "cs" / "LC_MESSAGES" / "app.mo"))
    assert system_corpus(folder).fingerprint() != all_languages
    assert system_corpus(folder, "pl").fingerprint() == polish


def test_pip_catalogs_have_the_world_s_languages_and_no_english():
    corpus = Catalogs(CatalogsSpec(corpus="catalogs", languages=("de", "zh_CN", "zh_Hans", "pt_BR")))
    pairs = list(corpus.pairs())
    assert {pair.lang for pair in pairs} == {"de", "zh_CN", "zh_Hans", "pt_BR"}
    assert ("de", "Deutschland", "Germany") in pairs
    assert corpus.facts()["unreadable"] == []
    with expect_problems([("not_a_choice", "data.languages[1]", "pt_PT"), ("not_a_choice", "data.languages[2]", "en")]):
        check(CatalogsSpec(corpus="catalogs", languages=("de", "pt_PT", "en")), roots=())
