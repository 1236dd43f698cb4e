"""Translations on request: greedy as in evaluation, by beam search against full passes, and sampled."""

from functools import cache

import pytest
import torch
from torch import Tensor

from moe.data.pairs import Tokenizers
from moe.data.pairs.pair import Pair
from moe.data.tokenizer import BOS, EOS, PAD
from moe.spec.generation import GenerationSpec
from moe.tasks.batch_context import BatchContext
from moe.tasks.decoding import beam_search
from moe.tasks.translation import TranslationModel, build_model, translate
from moe.tasks.translation.translator import Translator
from tests.unit.data_corpora import sentences
from tests.unit.streaming import collect_stream
from tests.unit.test_translation_model import spec_of

MAX_TOKENS = 12
TEXTS = ["der Fuchs", "ein Wort", "", "das ist ein langer Satz mit vielen Worten", "Haus"]


@cache
def model() -> TranslationModel:
    """A model with weights for which outputs differ between sources, and some end."""
    network = build_model(spec_of(), dtype=torch.float64)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2 if parameter is network.output_embedding else 3)
        network.output_embedding[EOS] *= 3
    return network.eval()


@cache
def translator() -> Translator:
    pairs = [Pair(row["lang"], row["source"], row["target"]) for row in sentences(60)]
    return Translator(model(), Tokenizers.train(pairs, spec_of()), MAX_TOKENS)


class FullPasses:
    """Logits from a forward pass over all tokens so far."""

    def __init__(self, source: Tensor) -> None:
        self.source, self.target = source, torch.full_like(source[:, :1], BOS)

    @property
    def logits(self) -> Tensor:
        with torch.no_grad():
            context = BatchContext(training=False, rows_per_group=1)
            logits = model()(self.source, self.target, context)[:, -1]
        logits[:, [PAD, BOS]] = -torch.inf
        return logits

    def next(self, tokens: Tensor) -> Tensor:
        self.target = torch.cat([self.target, tokens[:, None]], dim=1)
        return self.logits

    def take_rows(self, rows: Tensor) -> None:
        self.source, self.target = self.source[rows], self.target[rows]


def sources(rows: int = 5, length: int = 7) -> Tensor:
    source = torch.randint(4, 300, (rows, length), generator=torch.Generator().manual_seed(3))
    source[1, 4:] = PAD
    source[3, 2:] = PAD
    return source


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.5])
def test_beams_with_memories_are_beams_over_full_passes(penalty: float) -> None:
    spec, limits = GenerationSpec(num_beams=4, max_tokens=9, length_penalty=penalty), [9, 4, 9, 6, 9]
    slow = FullPasses(sources())
    expected = beam_search(slow, slow.logits, spec, {EOS}, max_tokens=limits)
    actual = translate(model(), sources(), spec, limits)
    assert actual == expected
    assert len({tuple(text) for text in actual}) > 2, "else nothing was compared"
    assert any(len(text) < limit for text, limit in zip(actual, limits, strict=True)), "else none ended"


def test_limits_and_stop_strings_end_a_text_sooner() -> None:
    spec, limits = GenerationSpec(max_tokens=MAX_TOKENS), [3, 12, 1, 5, 12]
    assert translate(model(), sources(), spec, limits) == [
        row[:limit] for row, limit in zip(translate(model(), sources(), spec), limits, strict=True)
    ]
    (full,) = translator().generate(TEXTS[:1])
    (short,) = translator().generate(TEXTS[:1], GenerationSpec(max_tokens=3))
    assert full.startswith(short)
    assert len(short) < len(full)
    stop = full[2:4]
    assert translator().generate(TEXTS[:1], GenerationSpec(stop=(stop,))) == [full[: full.index(stop)]]


def test_greedy_and_drawn_translations_follow_their_spec() -> None:
    plain = translator().generate(TEXTS)
    assert plain == translator().generate(TEXTS, GenerationSpec(max_tokens=MAX_TOKENS))
    assert plain[2] == ""
    assert any(plain)

    def sample(seed: int) -> list[str]:
        return translator().generate(TEXTS, GenerationSpec(temperature=1.0, seed=seed))

    assert sample(1) == sample(1) != sample(2)


def test_beams_find_other_translations_and_one_alone_is_the_same_as_among_others() -> None:
    spec = GenerationSpec(num_beams=4)
    translations = translator().generate(TEXTS, spec)
    assert translations != translator().generate(TEXTS)
    assert translations == [translator().generate([text], spec)[0] for text in TEXTS]


def test_a_translation_is_streamed_in_one_piece_and_says_how_it_ended() -> None:
    for text, translation in zip(TEXTS, translator().generate(TEXTS), strict=True):
        pieces, ending = collect_stream(translator(), text)
        assert pieces == ([translation] if translation else [])
        assert (ending.reason, ending.num_tokens) == ("max_tokens", MAX_TOKENS) or ending.reason == "end"
