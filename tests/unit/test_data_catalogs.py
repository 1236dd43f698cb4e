"""Message catalogs: what a catalog's entries become, and which catalogs are read."""

import struct

import polib
import pytest

from moe.data.pairs import check
from moe.data.pairs.catalogs import Catalogs
from moe.data.pairs.gettext_files import UnreadableCatalog, read_catalog
from moe.spec import CatalogsSpec
from tests.refusals import refused, refused_for

POLISH = "nplurals=3; plural=(n==1 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2);"


def catalog(plural_forms="nplurals=2; plural=(n != 1);"):
    book = polib.POFile()
    book.metadata = {"Content-Type": "text/plain; charset=utf-8", "Plural-Forms": plural_forms}
    book.append(polib.POEntry(msgid="File", msgstr="Plik"))
    book.append(polib.POEntry(msgid="Open", msgstr="Otwarte", msgctxt="state"))
    book.append(
        polib.POEntry(msgid="%d day", msgid_plural="%d days", msgstr_plural={0: "%d dzień", 1: "%d dni", 2: "%d dnia"})
    )
    book.append(polib.POEntry(msgid="Not yet", msgstr=""))
    book.append(polib.POEntry(msgid="Guessed", msgstr="Zgadnięte", flags=["fuzzy"]))
    return book


@pytest.mark.parametrize("kind", ["mo", "po"])
def test_contexts_are_left_out_plurals_are_paired_and_fuzzy_entries_are_not_read(tmp_path, kind):
    path = tmp_path / f"x.{kind}"
    (catalog(POLISH).save_as_mofile if kind == "mo" else catalog(POLISH).save)(str(path))
    assert set(read_catalog(path)) == {
        ("Plik", "File"),
        ("Otwarte", "Open"),
        ("%d dzień", "%d day"),
        ("%d dni", "%d days"),
        ("%d dnia", "%d days"),
    }


def test_the_singular_is_the_form_that_the_catalog_s_own_rule_gives_for_one(tmp_path):
    path = tmp_path / "x.mo"
    catalog("nplurals=3; plural=(n==1 ? 2 : n==2 ? 1 : 0);").save_as_mofile(str(path))
    assert ("%d dnia", "%d day") in set(read_catalog(path))


def test_a_language_with_one_form_has_it_paired_with_the_plural(tmp_path):
    book = polib.POFile()
    book.metadata = {"Content-Type": "text/plain; charset=utf-8", "Plural-Forms": "nplurals=1; plural=0;"}
    book.append(polib.POEntry(msgid="a day", msgid_plural="%d days", msgstr_plural={0: "%d日"}))
    book.save_as_mofile(str(tmp_path / "x.mo"))
    assert list(read_catalog(tmp_path / "x.mo")) == [("%d日", "%d days")]


def test_big_endian_catalogs_and_other_charsets_are_read(tmp_path):
    header, message, translation = (
        b"Content-Type: text/plain; charset=iso-8859-2\n",
        b"Year",
        "Rok ł".encode("latin2"),
    )
    texts = [b"", message, header, translation]
    starts = [28 + 32 + sum(len(text) + 1 for text in texts[:index]) for index in range(4)]
    table = [number for text, start in zip(texts, starts, strict=True) for number in (len(text), start)]
    content = struct.pack(">7I", 0x950412DE, 0, 2, 28, 44, 0, 0) + struct.pack(">8I", *table)
    (tmp_path / "x.mo").write_bytes(content + b"".join(text + b"\0" for text in texts))
    assert list(read_catalog(tmp_path / "x.mo")) == [("Rok ł", "Year")]


@pytest.mark.parametrize("damage", [lambda b: b"PK" + b[2:], lambda b: b[:10], lambda b: b[:-20], lambda b: b""])
def test_a_damaged_catalog_is_named_as_such(tmp_path, damage):
    path = tmp_path / "x.mo"
    catalog().save_as_mofile(str(path))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UnreadableCatalog):
        list(read_catalog(path))


def system_catalogs(tmp_path, *langs):
    for lang in langs:
        folder = tmp_path / "locale" / lang / "LC_MESSAGES"
        folder.mkdir(parents=True)
        catalog().save_as_mofile(str(folder / "app.mo"))
    return tmp_path / "locale"


def test_system_catalogs_are_read_english_ones_left_out_and_damaged_ones_reported(tmp_path):
    folder = system_catalogs(tmp_path, "pl", "pl_PL", "sr@latin", "en_GB", "en@quot", "csb")
    (folder / "csb" / "LC_MESSAGES" / "app.mo").write_bytes(b"broken")
    corpus = Catalogs(CatalogsSpec(corpus="catalogs", sources=("system",)), system_folder=folder)
    assert {pair.lang for pair in corpus.pairs()} == {"pl", "pl_PL", "sr@latin"}
    assert corpus.facts()["unreadable"] == ["system/csb/LC_MESSAGES/app.mo is truncated"]


def test_the_fingerprint_follows_content_and_only_the_languages_read(tmp_path):
    folder = system_catalogs(tmp_path, "pl", "cs")

    def fingerprint(*languages):
        spec = CatalogsSpec(corpus="catalogs", sources=("system",), languages=languages or None)
        return Catalogs(spec, system_folder=folder).fingerprint()

    everything, polish = fingerprint(), fingerprint("pl")
    book = catalog()
    book.append(polib.POEntry(msgid="New", msgstr="Nové"))
    book.save_as_mofile(str(folder / "cs" / "LC_MESSAGES" / "app.mo"))
    assert fingerprint() != everything
    assert fingerprint("pl") == polish


def test_pip_catalogs_have_the_world_s_languages_and_nothing_in_english():
    corpus = Catalogs(CatalogsSpec(corpus="catalogs", languages=("de", "zh_CN", "zh_Hans", "pt_BR")))
    pairs = list(corpus.pairs())
    assert {pair.lang for pair in pairs} == {"de", "zh_CN", "zh_Hans", "pt_BR"}
    assert ("de", "Deutschland", "Germany") in pairs
    assert corpus.facts()["unreadable"] == []


def test_a_language_without_catalogs_is_refused_with_near_ones():
    spec = CatalogsSpec(corpus="catalogs", languages=("de", "pt_PT", "en"))
    with refused_for(
        [("not_a_choice", "data.languages[1]", "pt_PT"), ("not_a_choice", "data.languages[2]", "en")]
    ) as error:
        check(spec, roots=())
    assert [problem.path for problem in error.value.problems] == ["data.languages[1]", "data.languages[2]"]
    assert "'pt_PT') has no pairs in this corpus; use one of pt, pt_BR" in str(error.value)


def test_a_machine_without_system_catalogs_is_told_so(tmp_path):
    corpus = Catalogs(CatalogsSpec(corpus="catalogs", sources=("system",)), system_folder=tmp_path / "none")
    with refused("not_found", "data.sources", ["system"]):
        corpus.check()
