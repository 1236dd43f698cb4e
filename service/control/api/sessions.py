"""Sessions of browsers that have logged in with the token, by a signed cookie."""

import hmac
import time
from collections import OrderedDict, deque
from hashlib import sha256

from itsdangerous import BadSignature, TimestampSigner

from service.control.errors import Forbidden, TooManyRequests

MAX_WRONG_TOKENS = 10
"""Wrong tokens of one address within `_WINDOW_S`; further attempts are refused."""
_WINDOW_S = 60.0
_MAX_ADDRESSES = 4096
_MEANING = b"user"


class Sessions:
    """Signs and verifies session cookies. Their key is derived from the token, so that they are valid on every control
    plane with that token, and none outlives it."""

    def __init__(self, token: bytes, lifetime_s: int) -> None:
        self._token, self.lifetime_s = token, lifetime_s
        self._signer = TimestampSigner(token, salt=b"shardyard session", digest_method=sha256)
        # Cookies are shared by all ports of a host, where several services may have tokens of their own.
        self.cookie = f"shardyard-{hmac.digest(token, b'cookie name', 'sha256').hex()[:8]}"
        self._wrong: OrderedDict[str, deque[float]] = OrderedDict()

    def is_token(self, token: bytes) -> bool:
        return hmac.compare_digest(token, self._token)

    def is_session(self, cookie: str | None) -> bool:
        """Whether the value of the cookie is signed with this token's key and has not expired."""
        if cookie is None or not cookie.isascii():
            return False
        try:
            return self._signer.unsign(cookie, max_age=self.lifetime_s) == _MEANING
        except BadSignature:
            return False

    def open(self, token: bytes, address: str) -> str:
        """Value of a new session's cookie. Raises Forbidden for a wrong token, TooManyRequests after many."""
        attempts = self._attempts(address)
        if len(attempts) >= MAX_WRONG_TOKENS:
            wait_s = max(1, round(attempts[0] + _WINDOW_S - time.monotonic()))
            raise TooManyRequests(
                f"{len(attempts)} wrong tokens within a minute; try again in {wait_s} s",
                headers={"retry-after": str(wait_s)},
            )
        if not self.is_token(token):
            attempts.append(time.monotonic())
            raise Forbidden("the token is wrong; it is the value of SHARDYARD_TOKEN of this service")
        return self._signer.sign(_MEANING).decode()

    def _attempts(self, address: str) -> deque[float]:
        """Times of an address's recent wrong tokens."""
        attempts = self._wrong.setdefault(address, deque())
        self._wrong.move_to_end(address)
        while len(self._wrong) > _MAX_ADDRESSES:
            self._wrong.popitem(last=False)
        while attempts and attempts[0] <= time.monotonic() - _WINDOW_S:
            attempts.popleft()
        return attempts
