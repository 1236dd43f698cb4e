"""Log-likelihood scoring of texts by a language model."""

from collections.abc import Sequence

from moe.data.tokenizer import Tokenizer
from moe.spec import ProblemCode, spec_error
from moe.tasks.language.likelihood import Likelihood, Pair, log_likelihoods, rolling_pairs
from moe.tasks.language.model import LanguageModel


class TextScorer:
    """Log-likelihoods of texts as lm-evaluation-harness computes them for transformers models.

    Texts begin with the tokenizer's prefix. Special tokens written in them are read as plain text, unless `verbatim`.
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, max_tokens: int) -> None:
        """`max_tokens`: longest training text."""
        self._model, self._tokenizer, self._max_tokens = model, tokenizer, max_tokens

    def log_likelihoods(
        self, pairs: Sequence[tuple[str, str]], *, verbatim: bool = False
    ) -> tuple[list[Likelihood], int]:
        """(log-likelihood of each continuation given its context, number of contexts truncated on the left).

        `verbatim`: special tokens in the texts are read as such, and no prefix is added, as in rendered conversations.
        Raises SpecError for a continuation that is empty or longer than the model's training texts.
        """
        token_pairs = [self._encode_pair(*pair, verbatim=verbatim) for pair in pairs]
        for (_, text), (_, continuation) in zip(pairs, token_pairs, strict=True):
            if not 0 < len(continuation) <= self._max_tokens:
                rule = (
                    f"must have 1 to {self._max_tokens:,} tokens, not {len(continuation):,}: the model was "
                    "trained on texts of that length"
                )
                code: ProblemCode = "too_large" if continuation else "empty"
                remedy = "shorten it" if continuation else "add text"
                raise spec_error(code, "continuation", text, rule, remedy)
        num_cut = sum(len(context) + len(continuation) - 1 > self._max_tokens for context, continuation in token_pairs)
        return log_likelihoods(self._model, token_pairs, self._max_tokens), num_cut

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Rolling log-likelihood of each text in nats: each token given the preceding ones in the window.

        As in lm-evaluation-harness, a BOS prefix counts as one of the text's tokens and follows another start token.
        """
        prefix, start = self._tokenizer.prefix_ids, self._tokenizer.start_id
        token_lists = self._tokenizer.encode_batch(texts)
        pairs = [list(rolling_pairs([*prefix, *tokens], start, self._max_tokens)) for tokens in token_lists]
        likelihoods = iter(
            log_likelihoods(self._model, [pair for text_pairs in pairs for pair in text_pairs], self._max_tokens)
        )
        return [sum(next(likelihoods).nats for _ in text_pairs) for text_pairs in pairs]

    def _encode_pair(self, context: str, continuation: str, *, verbatim: bool) -> Pair:
        """Tokens of context and continuation, split as lm-evaluation-harness does.

        Whitespace at the context's end moves to the continuation, whose tokens are those of the joined text after the
        first n, for n tokens in the context.
        """
        is_alone = not context
        stripped_context = context.rstrip()
        continuation, context = context[len(stripped_context) :] + continuation, stripped_context
        texts = [context, context + continuation]
        if verbatim:
            context_tokens, text_tokens = (encoding.ids for encoding in self._tokenizer.encode_verbatim(texts))
        else:
            context_tokens, text_tokens = self._tokenizer.encode_batch(texts)
        continuation_tokens = text_tokens[len(context_tokens) :] or self._tokenizer.encode(continuation)
        prefix = () if is_alone or verbatim else self._tokenizer.prefix_ids
        return [*prefix, *context_tokens] or [self._tokenizer.start_id], continuation_tokens
