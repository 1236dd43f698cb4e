"""Renders the chart: `python -m tests.deploy.helm` reads a list of requests and prints a list of answers, as JSON.

A process of its own, since Helm's library brings Go's runtime, with signal handlers and threads of its own.
"""

import json
import subprocess
import sys
from typing import Any

from tests.deploy.deployment import ROOT

CHART = ROOT / "k8s" / "chart"


def render_all(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers to requests `{"values": {...}, "namespace": ...}`: `{"files": {name: text}}`, or `{"error": ...}` for
    values that the chart refuses; and to `{"lint": true}`: `{"errors": [...], "messages": [...]}`."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.deploy.helm"],
        input=json.dumps(requests), cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    answers: list[dict[str, Any]] = json.loads(run.stdout)
    return answers


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    import helm_python

    if request.get("lint"):
        return dict(helm_python.lint(str(CHART)))
    with helm_python.Chart.load(str(CHART)) as chart:
        try:
            return {"files": chart.render(request["values"], name="release", namespace=request["namespace"])}
        except helm_python.HelmError as error:
            return {"error": str(error)}


if __name__ == "__main__":
    json.dump([_answer(request) for request in json.load(sys.stdin)], sys.stdout)
