"""Held-out sets: what the model must not learn from, by message and by pair."""

from hypothesis import given
from hypothesis import strategies as st

from moe.data.pairs.held_out import CorpusPart, HeldOut
from moe.data.pairs.pair import Pair
from moe.spec import JsonlSpec

LANGS = ("de", "fr", "ru")
SHARE = st.sampled_from([0, 0.2, 0.49])
corpora = st.lists(
    st.builds(
        Pair, st.sampled_from(LANGS), st.sampled_from("abcd"),
        st.sampled_from(["Save", "save!", "Open", "Close", "…", "?"]),
    ), unique=True,
)  # fmt: skip
choices = st.fixed_dictionaries({"seed": st.integers(0, 50), "messages": SHARE, "pairs": SHARE})


def parts(corpus, seed=0, messages=0.1, pairs=0.1):
    spec = JsonlSpec(corpus="jsonl", paths=("/x",), held_out_messages=messages, held_out_pairs=pairs)
    chooser = HeldOut(spec, seed)
    return dict(zip(corpus, chooser.assign(corpus, chooser.candidates(corpus)), strict=True))


@given(corpora, choices, st.randoms(use_true_random=False))
def test_parts_are_disjoint_by_message_or_pair_in_any_order_of_the_corpus(pairs, choice, random):
    chosen = parts(pairs, **choice)
    trained = {(pair.target, pair.lang) for pair, part in chosen.items() if part is CorpusPart.TRAIN}
    for pair, part in chosen.items():
        in_training = {lang for lang in LANGS if (pair.target, lang) in trained}
        assert part is not CorpusPart.UNSEEN or not in_training
        assert part is not CorpusPart.SEEN or in_training - {pair.lang}
    assert parts(random.sample(pairs, len(pairs)), **choice) == chosen


@given(corpora, corpora, choices)
def test_added_data_moves_no_held_out_pair_into_training(pairs, added, choice):
    after = parts(list(dict.fromkeys([*added, *pairs])), **choice)
    for pair, part in parts(pairs, **choice).items():
        assert part is CorpusPart.TRAIN or after[pair] is part


def test_shares_are_as_requested_and_another_seed_chooses_others():
    pairs = [
        Pair(lang, f"{lang} {message} {variant}", f"message {message}")
        for message in range(400) for lang in LANGS for variant in range(1 + message % 2)
    ]  # fmt: skip
    chosen = list(parts(pairs).values())
    assert 0.07 < chosen.count(CorpusPart.UNSEEN) / len(pairs) < 0.13
    assert 0.06 < chosen.count(CorpusPart.SEEN) / len(pairs) < 0.12
    assert list(parts(pairs, seed=1).values()) != chosen
    assert set(parts(pairs, messages=0, pairs=0).values()) == {CorpusPart.TRAIN}


def test_messages_that_differ_in_case_and_punctuation_are_held_out_together():
    forms = ("save {}", "Save {}…")
    corpus = [Pair("de", f"{index}{form}", form.format(index)) for index in range(200) for form in forms]
    chosen = list(parts(corpus, pairs=0).values())
    assert chosen[::2] == chosen[1::2]
    assert CorpusPart.UNSEEN in chosen
