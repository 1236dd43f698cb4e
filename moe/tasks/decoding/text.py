"""Incremental detokenization: whole characters only, and no text that a stop string may still remove."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""Stands for invalid UTF-8; at the end of a text possibly for an incomplete character."""
_BEFORE = 8
"""Preceding tokens decoded together with the first new ones, whose text may depend on them."""
_MAX_CHARACTER_BYTES = 4
_PATIENCE = 16
"""Number of pending tokens beyond which only every 16th is decoded: as that many are probably not text."""


def before_stop(text: str, stop: Sequence[str]) -> str | None:
    """Text before the stop string that completes first; None if there is none."""
    matches = [(place + len(stop_string), place) for stop_string in stop if (place := text.find(stop_string)) >= 0]
    return text[: min(matches)[1]] if matches else None


def num_pending(text: str, stop: Sequence[str]) -> int:
    """Length of the suffix that may be the start of a stop string."""
    longest = max(map(len, stop), default=0)
    for number in range(min(longest - 1, len(text)), 0, -1):
        if any(len(stop_string) > number and text.endswith(stop_string[:number]) for stop_string in stop):
            return number
    return 0


def last_characters(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Sequence[int]:
    """Last tokens of a text, from a character boundary on.

    A partial character may change how later tokens decode; with byte tokens (`byte_fallback`), a byte run that starts
    within a character decodes to replacement characters.
    """
    last = [tokens[-number:] for number in range(_BEFORE, _BEFORE + _MAX_CHARACTER_BYTES)]
    return next((candidate for candidate in last if not decode(candidate).startswith(REPLACEMENT)), last[0])


class TextStreamer:
    """Detokenizer of a token stream. The pieces join to `decode` of all tokens, up to a stop string.

    Decodes few tokens at a time, after preceding ones that may affect their text; decoding all tokens at each step
    would take quadratic time.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        """`before`: last tokens of the prompt, which are not part of the text."""
        self._decode, self._stop = decode, stop
        self._tokens = list(before)
        """Tokens to decode with the next ones; the text of the first `_num_known` is known."""
        self._num_known = len(self._tokens)
        self._pending_text = ""
        """Text withheld because a stop string may start there."""
        self.num_tokens = 0
        self.has_stopped = False
        """Whether a stop string was found, which ends the text."""

    def take(self, token: int) -> str:
        """Text that becomes final with this token; often empty."""
        self._tokens.append(token)
        self.num_tokens += 1
        num_new = len(self._tokens) - self._num_known
        if num_new > _PATIENCE and num_new % _PATIENCE:
            return ""
        known_text = self._decode(self._tokens[: self._num_known])
        text = self._decode(self._tokens)
        if len(text) <= len(known_text) or text.endswith(REPLACEMENT):
            return ""
        del self._tokens[: self._num_known]
        self._num_known = len(self._tokens)
        return self._certain(text[len(known_text) :], is_last=False)

    def end(self) -> str:
        """Remaining text, including replacement characters."""
        known_text = self._decode(self._tokens[: self._num_known])
        new_text = self._decode(self._tokens)[len(known_text) :]
        self._num_known = len(self._tokens)
        return self._certain(new_text, is_last=True)

    def _certain(self, text: str, *, is_last: bool) -> str:
        if self.has_stopped:
            return ""
        text, self._pending_text = self._pending_text + text, ""
        if (cut := before_stop(text, self._stop)) is not None:
            self.has_stopped = True
            return cut
        if not is_last and (number := num_pending(text, self._stop)):
            text, self._pending_text = text[:-number], text[-number:]
        return text
