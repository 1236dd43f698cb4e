"""Leave out what may differ between two runs or releases: ids, times, ports, codes and wording."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

WORDING = ("code", "rule", "remedy", "detail", "message", "title", "description")
"""Keys of an answer with codes and sentences."""
_PATTERNS = (
    (re.compile(r"job-[a-z0-9]{6,}"), "JOB"),
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(Z|\+00:00)"), "TIME"),
    (re.compile(r"(127\.0\.0\.1|localhost):\d+"), "HOST"),
    (re.compile(r"\b[0-9a-f]{32,64}\b"), "DIGEST"),
    (re.compile(r"[\w.-]+:\d+:[0-9a-f]{8}\b"), "PROCESS"),
)


def masked_text(text: str, folder: str = "") -> str:
    """Text without ids, times, addresses, digests and the run's own folder."""
    if folder:
        text = text.replace(folder, "FOLDER")
    for pattern, name in _PATTERNS:
        text = pattern.sub(name, text)
    return text


def mask_json(value: Any, folder: str = "", words: Iterable[str] = WORDING) -> Any:
    """JSON without the above; texts under the keys in `words` become a placeholder."""
    if isinstance(value, Mapping):
        return {
            masked_text(key, folder): "TEXT"
            if key in words and isinstance(item, str) and item
            else mask_json(item, folder, words)
            for key, item in value.items()
            if key != "code"
        }
    if isinstance(value, list | tuple):
        return [mask_json(item, folder, words) for item in value]
    return masked_text(value, folder) if isinstance(value, str) else value


def masked_problems(problems: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Path and value of each problem."""
    return [{"path": problem["path"], "value": mask_json(problem["value"])} for problem in problems]


def masked_plan(plan: Mapping[str, Any]) -> Any:
    """A plan without sentences: its reasons become their number, and reasons against runners-up are left out."""
    content = {name: value for name, value in plan.items() if name not in ("reasons", "made_for")}
    made_for = dict(plan.get("made_for") or {})
    made_for.pop("code", None)
    runners_up = [
        {name: value for name, value in runner_up.items() if name != "why_not"}
        for runner_up in plan.get("runners_up", ())
    ]
    return {**content, "runners_up": runners_up, "made_for": mask_json(made_for), "num_reasons": len(plan["reasons"])}
