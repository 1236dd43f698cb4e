"""Text from tokens as they arrive: whole characters only, and nothing that a stop string may still take back."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""Replacement character for bytes that are not UTF-8: at the end of a text, perhaps a character that is incomplete."""
_BEFORE = 8
"""Tokens before a text that are decoded with its first tokens, whose text may depend on them."""
_MAX_CHARACTER_BYTES = 4
_PATIENCE = 16
"""Undecoded tokens after which not every further one is tried: they are probably no text."""


def before_stop(text: str, stop: Sequence[str]) -> str | None:
    """The text before the first complete stop string; None if there is none."""
    matches = [
        (place + len(stop_string), place) for stop_string in stop if (place := text.find(stop_string)) >= 0
    ]
    return text[: min(matches)[1]] if matches else None


def num_held_back(text: str, stop: Sequence[str]) -> int:
    """Number of characters at the end of a text that a stop string may begin with."""
    longest = max(map(len, stop), default=0)
    for number in range(min(longest - 1, len(text)), 0, -1):
        if any(len(stop_string) > number and text.endswith(stop_string[:number]) for stop_string in stop):
            return number
    return 0


def last_of(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Sequence[int]:
    """The last tokens of a text, from where a character begins: those that follow may read otherwise behind a part of
    one. Where tokens are bytes (`byte_fallback`), all bytes of a run that begins so are no characters."""
    last = [tokens[-number:] for number in range(_BEFORE, _BEFORE + _MAX_CHARACTER_BYTES)]
    return next((candidate for candidate in last if not decode(candidate).startswith(REPLACEMENT)), last[0])


class TextSoFar:
    """Text of tokens, in pieces. Joined, they are what `decode` gives of all tokens, up to a stop string.

    Tokens are decoded a few at a time, behind some that came before: how one reads may depend on those beside it, and
    all of them anew for each would take a time that grows with the square of the text.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        """`before`: the last tokens of what the text goes on from, which are none of its own."""
        self._decode, self._stop = decode, stop
        self._tokens = list(before)
        """Tokens to decode, of which the first `_num_known` have been returned as text."""
        self._num_known = len(self._tokens)
        self._pending_text = ""
        """Text withheld because a stop string may begin with it."""
        self.num_tokens = 0
        self.has_stopped = False
        """Whether a stop string was found, which ends the text."""

    def take(self, token: int) -> str:
        """The text that becomes certain with this token; often none."""
        self._tokens.append(token)
        self.num_tokens += 1
        num_new = len(self._tokens) - self._num_known
        if num_new > _PATIENCE and num_new % _PATIENCE:
            return ""
        known_text = self._decode(self._tokens[: self._num_known])
        now = self._decode(self._tokens)
        if len(now) <= len(known_text) or now.endswith(REPLACEMENT):
            return ""
        del self._tokens[: self._num_known]
        self._num_known = len(self._tokens)
        return self._certain(now[len(known_text) :], is_last=False)

    def end(self) -> str:
        """The rest of the text, with what is no character as it is decoded."""
        known_text = self._decode(self._tokens[: self._num_known])
        rest = self._decode(self._tokens)[len(known_text) :]
        self._num_known = len(self._tokens)
        return self._certain(rest, is_last=True)

    def _certain(self, text: str, *, is_last: bool) -> str:
        if self.has_stopped:
            return ""
        text, self._pending_text = self._pending_text + text, ""
        if (cut := before_stop(text, self._stop)) is not None:
            self.has_stopped = True
            return cut
        if not is_last and (number := num_held_back(text, self._stop)):
            text, self._pending_text = text[:-number], text[-number:]
        return text
