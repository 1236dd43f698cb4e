"""Cleaning: what each rule leaves out and what it must leave in."""

import pytest

from moe.data.pairs.cleaning import RULES, Cleaner
from moe.data.pairs.pair import Pair
from moe.data.pairs.placeholders import placeholders
from moe.data.pairs.scripts import main_script
from moe.data.text import has_unprintable, normalise
from moe.spec import JsonlSpec


def cleaner(**fields):
    return Cleaner(JsonlSpec(corpus="jsonl", paths=("/x",), **fields))


@pytest.mark.parametrize(
    ("rule", "source", "target"),
    [
        ("empty", " \n", "Save"),
        ("empty", "Speichern", "\t"),
        ("unprintable", "Spei\x07chern", "Save"),
        ("unprintable", "Speichern", "Sa�ve"),
        ("unprintable", "Spei\ud800chern", "Save"),
        ("untranslated", "Save", " Save "),
        ("untranslated", "Cafe\u0301", "Café"),
        ("placeholders", "%d Dateien", "%s files"),
        ("placeholders", "Dateien", "%(count)s files"),
        ("length_ratio", "ja", "yes, certainly, without any doubt whatsoever"),
        ("too_long", "я" * 2000, "a word " * 300),
    ],
)
def test_a_pair_is_left_out_under_the_rule_it_breaks(rule, source, target):
    cleaning = cleaner()
    assert cleaning.clean([Pair("de", source, target)]) == []
    assert cleaning.drop_counts == {**dict.fromkeys(RULES, 0), rule: 1}
    assert cleaning.read == 1


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("Ja", "Yes"),
        ("Wien", "Vienna, the capital of a"),  # a name's ratio means nothing below 20 characters
        ("می‌خواهم", "I want"),  # a joiner belongs to the word
        ("%2$s von %1$s", "%s of %s"),
        ("100 % des fichiers", "100% of files"),
        ("<A HREF='/de'>Hilfe</a>", '<a href="/en">Help</a>'),
        ("<Datei> öffnen", "open <file>"),
    ],
)
def test_a_good_pair_stays(source, target):
    assert cleaner().clean([Pair("de", source, target)]) == [Pair("de", source, target)]


def test_duplicates_are_one_language_s_own_and_are_seen_through_white_space_and_composition():
    pairs = [
        Pair("fr", "Café  fermé", "Closed café"),
        Pair("fr", "Cafe\u0301 fermé\n", "Closed café"),
        Pair("oc", "Café fermé", "Closed café"),
        Pair("fr", "Café clos", "Closed café"),
    ]
    cleaning = cleaner()
    kept = cleaning.clean(pairs)
    assert [pair.lang for pair in kept] == ["fr", "oc", "fr"]
    assert cleaning.drop_counts["duplicate"] == 1
    assert cleaning.num_normalised == 2


def test_a_language_with_too_few_pairs_is_left_out_and_counted():
    pairs = [Pair("de", f"Satz {index}", f"Sentence {index}") for index in range(3)]
    pairs += [Pair("fr", f"Phrase {index} !", f"Sentence {index}") for index in range(2)]
    cleaning = cleaner(min_pairs_per_language=3)
    assert {pair.lang for pair in cleaning.clean(pairs)} == {"de"}
    assert cleaning.drop_counts["rare_language"] == 2


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("%s von %d", "%d of %s", True),
        ("%s", "%s %s", False),
        ("%5.2f €", "€ %.1f", True),
        ("%(name)s", "%(name)s", True),
        ("%(name)s", "%(nom)s", False),
        ("%(count)d", "%(count)s", False),
        ("选择%s个", "choose %s", True),
        ("100 %% sicher", "quite safe", True),
        ("%ld Bytes", "%d bytes", True),
        ("%1 von %2", "%2 of %1", True),
        ("%1 von %2", "%1", False),
        ("{name} hat {0}", "{0} has {name}", True),
        ("{name!r:>10}", "{name}", True),
        ("{name}", "{namn}", False),
        ("${HOME}", "$HOME", True),
        ("<b>fett</b>", "bold", False),
        ("eins<br/>zwei", "one<br>two", True),
        ("a < b > c", "less", True),
    ],
)
def test_placeholders_are_names_types_and_counts(one, other, alike):
    assert (placeholders(one) == placeholders(other)) is alike


def test_normalised_text_is_composed_single_spaced_and_stays_so():
    text = normalise("  E\u0301te\u0301\u00a0\n 2024\u2003")
    assert text == "Été 2024"
    assert normalise(text) == text


def test_signs_that_scripts_need_are_printable():
    assert not has_unprintable("נ\u200fה مى\u200cخ क्\u200dष")
    assert has_unprintable("\x00")


@pytest.mark.parametrize(
    ("text", "script"),
    [("Straße", "Latin"), ("Да %s", "Cyrillic"), ("日本語", "CJK"), ("ひらがな", "Hiragana"), ("12 %", "")],
)
def test_the_script_is_the_one_most_letters_are_in(text, script):
    assert main_script([text]) == script
