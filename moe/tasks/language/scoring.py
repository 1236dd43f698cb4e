"""Scoring of texts by a language model: how likely they are, alone or after others."""

from collections.abc import Sequence

from moe.data.tokenizer import Tokenizer
from moe.spec import Problem, ProblemCode, SpecError
from moe.tasks.language.likelihood import Likelihood, Pair, log_likelihoods, rolling_pairs
from moe.tasks.language.model import LanguageModel


class TextScorer:
    """Log-likelihoods of texts, as lm-evaluation-harness asks a model of transformers for them: a text begins with what
    its tokenizer puts there. It is read as text: special tokens that are written in it are letters."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, max_tokens: int) -> None:
        """`max_tokens`: of the texts that the model was trained on."""
        self._model, self._tokenizer, self._max_tokens = model, tokenizer, max_tokens

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> tuple[list[Likelihood], int]:
        """(log-likelihood of each continuation given its context; number of contexts that lost their beginning, as the
        model was trained on shorter texts). Raises SpecError for a continuation that is empty, or too long by
        itself."""
        token_pairs = [self._encode_pair(*pair) for pair in pairs]
        for (_, text), (_, continuation) in zip(pairs, token_pairs, strict=True):
            if not 0 < len(continuation) <= self._max_tokens:
                rule = (
                    f"has {len(continuation):,} tokens, and must have 1 to {self._max_tokens:,}, as many as the texts "
                    "that the model was trained on"
                )
                code: ProblemCode = "too_large" if continuation else "empty"
                remedy = "shorten it" if continuation else "give it some text"
                raise SpecError(Problem(code, "continuation", text, rule, remedy))
        num_cut = sum(
            len(context) + len(continuation) - 1 > self._max_tokens for context, continuation in token_pairs
        )
        return log_likelihoods(self._model, token_pairs, self._max_tokens), num_cut

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Log-likelihood of each whole text, in nats: the sum over its tokens, each given those before it, as many as
        the model was trained on. As the harness has it, a BOS that the tokenizer puts before the text is one of its
        tokens, and stands behind another."""
        prefix, start = self._tokenizer.prefix_ids, self._tokenizer.start_id
        token_lists = self._tokenizer.encode_batch(texts)
        pairs = [list(rolling_pairs([*prefix, *tokens], start, self._max_tokens)) for tokens in token_lists]
        likelihoods = iter(
            log_likelihoods(
                self._model, [pair for text_pairs in pairs for pair in text_pairs], self._max_tokens
            )
        )
        return [sum(next(likelihoods).nats for _ in text_pairs) for text_pairs in pairs]

    def _encode_pair(self, context: str, continuation: str) -> Pair:
        """Tokens of both, as in lm-evaluation-harness: white space between them belongs to the continuation, with which
        tokens mostly join it, and the continuation's tokens are those of the whole text beyond the number of the
        context's."""
        is_alone = not context
        stripped_context = context.rstrip()
        continuation, context = context[len(stripped_context) :] + continuation, stripped_context
        before, whole = self._tokenizer.encode_batch([context, context + continuation])
        after = whole[len(before) :] or self._tokenizer.encode(continuation)
        prefix = () if is_alone else self._tokenizer.prefix_ids
        return [*prefix, *before] or [self._tokenizer.start_id], after
