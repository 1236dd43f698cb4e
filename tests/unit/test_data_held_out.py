"""Held-out sets by message and by pair, which the model must not learn from."""

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
    part_of_pair = parts(pairs, **choice)
    training_targets = {(pair.target, pair.lang) for pair, part in part_of_pair.items() if part is CorpusPart.TRAIN}
    for pair, part in part_of_pair.items():
        in_training = {lang for lang in LANGS if (pair.target, lang) in training_targets}
        assert part is not CorpusPart.UNSEEN or not in_training
        assert part is not CorpusPart.SEEN or in_training - {pair.lang}
    assert parts(random.sample(pairs, len(pairs)), **choice) == part_of_pair


@given(corpora, corpora, choices)
def test_added_data_moves_no_held_out_pair_into_training(pairs, new_pairs, choice):
    after = parts(list(dict.fromkeys([*new_pairs, *pairs])), **choice)
    for pair, part in parts(pairs, **choice).items():
        assert part is CorpusPart.TRAIN or after[pair] is part


def test_shares_are_as_requested_and_another_seed_chooses_others():
    pairs = [
        Pair(lang, f"{lang} {message} {variant}", f"message {message}")
        for message in range(400) for lang in LANGS for variant in range(1 + message % 2)
    ]  # fmt: skip
    pair_parts = list(parts(pairs).values())
    assert 0.07 < pair_parts.count(CorpusPart.UNSEEN) / len(pairs) < 0.13
    assert 0.06 < pair_parts.count(CorpusPart.SEEN) / len(pairs) < 0.12
    assert list(parts(pairs, seed=1).values()) != pair_parts
    assert set(parts(pairs, messages=0, pairs=0).values()) == {CorpusPart.TRAIN}


def test_messages_that_differ_in_case_and_punctuation_are_held_out_together():
    forms = ("save {}", "Save {}…")
    corpus = [Pair("de", f"{index}{form}", form.format(index)) for index in range(200) for form in forms]
    pair_parts = list(parts(corpus, pairs=0).values())
    assert pair_parts[::2] == pair_parts[1::2]
    assert CorpusPart.UNSEEN in pair_parts
