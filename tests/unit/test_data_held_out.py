"""Held-out sets: what the model must not learn from, by message and by pair."""

from hypothesis import given
from hypothesis import strategies as st

from moe.data.pairs.held_out import CorpusPart, HeldOut
from moe.data.pairs.pair import Pair
from moe.spec import JsonlSpec

PAIRS = [
    Pair(lang, f"{lang} {message} {variant}", f"message {message}")
    for message in range(400)
    for lang in ("de", "fr", "ru")
    for variant in range(1 + message % 2)
]


def held_out(seed=0, messages=0.1, pairs=0.1):
    spec = JsonlSpec(corpus="jsonl", paths=("/x",), held_out_messages=messages, held_out_pairs=pairs)
    return HeldOut(spec, seed)


def parts(corpus, **choice):
    chooser = held_out(**choice)
    return dict(zip(corpus, chooser.assign(corpus, chooser.candidates(corpus)), strict=True))


pair = st.builds(
    Pair,
    st.sampled_from(["de", "fr", "ru"]),
    st.sampled_from(["a", "b", "c", "d"]),
    st.sampled_from(["Save", "save!", "Open", "Close", "…", "?"]),
)
corpora = st.lists(pair, unique=True)
choices = st.fixed_dictionaries(
    {"seed": st.integers(0, 50), "messages": st.sampled_from([0, 0.2, 0.49]), "pairs": st.sampled_from([0, 0.2, 0.49])}
)


@given(corpora, choices)
def test_the_three_parts_are_apart_as_each_promises(pairs, choice):
    chosen = parts(pairs, **choice)
    in_training = {(p.target, p.lang) for p, part in chosen.items() if part is CorpusPart.TRAIN}
    targets = {target for target, _ in in_training}
    for p, part in chosen.items():
        if part is CorpusPart.UNSEEN:
            assert p.target not in targets
        if part is CorpusPart.SEEN:
            assert any((p.target, lang) in in_training for lang in {"de", "fr", "ru"} - {p.lang})


@given(corpora, choices, st.randoms(use_true_random=False))
def test_the_order_of_the_corpus_does_not_matter(pairs, choice, random):
    shuffled = random.sample(pairs, len(pairs))
    assert parts(shuffled, **choice) == parts(pairs, **choice)


@given(corpora, corpora, choices)
def test_added_data_never_moves_a_held_out_pair_into_training(pairs, added, choice):
    before = parts(pairs, **choice)
    after = parts(list(dict.fromkeys([*added, *pairs])), **choice)
    for p, part in before.items():
        if part is not CorpusPart.TRAIN:
            assert after[p] is part


def test_shares_are_as_asked_and_another_seed_chooses_others():
    chosen = list(parts(PAIRS).values())
    assert 0.07 < chosen.count(CorpusPart.UNSEEN) / len(PAIRS) < 0.13
    assert 0.06 < chosen.count(CorpusPart.SEEN) / len(PAIRS) < 0.12
    assert list(parts(PAIRS, seed=1).values()) != chosen
    assert set(parts(PAIRS, messages=0, pairs=0).values()) == {CorpusPart.TRAIN}


def test_messages_that_differ_in_case_and_punctuation_are_held_out_together():
    messages = [
        Pair("de", f"{index}{form}", form.format(index)) for index in range(200) for form in ("save {}", "Save {}…")
    ]
    chosen = parts(messages, pairs=0)
    for plain, dressed in zip(messages[::2], messages[1::2], strict=True):
        assert chosen[plain] is chosen[dressed]
    assert CorpusPart.UNSEEN in chosen.values()
