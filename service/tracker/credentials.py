"""Texts without the credentials that the libraries of trackers put into them."""

import os
import re

MIN_SECRET_CHARACTERS = 6
_SECRET_NAME = re.compile(r"KEY|TOKEN|PASSWORD|SECRET", re.IGNORECASE)
# Up to the last "@": passwords in the URLs of databases may contain "/" and "@".
_USER_INFO = re.compile(r"://\S*@")
_QUERY = re.compile(r"(://[^\s?]*)\?\S*")


def without_credentials(url: str) -> str:
    """URL without user, password and query."""
    return _QUERY.sub(r"\1", _USER_INFO.sub("://", url))


def hide_secrets(text: str) -> str:
    """Text with `***` for user and password of URLs, and for secrets in this process's environment."""
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= MIN_SECRET_CHARACTERS:
            text = text.replace(value, "***")
    return _USER_INFO.sub("://***@", text)
