"""Texts that a language model generates: unchanged by batches, streams and stop strings."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import tokenizers
import torch
from torch import Tensor

from moe.data.sequences import ENDS, load_tokenizer
from moe.data.tokenizer import TextForm, Tokenizer
from moe.spec import model_spec
from moe.spec.generation import GenerationSpec
from moe.tasks.decoding import beam_search
from moe.tasks.language.generation import generate, prepare_for_decoding
from moe.tasks.language.generator import LanguageGenerator
from moe.tasks.language.model import LanguageModel, build_model
from tests.refusals import expect_problem
from tests.unit import chats
from tests.unit.streaming import collect_stream

PROMPTS = ["def read(path):", "", "import os\n\nfor name in names:\n    print(name)\n", "überall 天", "x"]
LONGEST = 64
BEAMS = GenerationSpec(max_tokens=8, num_beams=3)
DRAWN = GenerationSpec(max_tokens=12, temperature=1.0, top_p=0.95, seed=3)
PENALIZED = GenerationSpec(max_tokens=12, repetition_penalty=1.5)
GREEDY = GenerationSpec(max_tokens=16)


@cache
def tokenizer() -> Tokenizer:
    source = Path(__file__).read_text()
    return Tokenizer.train([source, "über alle Brücken, 天天 天"] * 2, 400, TextForm.DOCUMENTS)


@cache
def model() -> LanguageModel:
    return made_model()


def made_model(dtype: torch.dtype = torch.float64) -> LanguageModel:
    """A model in float64, so that batches change no choice, with weights that make its choices sharp."""
    spec = model_spec({
        "kind": "language", "model_dim": 32, "num_layers": 2, "vocab_size": 400, "ffn_dim": 64,
        "attention": {"kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
        "moe": {"num_experts": 4, "hidden_dim": 24, "router": "softmax_topk", "top_k": 2,
                "activation": "swiglu"},
    })  # fmt: skip
    network = build_model(spec, dtype=dtype)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)
    return network.eval()


@cache
def generator() -> LanguageGenerator:
    return LanguageGenerator(model(), tokenizer(), LONGEST)


class FullPasses:
    """The same choices for one prompt, by a forward pass over all earlier tokens."""

    def __init__(self, prompt: list[int]) -> None:
        self.tokens = torch.tensor([prompt])

    @property
    def logits(self) -> Tensor:
        with torch.no_grad():
            return model()(self.tokens)[:, -1]

    def next(self, tokens: Tensor) -> Tensor:
        self.tokens = torch.cat([self.tokens, tokens[:, None]], dim=1)
        return self.logits

    def take_rows(self, rows: Tensor) -> None:
        self.tokens = self.tokens[rows]


def prompts() -> Iterator[list[int]]:
    for text in PROMPTS:
        yield [tokenizer().bos_id, *tokenizer().encode(text)]


@pytest.mark.parametrize("spec", [GREEDY, BEAMS, DRAWN], ids=["greedy", "beams", "drawn"])
def test_a_model_laid_out_for_generation_generates_the_same(spec: GenerationSpec) -> None:
    network, before = made_model(), {name: tensor.clone() for name, tensor in model().state_dict().items()}
    decoder = LanguageGenerator(network, tokenizer(), LONGEST)
    assert network.layers[0].feed_forward.moe.experts.w_in.is_contiguous(), "as it is trained on"
    decoder.prepare_for_decoding()
    assert not network.layers[0].feed_forward.moe.experts.w_in.is_contiguous()
    assert decoder.generate(PROMPTS, spec) == generator().generate(PROMPTS, spec)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_such_a_model_are_as_narrow_as_its_arithmetic(dtype: torch.dtype) -> None:
    narrow, tokens = made_model(dtype), torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        before = narrow(tokens)
        prepare_for_decoding(narrow)
        torch.testing.assert_close(narrow(tokens), before, rtol=0.02, atol=0.02)
    for layer in narrow.layers:
        weights = layer.feed_forward.moe.experts.weights.narrow(dtype)
        assert all(weight is None or weight.dtype == dtype for weight in weights.tensors)
        assert weights.w_in_and_gate is not None, "one product for both"


@pytest.mark.slow
def test_kv_caches_change_neither_greedy_decoding_nor_beam_search() -> None:
    greedy, beams = (generate(model(), list(prompts()), spec, {2}) for spec in (GREEDY, BEAMS))
    for prompt, greedy_tokens, best_beam in zip(prompts(), greedy, beams, strict=True):
        passes, plain = FullPasses(prompt), list[int]()
        while len(plain) < GREEDY.max_tokens and int(token := passes.logits.argmax(-1)) != 2:
            plain.append(int(token))
            passes.next(token)
        assert greedy_tokens == plain
        passes = FullPasses(prompt)
        assert [best_beam] == beam_search(passes, passes.logits, BEAMS, {2})


@pytest.mark.parametrize("spec", [GREEDY, BEAMS, PENALIZED], ids=["greedy", "beams", "penalized"])
def test_a_text_does_not_depend_on_its_batch(spec: GenerationSpec) -> None:
    texts = generator().generate(PROMPTS, spec)
    assert texts == [generator().generate([text], spec)[0] for text in PROMPTS]
    assert len(set(texts)) > 3, "else nothing was compared"


def test_draws_are_keyed_by_the_number_of_the_text() -> None:
    texts = generator().generate(PROMPTS * 8, DRAWN)
    assert texts[:5] == generator().generate(PROMPTS, DRAWN)
    assert texts[0] != texts[5], "the same prompt, another text"
    tokens = generate(model(), list(prompts()), DRAWN, {2})
    assert tokens[3:] == generate(model(), list(prompts())[3:], DRAWN, {2}, text_numbers=[3, 4])


@pytest.mark.sample(1)
@pytest.mark.parametrize("spec", [None, GREEDY, DRAWN, BEAMS], ids=["as it is", "greedy", "drawn", "beams"])
def test_pieces_joined_are_the_text(spec: GenerationSpec | None) -> None:
    for text in PROMPTS if spec else PROMPTS[:1]:
        pieces, ending = collect_stream(generator(), text, spec)
        assert "".join(pieces) == generator().generate([text], spec)[0]
        longest = (spec or GenerationSpec()).max_tokens
        assert ending.num_tokens <= longest
        assert (ending.reason == "max_tokens") == (ending.num_tokens == longest)


@pytest.mark.parametrize("spec", [GREEDY, DRAWN, BEAMS], ids=["greedy", "drawn", "beams"])
def test_a_text_ends_before_a_stop_string_wherever_tokens_end(spec: GenerationSpec) -> None:
    for text in PROMPTS:
        (full_text,) = generator().generate([text], spec)
        stop = full_text[len(full_text) // 2 : len(full_text) // 2 + 3]
        stopping = spec.model_copy(update={"stop": (stop, "never")})
        pieces, ending = collect_stream(generator(), text, stopping)
        assert "".join(pieces) == full_text[: full_text.index(stop)] == generator().generate([text], stopping)[0]
        assert ending.reason == "stop"


@pytest.mark.parametrize("spec", [PENALIZED, DRAWN], ids=["penalized", "drawn"])
def test_log_probabilities_are_those_of_a_forward_pass(spec: GenerationSpec) -> None:
    for text in PROMPTS[:2]:
        pieces, ending = collect_stream(generator(), text, spec.model_copy(update={"log_probs": True}))
        assert ending.tokens is not None
        assert (pieces, ending.num_tokens) == (collect_stream(generator(), text, spec)[0], len(ending.tokens))
        prompt, ids = tokenizer().prompt(text), [token.id for token in ending.tokens]
        with torch.no_grad():
            log_probs = model()(torch.tensor([prompt + ids]))[0].log_softmax(-1)[len(prompt) - 1 :]
        expected = [float(log_probs[place, id]) for place, id in enumerate(ids)]
        assert [token.log_prob for token in ending.tokens] == pytest.approx(expected, abs=1e-10)
        assert [token.text for token in ending.tokens] == [tokenizer().decode([id]) for id in ids]
    assert collect_stream(generator(), "x", spec)[1].tokens is None


def test_a_prompt_longer_than_what_was_learned_from_is_refused_before_the_first_piece() -> None:
    long = "def read " * LONGEST
    for ask in (generator().stream, lambda text: generator().generate([text])):
        with expect_problem("too_large", "prompt", None):
            ask(long)


def reader(files: dict[str, bytes]) -> Callable[[str], bytes]:
    def read(name: str) -> bytes:
        if name not in files:
            raise FileNotFoundError(name)
        return files[name]

    return read


def test_a_tokenizer_is_stored_by_its_files(tmp_path: Path) -> None:
    files = {"tokenizer.json": tokenizer().to_json().encode(), "generation_config.json": b'{"repetition_penalty": 1.5}'}
    original = LanguageGenerator.from_files(model(), LONGEST, reader(files))
    original.save_tokenizers(tmp_path)
    assert (tmp_path / "generation_config.json").read_bytes() == files["generation_config.json"]
    assert original.with_model_settings(GREEDY)[0].repetition_penalty == 1.5
    copy = load_tokenizer(lambda name: (tmp_path / name).read_bytes())
    assert copy.encode("def read") == tokenizer().encode("def read")
    assert original.generate(PROMPTS[:1], GREEDY) == generator().generate(PROMPTS[:1], GREEDY)


def test_what_a_given_model_says_ends_a_text_too() -> None:
    """A chat model names an end of turn in addition to the end of a document."""
    (tokens,) = generate(model(), [[tokenizer().bos_id, *tokenizer().encode("x")]], GREEDY)
    third = tokens.index(tokens[2])
    chat = LanguageGenerator(model(), tokenizer(), LONGEST, {ENDS: f"[{tokens[2]}]".encode()})
    assert chat.generate(["x"], GREEDY) == [tokenizer().decode(tokens[:third])]
    out_of_range = LanguageGenerator(model(), tokenizer(), LONGEST, {ENDS: b"[400]"})
    assert out_of_range.generate(["x"], GREEDY) == generator().generate(["x"], GREEDY)


def test_a_chat_is_written_by_the_models_template_and_its_answer_made():
    source = "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }} {{ m.content }}<|eot_id|>"
    asks = "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant {% endif %}"
    files = chats.tokenizer_files(source + asks)
    spec = model().spec.model_copy(update={"vocab_size": 480})
    network = build_model(spec, dtype=torch.float64).eval()
    files["tokenizer.ids.json"] = b'{"bos_id": 0, "eos_id": 1}'

    read = reader(files)
    chatty = LanguageGenerator.from_files(network, LONGEST, read)
    question = "is </s> it?"
    plain = tokenizers.Tokenizer.from_str(chats.tokenizer_json())
    transcript = f"<s><|start_header_id|>user {question}<|eot_id|><|start_header_id|>assistant "
    prompt = plain.encode(transcript, add_special_tokens=False).ids
    (tokens,) = generate(network, [prompt], GREEDY, {1})
    chat_spec = GREEDY.model_copy(update={"chat": True})
    assert chatty.generate([question], chat_spec) == [load_tokenizer(read).decode(tokens)]
    assert "".join(chatty.stream(question, chat_spec)) == chatty.generate([question], chat_spec)[0]
    assert chatty.generate([question], chat_spec) != chatty.generate([question], GREEDY)
    files["chat_template.jinja"] = b"{{ raise_exception('never') }}"
    with expect_problem("unsupported", "chat", None):
        LanguageGenerator.from_files(network, LONGEST, read).generate([question], chat_spec)
    with expect_problem("missing", "chat", True):
        generator().generate(["x"], chat_spec)
