"""Text generation with a trained language model, in one process."""

import collections.abc
import json
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor, nn

from moe.data.conversations.template import TEMPLATE_FILES, ChatTemplate
from moe.data.sequences import CLOSERS, ENDS, load_tokenizer
from moe.data.special_tokens import named_tokens
from moe.data.tokenizer import Tokenizer
from moe.records import Ending, Reason, ScoredToken
from moe.spec import SpecError, spec_error
from moe.spec.generation import GenerationSpec
from moe.tasks.decoding import sample_tokens
from moe.tasks.decoding.text import TextStreamer, last_characters
from moe.tasks.language.generation import generate, prefill, prepare_for_decoding, stream_tokens
from moe.tasks.language.generation_config import FILE as GENERATION_CONFIG
from moe.tasks.language.generation_config import GenerationConfig
from moe.tasks.language.model import LanguageModel
from moe.tasks.language.prompts import encode_prompt
from moe.tasks.language.scoring import TextScorer
from moe.tasks.task import Generator

_BATCH_ROWS = 32
"""Rows per batch of prompts, counting beams."""
_BATCH_PAIRS = 1 << 26
"""Limits attention masks, which take some bytes per pair of positions."""


class LanguageGenerator(Generator):
    """Generates continuations of texts with a trained language model."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        max_tokens: int,
        tokenizer_files: dict[str, bytes] | None = None,
        template_files: Mapping[str, bytes] | None = None,
    ) -> None:
        """`max_tokens`: longest training text. `tokenizer_files`: by name, with further end-of-text ids and
        `generation_config.json`. `template_files`: chat template files.
        """
        self._model, self._tokenizer, self.max_tokens = model, tokenizer, max_tokens
        self._files, self._template_files = tokenizer_files or {}, template_files or {}
        self._generation_config = GenerationConfig.of_files(self._files)
        further = {id for name in (ENDS, CLOSERS) for id in json.loads(self._files.get(name, b"[]"))}
        self._end_ids = {tokenizer.eos_id, *(id for id in further if 0 <= id < model.spec.vocab_size)}
        eos_token = named_tokens(self._template_files).get("eos_token")
        tokenizer_eos_id = None if eos_token is None else tokenizer.token_id(eos_token)
        self._tokenizer_end_ids = set() if tokenizer_eos_id is None else {tokenizer_eos_id}

    @classmethod
    def from_files(cls, model: nn.Module, max_tokens: int, read: Callable[[str], bytes]) -> "LanguageGenerator":
        """Generator with the tokenizer, chat template and generation settings that `read` returns by file name."""
        assert isinstance(model, LanguageModel)
        files = dict[str, bytes]()

        def record_file(name: str) -> bytes:
            files[name] = read(name)
            return files[name]

        tokenizer = load_tokenizer(record_file)
        for name in (ENDS, CLOSERS, GENERATION_CONFIG):
            with suppress(FileNotFoundError):
                record_file(name)
        template_files = {}
        for name in TEMPLATE_FILES:
            with suppress(FileNotFoundError):
                template_files[name] = read(name)
        return cls(model, tokenizer, max_tokens, files, template_files)

    def with_model_settings(self, spec: GenerationSpec) -> tuple[GenerationSpec, tuple[str, ...]]:
        """(spec with the settings of `generation_config.json` where it has none, those that are not supported)."""
        return self._generation_config.complete(spec), self._generation_config.notes

    def prepare_for_decoding(self) -> None:
        prepare_for_decoding(self._model)

    def generate(self, texts: Sequence[str], spec: GenerationSpec | None = None) -> list[str]:
        """Continuation of each text; greedy decoding without `spec`.

        Raises SpecError for a text longer than the model's training texts.
        """
        spec = spec or GenerationSpec()
        prompts = [self._encode_prompt(text, chat=spec.chat) for text in texts]
        return self._generate(prompts, spec, self._end_ids)

    def generate_truncated(
        self, texts: Sequence[str], spec: GenerationSpec, *, verbatim: bool = False
    ) -> tuple[list[str], int]:
        """(continuations of texts of any length, number of truncated prompts).

        Prompts are truncated on the left to fit prompt and output into the training length. As in
        lm-evaluation-harness, the tokenizer's EOS also ends a text, even if the model's config does not name it.
        `verbatim` as in `TextScorer.log_likelihoods`.
        Raises SpecError if the output alone would take that length.
        """
        max_prompt_tokens = self.max_tokens - spec.max_tokens
        if max_prompt_tokens < 1:
            rule = f"must be below {self.max_tokens:,}, the length of the texts that the model was trained on"
            raise spec_error("out_of_range", "max_tokens", spec.max_tokens, rule, "lower it")
        if verbatim:
            prompts = [encoding.ids for encoding in self._tokenizer.encode_verbatim(texts)]
        else:
            prompts = self._tokenizer.prompts(texts)
        num_cut = sum(len(prompt) > max_prompt_tokens for prompt in prompts)
        end_ids = self._end_ids | self._tokenizer_end_ids
        return self._generate([prompt[-max_prompt_tokens:] for prompt in prompts], spec, end_ids), num_cut

    def scorer(self) -> TextScorer:
        return TextScorer(self._model, self._tokenizer, self.max_tokens)

    def _generate(self, prompts: Sequence[list[int]], spec: GenerationSpec, end_ids: Set[int]) -> list[str]:
        outputs = list[str]()
        longest = max(map(len, prompts), default=1)
        batch = max(1, min(_BATCH_ROWS // spec.num_beams, _BATCH_PAIRS // longest**2))
        for first in range(0, len(prompts), batch):
            numbers = range(first, min(first + batch, len(prompts)))
            outputs += self._continue([prompts[number] for number in numbers], spec, end_ids, numbers)
        return outputs

    def stream(self, text: str, spec: GenerationSpec | None = None) -> collections.abc.Generator[str, None, Ending]:
        """Continuation of one text in pieces of whole characters; with beams, all at the end."""
        spec = spec or GenerationSpec()
        return self._stream_text(self._encode_prompt(text, chat=spec.chat), spec)

    def _stream_text(self, prompt: list[int], spec: GenerationSpec) -> collections.abc.Generator[str, None, Ending]:
        streamer, has_ended, scored_tokens = self._streamer(prompt, spec), False, list[ScoredToken]()
        for token, log_prob in self._tokens(prompt, spec):
            has_ended = token in self._end_ids
            if not has_ended:
                if log_prob is not None:
                    scored_tokens.append(ScoredToken(self._tokenizer.decode([token]), token, log_prob))
                yield streamer.take(token)
            if streamer.has_stopped:
                break
        yield streamer.end()
        reason: Reason = "stop" if streamer.has_stopped else "end" if has_ended else "max_tokens"
        return Ending(reason, streamer.num_tokens, tokens=tuple(scored_tokens) if spec.log_probs else None)

    def save_tokenizers(self, folder: Path) -> None:
        for name, content in {**self._files, **self._template_files}.items():
            (folder / name).write_bytes(content)

    def chat_template(self) -> ChatTemplate:
        """The model's chat template. Raises SpecError if it has none."""
        try:
            return ChatTemplate.of_files(self._template_files, datetime.now(UTC).date().isoformat())
        except SpecError:
            rule = "requires a chat template, but the model has none"
            remedy = "omit it to continue the text unchanged"
            raise spec_error("missing", "chat", True, rule, remedy) from None

    def _encode_prompt(self, text: str, *, chat: bool) -> list[int]:
        return encode_prompt(text, self._tokenizer, self.chat_template() if chat else None, self.max_tokens)

    def _streamer(self, prompt: list[int], spec: GenerationSpec) -> TextStreamer:
        return TextStreamer(self._tokenizer.decode, spec.stop, last_characters(prompt, self._tokenizer.decode))

    def _tokens(self, prompt: list[int], spec: GenerationSpec) -> collections.abc.Iterator[tuple[int, float | None]]:
        """New tokens of one prompt, including the end-of-text token, with their log-probabilities if requested."""
        if spec.num_beams == 1:
            steps = prefill(self._model, [prompt], spec.max_tokens)
            for new_tokens in sample_tokens(steps, steps.logits, spec, self._end_ids, prompts=[prompt]):
                token = new_tokens[0]
                yield token, _log_prob(steps.logits[0], token) if spec.log_probs else None
            return
        (tokens,) = generate(self._model, [prompt], spec, self._end_ids)
        yield from ((token, None) for token in tokens)
        if len(tokens) < spec.max_tokens:
            yield self._tokenizer.eos_id, None

    def _continue(
        self, prompts: list[list[int]], spec: GenerationSpec, end_ids: Set[int], numbers: Sequence[int]
    ) -> list[str]:
        streamers = [self._streamer(prompt, spec) for prompt in prompts]
        pieces: list[list[str]] = [[] for _ in prompts]
        if spec.num_beams > 1:
            for row, tokens in enumerate(generate(self._model, prompts, spec, end_ids)):
                pieces[row] = [streamers[row].take(token) for token in tokens]
        else:
            decoding, stopped_rows = stream_tokens(self._model, prompts, spec, end_ids, text_numbers=numbers), None
            while True:
                try:
                    new_tokens = decoding.send(stopped_rows)
                except StopIteration:
                    break
                for row, token in new_tokens.items():
                    if token not in end_ids:
                        pieces[row].append(streamers[row].take(token))
                stopped_rows = [row for row in new_tokens if streamers[row].has_stopped]
        return ["".join([*row_pieces, streamer.end()]) for row_pieces, streamer in zip(pieces, streamers, strict=True)]


def _log_prob(logits: Tensor, token: int) -> float:
    return float(logits.log_softmax(-1, dtype=torch.float64)[token])
