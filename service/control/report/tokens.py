"""Tokens that authorize records of one attempt. Only their hashes are stored."""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from service.control.store.database import Database
from service.control.store.keys import ATTEMPTS, shared_key

KEY_FILE = "attempt.key"
"""File in the state folder with the key of a control plane on SQLite."""


class TokenMint:
    """Derives each attempt's token from a private key, reproducibly after a crash."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def of(cls, database: Database, state_dir: Path) -> "TokenMint":
        """Mint with the key from the state folder if the database is SQLite, else with the key in the database, which
        all control planes share: a control plane that takes over derives the tokens that running attempts have."""
        path = state_dir / KEY_FILE
        if database.is_sqlite:
            return cls(_read_or_make(path))
        return cls(shared_key(database, ATTEMPTS, first=path.read_bytes() if path.exists() else None))

    @property
    def instance(self) -> str:
        """Name of this installation, which all control planes with the same key have, and no others."""
        return hmac.new(self._key, b"instance", hashlib.sha256).hexdigest()[:16]

    def token(self, job_id: str, attempt: int) -> str:
        return hmac.new(self._key, f"{job_id}-a{attempt}".encode(), hashlib.sha256).hexdigest()


def hash_token(token: str) -> str:
    # The token has 256 random bits, so that a plain hash cannot be brute-forced.
    return hashlib.sha256(token.encode()).hexdigest()


def matches(token: str, token_hash: str | None) -> bool:
    """Whether this is the token, compared in constant time."""
    return hmac.compare_digest(hash_token(token), token_hash or "")


def write_key(path: Path, key: bytes) -> None:
    """Write the key of a backup, readable by its owner only, in place of an existing one."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with open(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(key)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def _read_or_make(path: Path) -> bytes:
    try:
        # Created atomically: two control planes that start together must read the same key.
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with open(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        finally:
            draft.unlink()
    except FileExistsError:
        pass
    return path.read_bytes()
