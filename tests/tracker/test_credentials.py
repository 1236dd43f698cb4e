"""Texts that users see contain no credentials."""

import pytest

from service.tracker.credentials import hide_secrets, without_credentials

SECRET = "pa/ss@word"


@pytest.mark.parametrize(("url", "expected"), [
    ("https://host:5000/path", "https://host:5000/path"),
    ("sqlite:////folder/mlflow.db", "sqlite:////folder/mlflow.db"),
    (f"postgresql://me:{SECRET}@host/runs", "postgresql://host/runs"),
    ("mysql+pymysql://host/runs?user=me&password=word", "mysql+pymysql://host/runs"),
    (f"mysql://me:{SECRET}@host/runs?password=word", "mysql://host/runs"),
])  # fmt: skip
def test_urls_without_credentials(url: str, expected: str) -> None:
    assert without_credentials(url) == expected


def test_secrets_of_the_environment_and_of_urls_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("my_api_key", "a-secret-key")
    text = hide_secrets(f"no answer from postgresql://me:{SECRET}@host/runs with a-secret-key")
    assert text == "no answer from postgresql://***@host/runs with ***"
