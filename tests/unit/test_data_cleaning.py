"""Cleaning rules: what each leaves out, and what each must keep."""

import pytest

from moe.data.pairs.cleaning import RULES, Cleaner, placeholders
from moe.data.pairs.pair import Pair
from moe.data.pairs.scripts import main_script
from moe.data.text import has_unprintable, normalise
from moe.spec import JsonlSpec


def cleaner(**fields):
    return Cleaner(JsonlSpec(corpus="jsonl", paths=("/x",), **fields))


@pytest.mark.parametrize(
    ("rule", "source", "target"),
    [
        ("empty", " \n", "Save"), ("empty", "Speichern", "\t"),
        ("unprintable", "Spei\x07chern", "Save"), ("unprintable", "Speichern", "Sa\ufffdve"),
        ("unprintable", "Spei\ud800chern", "Save"),
        ("untranslated", "Save", " Save "), ("untranslated", "Cafe\u0301", "Café"),
        ("placeholders", "%d Dateien", "%s files"), ("placeholders", "Dateien", "%(count)s files"),
        ("length_ratio", "ja", "yes, certainly, without any doubt whatsoever"),
        ("too_long", "я" * 2000, "a word " * 300),
        (None, "Ja", "Yes"), (None, "Wien", "Vienna, the capital of a"),  # the ratio is ignored below 20 characters
        (None, "می‌خواهم", "I want"),  # a joiner belongs to the word
        (None, "%2$s von %1$s", "%s of %s"), (None, "100 % des fichiers", "100% of files"),
        (None, "<A HREF='/de'>Hilfe</a>", '<a href="/en">Help</a>'), (None, "<Datei> öffnen", "open <file>"),
    ],
)  # fmt: skip
def test_a_pair_is_left_out_by_the_rule_it_breaks(rule, source, target):
    cleaning, pair = cleaner(), Pair("de", source, target)
    assert cleaning.clean([pair]) == ([] if rule else [pair])
    assert cleaning.drop_counts == {name: int(name == rule) for name in RULES}
    assert cleaning.num_read == 1


def test_duplicates_are_found_within_a_language_after_normalisation():
    pairs = [
        Pair("fr", "Café  fermé", "Closed café"), Pair("fr", "Cafe\u0301 fermé\n", "Closed café"),
        Pair("oc", "Café fermé", "Closed café"), Pair("fr", "Café clos", "Closed café"),
    ]  # fmt: skip
    cleaning = cleaner()
    assert [pair.lang for pair in cleaning.clean(pairs)] == ["fr", "oc", "fr"]
    assert (cleaning.drop_counts["duplicate"], cleaning.num_normalised) == (1, 2)


def test_a_language_with_too_few_pairs_is_left_out_and_counted():
    pairs = [Pair("de", f"Satz {index}", f"Sentence {index}") for index in range(3)]
    pairs += [Pair("fr", f"Phrase {index} !", f"Sentence {index}") for index in range(2)]
    cleaning = cleaner(min_pairs_per_language=3)
    assert {pair.lang for pair in cleaning.clean(pairs)} == {"de"}
    assert cleaning.drop_counts["rare_language"] == 2


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("%s von %d", "%d of %s"), ("%5.2f €", "€ %.1f"), ("%(name)s", "%(name)s"), ("选择%s个", "choose %s"),
        ("100 %% sicher", "quite safe"), ("%ld Bytes", "%d bytes"), ("%1 von %2", "%2 of %1"),
        ("{name} hat {0}", "{0} has {name}"), ("{name!r:>10}", "{name}"), ("${HOME}", "$HOME"),
        ("eins<br/>zwei", "one<br>two"), ("a < b > c", "less"),
    ],
)  # fmt: skip
def test_equal_placeholders(source, target):
    assert placeholders(source) == placeholders(target)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("%s", "%s %s"), ("%(name)s", "%(nom)s"), ("%(count)d", "%(count)s"), ("%1 von %2", "%1"),
        ("{name}", "{namn}"), ("<b>fett</b>", "bold"),
    ],
)  # fmt: skip
def test_different_placeholders(source, target):
    assert placeholders(source) != placeholders(target)


def test_normalised_text_is_composed_single_spaced_and_stays_so():
    assert normalise("  E\u0301te\u0301\u00a0\n 2024\u2003") == normalise("Été 2024") == "Été 2024"


def test_characters_that_scripts_need_are_printable():
    assert not has_unprintable("נ\u200fה مى\u200cخ क्\u200dष")
    assert has_unprintable("\x00")


@pytest.mark.parametrize(
    ("text", "script"),
    [("Straße", "Latin"), ("Да %s", "Cyrillic"), ("日本語", "CJK"), ("ひらがな", "Hiragana"), ("12 %", "")],
)
def test_the_main_script_is_that_of_most_letters(text, script):
    assert main_script([text]) == script
