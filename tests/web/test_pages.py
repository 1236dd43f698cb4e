"""Pages over HTTP: nothing of a job is markup, nothing is inline, and refusals are words."""

import re
import tomllib
from collections.abc import Iterator
from contextlib import closing
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from service.control.store.database import Database
from service.control.store.jobs import set_columns
from service.web.refusals import own_path
from service.web.static_files import FOLDER, StaticFiles
from tests.service.control_plane import ControlPlane
from tests.service.databases import BOTH_DATABASES
from tests.web.stored_jobs import store_jobs

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
ABSENT = "job-aaaaaaaaaaaa"
HOSTILE = "<script>alert(1)</script>"


class Markup(HTMLParser):
    """Elements and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        self.inline += [f"{tag} {name}" for name in attributes if name == "style" or name.startswith("on")]
        self.inline += [f"{tag} {name}" for name, value in attrs if (value or "").lower().startswith("javascript:")]
        if tag == "style" or (tag == "script" and "src" not in attributes):
            self.inline.append(tag)

    def attributes(self, tag: str, name: str) -> list[str]:
        return [str(attributes[name]) for element, attributes in self.elements if element == tag and name in attributes]


@pytest.fixture(scope="module")
def filled_plane(plane: ControlPlane) -> Iterator[ControlPlane]:
    """A control plane with 120 jobs that have ended, one that waits, and a hostile one."""
    with closing(Database(plane.database_url)) as database:
        store_jobs(database, 120)
    plane.post(labels={"team": "waiting"}, resources={"num_workers": 900})
    return plane


def page_of(plane: ControlPlane, path: str, **headers: str) -> httpx.Response:
    return plane.http.get(path, headers={**HTML, **headers})


PAGES = [
    ("/", 200), ("/?search=switch&state=failed&sort=-loss", 200), ("/?search=nothing-like-it", 200),
    ("/?sort=nonsense", 422), ("/?state=nonsense", 422), ("/?cursor=nonsense", 422), ("/nowhere", 404),
    ("/cluster", 200), ("/plan", 200), ("/submit", 200),
]  # fmt: skip


@BOTH_DATABASES
@pytest.mark.parametrize(("path", "status"), PAGES)
def test_every_page_is_strict_and_has_nothing_inline(filled_plane: ControlPlane, path: str, status: int) -> None:
    check_page(filled_plane, page_of(filled_plane, path), status)


def test_the_login_page_and_an_empty_list_are_strict_too(token_plane: ControlPlane) -> None:
    check_page(token_plane, page_of(token_plane, "/"), 200)
    check_page(token_plane, page_of(token_plane, "/login", authorization=""), 200)


def check_page(plane: ControlPlane, response: httpx.Response, status: int) -> None:
    assert (response.status_code, response.headers["content-type"]) == (status, "text/html; charset=utf-8")
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy == {
        "default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "img-src": "'self' data:",
        "connect-src": "'self'", "form-action": "'self'", "base-uri": "'none'", "frame-ancestors": "'none'",
    }  # fmt: skip
    assert response.headers["cache-control"] == "no-store"
    markup = Markup(response.text)
    assert markup.inline == []
    assert [tag for tag, _ in markup.elements].count("h1") == 1
    resources = markup.attributes("script", "src") + markup.attributes("link", "href") + markup.attributes("img", "src")
    assert resources
    for resource in resources:  # of this service alone, and all there
        assert resource.startswith("/static/")
        assert plane.http.get(resource, headers={"authorization": ""}).status_code == 200


@BOTH_DATABASES
def test_texts_of_users_are_text(filled_plane: ControlPlane) -> None:
    """What a spec refuses in a name, an address may still contain, and so may an older store."""
    with closing(Database(filled_plane.database_url)) as database, database.write() as tx:
        columns = {"name": HOSTILE, "reason": f"rank 0: {HOSTILE}\x1b[31m", "owner": f"'\"><b>{HOSTILE}",
                   "labels": '{"<i>": "</title><script>"}'}  # fmt: skip
        set_columns(tx, 1, columns)
    plain = page_of(filled_plane, "/?sort=oldest")
    assert HOSTILE not in plain.text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in plain.text
    found = page_of(filled_plane, f"/?search={HOSTILE}&label={HOSTILE}&owner={HOSTILE}")
    assert found.status_code == 200
    for page in (plain.text, found.text):
        markup = Markup(page)
        assert markup.inline == []
        assert {"b", "i"}.isdisjoint(tag for tag, _ in markup.elements)


@BOTH_DATABASES
def test_the_list_links_to_each_job_once_over_all_pages(filled_plane: ControlPlane) -> None:
    stored_ids = {job["id"] for job in filled_plane.list_jobs(limit=200)}
    for sort in ("newest", "oldest", "name", "-name", "state", "-progress", "progress", "loss", "-loss"):
        listed_ids: list[str] = []
        path: str | None = f"/?sort={sort}"
        while path is not None:
            markup = Markup(page_of(filled_plane, path).text)
            listed_ids += markup.attributes("tr", "data-id")
            path = next((str(a["href"]) for tag, a in markup.elements if tag == "a" and a.get("rel") == "next"), None)
        assert (len(listed_ids), set(listed_ids)) == (len(stored_ids), stored_ids)


@BOTH_DATABASES
def test_filters_combine_and_tabs_count(filled_plane: ControlPlane) -> None:
    failed = filled_plane.http.get("/v1/jobs?state=failed&search=BASE&count=true&limit=200").json()
    assert failed["total"] == len(failed["items"]) > 0
    assert all(job["state"] == "failed" and "base" in job["name"] for job in failed["items"])
    page = Markup(page_of(filled_plane, "/?state=failed&search=BASE").text)
    assert set(page.attributes("tr", "data-id")) == {job["id"] for job in failed["items"][:50]}
    [current] = [a["href"] for tag, a in page.elements if tag == "a" and a.get("aria-current") and "state=" in str(a)]
    assert current == "/?search=BASE&state=failed"


# Refusals


@BOTH_DATABASES
@pytest.mark.parametrize("path", ["/nowhere", f"/v2/jobs/{ABSENT}", "/docs/x", "/static/"])
def test_programs_get_problems_and_people_pages(filled_plane: ControlPlane, path: str) -> None:
    assert filled_plane.http.get(path).headers["content-type"].startswith(("application/problem+json", "text/plain"))
    if not path.startswith("/static/"):
        page = page_of(filled_plane, path)
        assert (page.status_code, page.headers["content-type"]) == (404, "text/html; charset=utf-8")
        assert "/" in Markup(page.text).attributes("a", "href")  # a way on


@pytest.mark.parametrize(
    "path",
    [
        "/jobs/%3Flimit=1", "/jobs/%2e%2e", "/jobs/%00", "/jobs/a%0ab", "/jobs/x%23y", "/sweeps/%2e%2e",
        "/sweeps/%3Flimit=1", "/compare?sweep=../jobs", "/compare?sweep=x%0a", "/compare?sweep=%3Flimit=1",
        "/compare?sweep=a/b",
    ],
)  # fmt: skip
def test_an_id_that_none_can_have_leads_to_no_other_route(filled_plane: ControlPlane, path: str) -> None:
    request = filled_plane.http.build_request("GET", "/", headers=HTML)
    request.url = request.url.copy_with(raw_path=path.encode())  # as it is, not encoded again
    check_page(filled_plane, filled_plane.http.send(request), 404)


def test_cookies_of_other_services_on_the_host_may_be_anything(filled_plane: ControlPlane) -> None:
    assert filled_plane.http.get("/", headers={**HTML, "cookie": "theme=d\u00e9j\u00e0".encode()}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/jobs?sort=nonsense", f"/v1/jobs/{ABSENT}", "/v1/nowhere"])
def test_the_api_answers_in_its_own_format_whoever_asks(filled_plane: ControlPlane, path: str) -> None:
    assert page_of(filled_plane, path).headers["content-type"] == "application/problem+json"


def test_a_foreign_host_or_origin_gets_no_page(filled_plane: ControlPlane) -> None:
    for headers, status in (({"host": "evil.example"}, 421), ({"origin": "https://evil.example"}, 403)):
        response = page_of(filled_plane, "/", **headers)
        assert response.status_code == status
        assert "data-id" not in response.text
        assert "frame-ancestors 'none'" in response.headers["content-security-policy"]


def test_head_of_a_page_is_its_headers(filled_plane: ControlPlane) -> None:
    for path, status in (("/", 200), ("/nowhere", 404)):
        head, got = filled_plane.http.head(path, headers=HTML), page_of(filled_plane, path)
        assert (head.status_code, head.content) == (status, b"")
        assert head.headers["content-type"] == got.headers["content-type"]


# Static files


def test_static_files_have_types_tags_and_are_kept(plane: ControlPlane) -> None:
    [style] = Markup(page_of(plane, "/nowhere").text).attributes("link", "href")[1:]
    response = plane.http.get(style)
    assert response.headers["content-type"] == "text/css; charset=utf-8"
    assert response.headers["content-encoding"] == "gzip"
    assert "immutable" in response.headers["cache-control"]
    unchanged = plane.http.get(style, headers={"if-none-match": response.headers["etag"]})
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    plain = plane.http.get(style, headers={"accept-encoding": "identity"})
    assert (plain.content, "content-encoding" in plain.headers) == (response.content, False)
    other_release = re.sub(r"/static/[^/]+/", "/static/000000000000/", style)
    assert plane.http.get(other_release).headers["cache-control"] == "no-cache"
    for path in ("/static/x/../../web.py", "/static/x/%2e%2e/%2e%2e/web.py", "/static/x/style", "/static/x/absent.css"):
        assert plane.http.get(path).status_code == 404


def test_modules_are_small_and_import_only_what_is_there() -> None:
    modules = list((FOLDER / "modules").rglob("*.js"))
    assert sum(module.stat().st_size for module in modules) < 120_000
    for module in modules:
        for target in re.findall(r'from "([^"]+)"', module.read_text()):
            assert target.startswith(".")
            assert (module.parent / target).is_file(), f"{module.name} imports {target}"
    assert all(
        file.media_type == "text/javascript" for name, file in StaticFiles()._files.items() if name.endswith(".js")
    )


@pytest.mark.parametrize("library", ["uplot", "yaml"])
def test_a_library_is_what_its_package_has(library: str) -> None:
    folder = FOLDER / "vendor" / library
    digests = dict(reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines())
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert files.keys() == {*digests, "README.md", "SHA256SUMS"}
    assert {name: sha256(files[name].read_bytes()).hexdigest() for name in digests} == digests


def test_a_built_distribution_has_all_files_of_the_pages() -> None:
    root = Path(__file__).parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["service"]
    packaged = {path for pattern in patterns for path in (root / "service").glob(pattern) if path.is_file()}
    files = {
        path for path in (root / "service" / "web").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert files - packaged == set()


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/jobs/job-aaaaaaaaaaaa?tab=logs#x", "/jobs/job-aaaaaaaaaaaa?tab=logs#x"), ("//evil.example", "/"),
        ("/\\evil.example", "/"), ("https://evil.example", "/"), ("javascript:alert(1)", "/"), ("", "/"),
        ("/\t/evil.example", "/"), ("\\\\evil.example", "/"), (" /x", "/"),
        ("//[evil", "/"), ("/[x", "/[x"), ("/x\r\nset-cookie: a=b", "/"),
    ],
)  # fmt: skip
def test_a_login_leads_to_a_path_of_this_service(text: str, path: str) -> None:
    assert own_path(text) == path
