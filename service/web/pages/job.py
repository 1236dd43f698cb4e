"""`/jobs/{id}`: one job, with everything that is known of it; `/jobs/{id}/samples`: its completions as a part."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from moe.records import StoredCheckpoint
from service.web.api import Api, Refusal, item_path
from service.web.formats import number, size
from service.web.page import Web
from service.web.plan_picture import plan_picture

NUM_EVENTS = 20
NUM_SAMPLES = 3
_CANCELLABLE = ("queued", "starting", "running", "recovering", "pausing", "paused")
_PAUSABLE = ("queued", "starting", "running", "recovering")
_RESUMABLE = ("paused", "failed", "cancelled")
_DELETABLE = ("paused", "succeeded", "failed", "cancelled")
_OVER = ("succeeded", "failed", "cancelled")
_TIMES: Mapping[str, str] = {
    "products_s": "matrix products", "attention_s": "attention", "routing_s": "routing",
    "elementwise_s": "memory-bound operations", "launches_s": "launches by the host",
    "all_to_all_s": "all-to-all", "gather_s": "gathering", "send_s": "sends between stages",
    "bubble_s": "pipeline bubble", "all_reduce_s": "all-reduce", "optimizer_s": "optimizer",
    "data_s": "waiting for data", "module_s": "the module",
}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """Commands that show or do the same as the page."""

    purpose: str
    text: str


@dataclass(frozen=True)
class EventLine:
    """An event in words. `static/modules/job_events.js` writes earlier ones the same way."""

    time: str
    kind: str
    actor: str
    words: str
    state: str | None = None
    level: str | None = None

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> "EventLine":
        data, kind = event["data"] if isinstance(event["data"], dict) else {}, event["kind"]
        state = level = None
        words = _text(data, "reason") or "planned"
        if kind == "state":
            state, words = _text(data, "state"), _text(data, "reason")
        elif kind == "checkpoint":
            words = f"checkpoint of step {number(data.get('step'))} committed"
        elif kind == "log":
            level, words = _text(data, "level"), _text(data, "message")
        return cls(event["time"], kind, event["actor"], words, state, level)


@dataclass(frozen=True)
class Comparison:
    """A predicted value beside the measured one."""

    name: str
    predicted: str
    measured: str


async def get_job(request: Request) -> Response:
    """The page of a job. Raises Refusal, such as for one that does not exist."""
    web, job_id = Web.of(request), request.path_params["job_id"]
    api, path = web.api(request), item_path("/v1/jobs", job_id)
    job = await api.get(path)
    if job["state"] == "deleting":
        return web.render(request, "job_deleting.html", job=job)
    plan, checkpoints, history = await asyncio.gather(
        _optional(api, f"{path}/plan"),
        _optional(api, f"{path}/checkpoints"),
        api.get(f"{path}/history", limit=NUM_EVENTS),
    )
    state = job["state"]
    measured_bytes = _measured_bytes(job)
    return web.render(
        request,
        "job.html",
        job=job,
        job_id=job_id,
        is_over=state in _OVER,
        can={
            "pause": state in _PAUSABLE and not job["request"],
            "resume": state in _RESUMABLE,
            "cancel": state in _CANCELLABLE and job["request"] != "cancel",
            "delete": state in _DELETABLE,
        },
        figures={name: _figure(job, name) for name in ("loss", "tokens_per_s", "step_s")},
        seconds_left=_seconds_left(job, plan),
        plan=plan,
        picture=plan_picture(plan, measured_bytes) if plan else None,
        comparisons=_comparisons(plan, measured_bytes) if plan else (),
        times=_times(plan) if plan else (),
        checkpoints=checkpoints and [StoredCheckpoint.read(item) for item in reversed(checkpoints["items"])],
        events=[EventLine.of(event) for event in history["items"]],
        events_cursor=history["next_cursor"],
        scores=_scores(job),
        spec_text=yaml.safe_dump(job["spec"], sort_keys=False, allow_unicode=True, width=100),
        commands=_commands(job, checkpoints["items"] if checkpoints else ()),
    )


async def get_samples(request: Request) -> Response:
    """Completions recorded at the last evaluations, as HTML; nothing where there are none. The page asks for them once
    it is drawn: after a start, they wait until all steps have been read. Raises Refusal."""
    web = Web.of(request)
    path = item_path("/v1/jobs", request.path_params["job_id"])
    history = await web.api(request).get(f"{path}/metrics", name="samples", max_points=NUM_SAMPLES)
    samples = [(point["step"], _completions(point)) for point in reversed(history["items"])]
    html = web.templates.get_template("samples_fragment.html").render(samples=samples) if samples else ""
    return HTMLResponse(html.encode("utf-8", "replace"))


async def _optional(api: Api, path: str) -> Any:
    """JSON of a route; None where it has nothing for this job, or storage cannot be read."""
    try:
        return await api.get(path)
    except Refusal as refusal:
        if refusal.status in (404, 503):
            return None
        raise


def _seconds_left(job: Mapping[str, Any], plan: Mapping[str, Any] | None) -> float | None:
    """Estimate at the measured speed; None before the first steps, and for a job that does not train."""
    step_s = ((plan or {}).get("measured") or {}).get("step_s") or _figure(job, "step_s")
    if job["state"] != "running" or step_s is None:
        return None
    left_s: float = step_s * max(0, job["num_steps"] - job["step"])
    return left_s


def _measured_bytes(job: Mapping[str, Any]) -> float | None:
    """Memory of the fullest rank: of its GPU now, else what the last step recorded."""
    devices: list[float] = [
        rank["device"]["memory_bytes"] for rank in (job["run"] or {}).get("ranks", ()) if rank.get("device")
    ]
    return max(devices) if devices else _figure(job, "memory_bytes")


def _figure(job: Mapping[str, Any], name: str) -> float | None:
    """A number of the last step; None without it, or if it is not finite."""
    value: Any = (job["last_metric"] or {}).get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    return value if isinstance(value, str) else ""


def _completions(point: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Prompts with their completions at one step."""
    samples = point.get("samples")
    entries = samples if isinstance(samples, list) else []
    return [(_text(entry, "prompt"), _text(entry, "completion")) for entry in entries if isinstance(entry, dict)]


def _comparisons(plan: Mapping[str, Any], measured_bytes: float | None) -> list[Comparison]:
    predicted, measured = plan.get("predicted") or {}, plan.get("measured") or {}
    step_s = sum(value for name, value in predicted.items() if name != "hidden_s")
    tokens = plan.get("tokens_per_step")
    rows = [Comparison("time of a step", _seconds(step_s), _seconds(measured.get("step_s")))]
    if tokens and step_s:
        rows.append(
            Comparison("tokens per second", number(round(tokens / step_s)), _rounded(measured.get("tokens_per_s")))
        )
    memory = plan.get("memory") or {}
    total = sum(value for name, value in memory.items() if name not in ("limit", "allowance"))
    rows.append(
        Comparison("memory of the fullest rank", size(total), "–" if not measured_bytes else size(measured_bytes))
    )
    return rows


def _times(plan: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """(kind, seconds in words, share of the step) of the predicted step, the longest first."""
    predicted = {name: value for name, value in (plan.get("predicted") or {}).items() if name != "hidden_s" and value}
    total = sum(predicted.values()) or 1.0
    longest = sorted(predicted.items(), key=lambda entry: -entry[1])
    return [(_TIMES.get(name, name), _seconds(value), value / total) for name, value in longest]


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1000:,.3g} ms" if value < 1 else f"{value:,.3g} s"


def _rounded(value: float | None) -> str:
    return "–" if value is None else number(round(value))


def _scores(job: Mapping[str, Any]) -> list[tuple[str, list[str], list[tuple[str, list[str]]]]]:
    """Tables (title, columns, rows) of the finished model's report: every number in it, whatever the task."""
    report = (job["result"] or {}).get("report")
    if not isinstance(report, dict):
        return []
    tables = []
    for title, sets in (("Held-out sets", report.get("sets")), ("Sources", report.get("sources"))):
        if isinstance(sets, dict) and sets:
            rows = {name: dict(_leaves("", entry)) for name, entry in sets.items() if isinstance(entry, dict)}
            columns = [key for key in dict.fromkeys(key for row in rows.values() for key in row)
                       if any(row.get(key) is not None for row in rows.values())]  # fmt: skip
            if title == "Held-out sets":  # many numbers of few sets: sets become columns
                cells = [(column, [number(row.get(column)) for row in rows.values()]) for column in columns]
                tables.append((title, list(rows), cells))
            else:
                tables.append(
                    (title, columns, [(name, [number(row.get(key)) for key in columns]) for name, row in rows.items()])
                )
    known = ("sets", "sources", "examples", "completions", "seconds")
    numbers = _leaves("", {key: value for key, value in report.items() if key not in known})
    rest = [(name, [number(value)]) for name, value in numbers]
    if rest:
        tables.append(("Numbers", ["value"], rest))
    return tables


def _leaves(prefix: str, entry: Mapping[str, Any]) -> list[tuple[str, float | None]]:
    leaves: list[tuple[str, float | None]] = []
    for name, value in entry.items():
        path = f"{prefix} {name}".strip()
        if isinstance(value, dict):
            leaves += _leaves(path, value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            leaves.append((path.replace("_", " "), value))
    return leaves


def _commands(job: Mapping[str, Any], checkpoints: Sequence[Mapping[str, Any]]) -> list[Command]:
    job_id, is_language = job["id"], (job["spec"].get("model") or {}).get("kind") == "language"
    commands = [
        Command("Watch it train", f"shardyard watch {job_id}"),
        Command("Everything on this page", f"shardyard show {job_id}"),
        Command("Follow its log", f"shardyard logs {job_id} --follow"),
        Command("All numbers as CSV", f"shardyard metrics {job_id} --csv"),
        Command("Submit one like it", f"shardyard submit --like {job_id}"),
    ]
    if checkpoints:
        commands += [
            Command("Start another from its newest checkpoint", f"shardyard submit --like {job_id} --from-step newest"),
            Command(
                "Download and verify its newest checkpoint", f"shardyard download {job_id} --kind checkpoints --latest"
            ),
            Command("Export the model", f"shardyard export {job_id} FOLDER"),
            Command("Try the model", f"shardyard {'generate' if is_language else 'translate'} {job_id} TEXT"),
        ]
    return commands


ROUTES = [
    Route("/jobs/{job_id}", get_job, methods=["GET"]),
    Route("/jobs/{job_id}/samples", get_samples, methods=["GET"]),
]
