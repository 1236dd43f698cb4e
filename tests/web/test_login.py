"""Logging in with the token: what the cookie is, and what it allows."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookies import SimpleCookie

import httpx
import pytest

from service.control.api.sessions import MAX_WRONG_TOKENS, Sessions
from service.control.errors import Forbidden, TooManyRequests
from tests.service.control_plane import TOKEN, ControlPlane, spec

HTML = {"accept": "text/html"}
JSON = {"content-type": "application/json"}


def browser_of(plane: ControlPlane) -> httpx.Client:
    """A client without the token that keeps cookies, and says where its requests come from."""
    own_page = {"origin": plane.url, "sec-fetch-site": "same-origin"}
    return httpx.Client(base_url=plane.url, headers=own_page, trust_env=False, timeout=60)


@contextmanager
def logged_in(plane: ControlPlane) -> Iterator[httpx.Client]:
    with browser_of(plane) as client:
        assert client.post("/v1/session", json={"token": TOKEN}).status_code == 204
        yield client


def test_a_page_leads_to_the_login_and_back(token_plane: ControlPlane) -> None:
    with browser_of(token_plane) as client:
        for path, target in (("/", "/login"), ("/?state=failed", "/login?next=%2F%3Fstate%3Dfailed")):
            response = client.get(path, headers=HTML)
            assert (response.status_code, response.headers["location"]) == (303, target)
        page = client.get("/login?next=%2F%3Fstate%3Dfailed", headers=HTML)
        assert 'data-next="/?state=failed"' in page.text
        assert client.get("/login?next=//evil.example", headers=HTML).text.count('data-next="/"') == 1
        assert client.get("/v1/jobs", headers=HTML).status_code == 401


def test_the_cookie_is_a_session_and_not_the_token(token_plane: ControlPlane) -> None:
    with browser_of(token_plane) as client:
        response = client.post("/v1/session", json={"token": TOKEN})
        [(name, cookie)] = SimpleCookie(response.headers["set-cookie"]).items()
        assert (cookie["httponly"], cookie["samesite"], cookie["path"], cookie["secure"]) == (True, "strict", "/", "")
        assert int(cookie["max-age"]) == 168 * 3600
        assert TOKEN not in response.headers["set-cookie"]
        assert client.get("/v1/jobs").status_code == 200
        assert client.get("/", headers=HTML).status_code == 200
        secure = client.post("/v1/session", json={"token": TOKEN}, headers={"x-forwarded-proto": "https"})
        assert SimpleCookie(secure.headers["set-cookie"])[name]["secure"] is True
        assert client.request("DELETE", "/v1/session").status_code == 204
        assert client.get("/v1/jobs").status_code == 401


def test_forged_old_and_foreign_cookies_are_nothing(token_plane: ControlPlane) -> None:
    sessions = Sessions(TOKEN.encode(), 60)
    value = sessions.open(TOKEN.encode(), "")
    assert sessions.is_session(value)  # and so on any replica with this token
    assert Sessions(TOKEN.encode(), 60).is_session(value)
    other = Sessions(b"another-token-of-sixteen", 60)
    assert not other.is_session(value)
    assert other.cookie != sessions.cookie
    assert not Sessions(TOKEN.encode(), -1).is_session(value)  # a second ago at least
    with browser_of(token_plane) as client:
        for forged in (
            value[:-2],
            f"admin{value}",
            TOKEN,
            "",
            "user",
            "\u00e9",
            f'"{value}"x',
            value.replace(".", ".."),
        ):
            header = {"cookie": f"{sessions.cookie}={forged}".encode()}
            assert client.get("/v1/jobs", headers=header).status_code == 401
        assert client.get("/v1/jobs", headers={"cookie": f"{sessions.cookie}={value}"}).status_code == 200


FOREIGN = [
    ({"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, 403),
    ({"origin": "http://127.0.0.1:1", "sec-fetch-site": "same-site"}, 403),
    ({"sec-fetch-site": "same-site"}, 403),
    ({"sec-fetch-site": "none"}, 403),
    ({}, 403),
    ({"origin": "null"}, 403),
    ({"sec-fetch-site": "same-origin"}, 201),
]


@pytest.mark.parametrize(("headers", "status"), FOREIGN)
def test_the_cookie_changes_something_only_from_own_pages(
    token_plane: ControlPlane, headers: dict[str, str], status: int
) -> None:
    with logged_in(token_plane) as client:
        for name in ("origin", "sec-fetch-site"):
            del client.headers[name]
        num_jobs = len(token_plane.list_jobs(limit=200))
        response = client.post("/v1/jobs", json=spec(resources={"num_workers": 900}), headers=headers)
        assert response.status_code == status
        assert len(token_plane.list_jobs(limit=200)) == num_jobs + (status == 201)


def test_a_form_cannot_act_with_the_cookie(token_plane: ControlPlane) -> None:
    with logged_in(token_plane) as client:
        assert client.post("/v1/session", data={"token": TOKEN}).status_code == 415
        assert client.post("/v1/jobs", data={"name": "x"}).status_code == 415


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"token": 3}', '{"token": "x", "more": 1}', "{", '"x"'])
def test_a_login_without_a_token_is_refused_without_repeating_it(token_plane: ControlPlane, body: str) -> None:
    with browser_of(token_plane) as client:
        response = client.post("/v1/session", content=body, headers=JSON)
        assert response.status_code in (400, 422)
        assert "set-cookie" not in response.headers


def test_a_long_login_is_not_read(token_plane: ControlPlane) -> None:
    with browser_of(token_plane) as client:
        assert client.post("/v1/session", content=b" " * 10_000, headers=JSON).status_code == 413


def test_many_wrong_tokens_have_to_wait() -> None:
    sessions = Sessions(TOKEN.encode(), 60)
    for _ in range(MAX_WRONG_TOKENS):
        with pytest.raises(Forbidden):
            sessions.open(b"wrong", "10.0.0.1")
    with pytest.raises(TooManyRequests) as refusal:
        sessions.open(TOKEN.encode(), "10.0.0.1")  # no longer tells right from wrong
    assert re.fullmatch(r"\d+", refusal.value.headers["retry-after"])
    assert sessions.is_session(sessions.open(TOKEN.encode(), "10.0.0.2"))


def test_there_is_nothing_to_log_in_to_without_a_token(plane: ControlPlane) -> None:
    response = plane.http.post("/v1/session", json={"token": "anything"})
    assert (response.status_code, "set-cookie" in response.headers) == (204, False)
    assert plane.http.get("/login", headers=HTML).headers.get("location") == "/"
