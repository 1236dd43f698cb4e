"""Deduplication of log lines: what is decided or fails again each step is logged once."""

from collections.abc import Collection


class Deduplicator:
    """The last log line of each thing, by whatever names it."""

    def __init__(self) -> None:
        self._last: dict[object, object] = {}

    def is_new(self, of: object, news: object) -> bool:
        """Whether this is not what was logged of it last; from now on it is."""
        previous = self._last.get(of)
        self._last[of] = news
        return previous != news

    def forget(self, of: object) -> None:
        """Nothing is wrong with it any more: the same would be news again."""
        self._last.pop(of, None)

    def keep_only(self, keys: Collection[object]) -> None:
        """Forget all keys but these."""
        self._last = {of: news for of, news in self._last.items() if of in keys}
