"""`/`: the list of jobs."""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from service.web.page import Web

PAGE_JOBS = 50
STATE_GROUPS: Mapping[str, tuple[str, ...]] = {
    "All": (),
    "Queued": ("queued",),
    "Active": ("starting", "running", "recovering", "pausing"),
    "Paused": ("paused",),
    "Succeeded": ("succeeded",),
    "Failed": ("failed",),
    "Cancelled": ("cancelled",),
}
"""States as tabs; those being deleted are among all."""
ORDERS: Mapping[str, str] = {
    "newest": "Newest first",
    "oldest": "Oldest first",
    "name": "Name, A to Z",
    "-name": "Name, Z to A",
    "state": "State, A to Z",
    "-state": "State, Z to A",
    "-progress": "Furthest first",
    "progress": "Least progress first",
    "loss": "Lowest loss first",
    "-loss": "Highest loss first",
}
_TEXTS = ("search", "label", "owner")


@dataclass(frozen=True)
class Tab:
    """A group of states, with the address of its jobs."""

    name: str
    href: str
    num_jobs: int
    is_current: bool


@dataclass(frozen=True)
class Column:
    """A column that the list can be sorted by."""

    name: str
    href: str
    direction: str
    """`ascending`, `descending` or `none`, for `aria-sort`."""
    description: str
    """What following the link does, for screen readers."""


@dataclass(frozen=True)
class ListQuery:
    """What the address of the list says."""

    search: str
    label: str
    owner: str
    states: tuple[str, ...]
    sort: str
    cursor: str

    @classmethod
    def of(cls, parameters: QueryParams) -> "ListQuery":
        states = tuple(state for text in parameters.getlist("state") for state in text.split(",") if state)
        texts = {name: parameters.get(name, "").strip() for name in _TEXTS}
        return cls(**texts, states=states, sort=parameters.get("sort") or "newest", cursor=parameters.get("cursor", ""))

    @property
    def is_filtered(self) -> bool:
        return bool(self.search or self.label or self.owner or self.states)

    def address(self, **changes: str) -> str:
        """Address with other values; from the first page on, unless a cursor is among them."""
        values = {
            **{name: getattr(self, name) for name in _TEXTS},
            "state": ",".join(self.states),
            "sort": "" if self.sort == "newest" else self.sort,
            **changes,
        }
        query = urlencode({name: value for name, value in values.items() if value})
        return f"/?{query}" if query else "/"


async def get_jobs(request: Request) -> Response:
    """Jobs that match the address's filters, a page at a time."""
    web, query = Web.of(request), ListQuery.of(request.query_params)
    jobs = await web.api(request).get(
        "/v1/jobs",
        search=query.search or None,
        label=[text for text in query.label.replace(",", " ").split() if text] or None,
        owner=query.owner or None,
        state=list(query.states) or None,
        sort=query.sort,
        cursor=query.cursor or None,
        limit=PAGE_JOBS,
        count="true",
    )
    return web.render(
        request,
        "jobs.html",
        jobs=jobs["items"],
        total=jobs["total"],
        next_page=query.address(cursor=jobs["next_cursor"]) if jobs["next_cursor"] else None,
        query=query,
        orders=ORDERS,
        num_active=sum(jobs["states"].get(state, 0) for state in (*STATE_GROUPS["Active"], "queued", "deleting")),
        tabs=_tabs(query, jobs["states"]),
        columns={name: _column(query, name) for name in ("name", "state", "progress", "loss", "newest")},
        is_empty=not sum(jobs["states"].values()) and not query.is_filtered,
    )


def _tabs(query: ListQuery, num_jobs: Mapping[str, int]) -> list[Tab]:
    return [
        Tab(
            name,
            query.address(state=",".join(states)),
            sum(number for state, number in num_jobs.items() if not states or state in states),
            set(states) == set(query.states),
        )
        for name, states in STATE_GROUPS.items()
    ]


def _column(query: ListQuery, name: str) -> Column:
    """The first click sorts times and progress downwards, others upwards; the next one reverses it."""
    if name == "newest":
        first, second, direction = "newest", "oldest", {"newest": "descending", "oldest": "ascending"}
    else:
        first, second = (f"-{name}", name) if name == "progress" else (name, f"-{name}")
        direction = {name: "ascending", f"-{name}": "descending"}
    target = second if query.sort == first else first
    words = {"ascending": "ascending", "descending": "descending"}[direction[target]]
    return Column(name, query.address(sort="" if target == "newest" else target), direction.get(query.sort, "none"),
                  f"sort {words}")  # fmt: skip


ROUTES = [Route("/", get_jobs, methods=["GET"])]
