"""Deduplication of log lines about decisions and failures that repeat every step."""

from collections.abc import Collection


class Deduplicator:
    """The last message logged under each key."""

    def __init__(self) -> None:
        self._last: dict[object, object] = {}

    def is_new(self, key: object, message: object) -> bool:
        """Whether the message differs from the key's last one, which it replaces."""
        previous = self._last.get(key)
        self._last[key] = message
        return previous != message

    def forget(self, key: object) -> None:
        """Forget a key: its next message is new again."""
        self._last.pop(key, None)

    def keep_only(self, keys: Collection[object]) -> None:
        """Forget all keys except these."""
        self._last = {key: message for key, message in self._last.items() if key in keys}
