"""Alerts and the board: PromQL that parses, of metrics that the control plane and Ray export."""

import copy
import importlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import ray
import yaml

from service.control.report.prometheus import ActiveJob, Figures
from service.control.report.saves import Saves
from tests.deploy.deployment import ROOT, Manifest, Overlay

MONITORING = ROOT / "k8s" / "components" / "monitoring"
CASES = Path(__file__).parent / "alert_cases.yaml"
MONITORED = ["production", "standing-postgres"]


@pytest.fixture(scope="module", params=MONITORED)
def overlay(request: pytest.FixtureRequest, overlays: dict[str, Overlay]) -> Overlay:
    return overlays[request.param]


@pytest.fixture(scope="module")
def board(overlays: dict[str, Overlay]) -> Manifest:
    config_map = overlays["production"].find("ConfigMap", "shardyard-board")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1", "what Grafana's sidecar looks for"
    (text,) = config_map["data"].values()
    return json.loads(text)


def rules() -> list[Manifest]:
    (group,) = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["spec"]["groups"]
    return group["rules"]


def queries_of(board: Manifest) -> Iterator[str]:
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def metric_names(query: str) -> set[str]:
    """Metrics that a query reads."""

    def names(expression: Any) -> Iterator[str]:
        match expression:
            case promql_parser.VectorSelector():
                yield expression.name
            case promql_parser.MatrixSelector():
                yield expression.vector_selector.name
            case promql_parser.BinaryExpr():
                yield from names(expression.lhs)
                yield from names(expression.rhs)
            case promql_parser.Call():
                for argument in expression.args:
                    yield from names(argument)
            case promql_parser.AggregateExpr() | promql_parser.ParenExpr() | promql_parser.SubqueryExpr():
                yield from names(expression.expr)

    return set(names(promql_parser.parse(query)))


@pytest.fixture(scope="module")
def own_metrics() -> set[str]:
    """Series of a control plane's /metrics."""
    figures = Figures()
    figures.watch_jobs(dict)
    figures.watch_queue(lambda: None)
    figures.watch_active(dict)
    names = set()
    for line in figures.text().decode().splitlines():
        if match := re.match(r"# TYPE (\S+) (\S+)", line):
            name, kind = match.groups()
            names |= {name, *((f"{name}_bucket", f"{name}_sum", f"{name}_count") if kind == "histogram" else ())}
    return names


@pytest.fixture(scope="module")
def ray_metrics() -> set[str]:
    """Series of Ray that its own boards read."""
    boards = (Path(ray.__file__).parent / "dashboard" / "modules" / "metrics" / "dashboards").glob("*.py")
    return {name for file in boards for name in re.findall(r"\bray_\w+", file.read_text())}


def test_an_active_job_and_the_queue_have_values() -> None:
    figures = Figures()
    figures.watch_queue(lambda: 1769857200.0)
    figures.watch_active(lambda: {"j1": ActiveJob(70, 100, Saves(), is_evaluating=True, is_queued=True)})
    samples = dict(
        line.rsplit(" ", 1) for line in figures.text().decode().splitlines() if line.startswith("shardyard_")
    )
    assert float(samples["shardyard_queue_oldest_timestamp_seconds"]) == 1769857200
    names = ("step", "num_steps", "evaluating", "queued")
    assert [float(samples[f'shardyard_job_{name}{{job="j1"}}']) for name in names] == [70, 100, 1, 1]
    assert float(samples['shardyard_job_failed_checkpoints{job="j1"}']) == 0
    assert not any(name.startswith("shardyard_job_last_checkpoint") for name in samples), "there is none yet"


def test_alerts_read_metrics_that_exist(own_metrics: set[str]) -> None:
    assert rules()
    for rule in rules():
        names = metric_names(rule["expr"])
        assert names, rule["alert"]
        assert names <= own_metrics, rule["alert"]


def test_panels_read_metrics_that_exist(board: Manifest, own_metrics: set[str], ray_metrics: set[str]) -> None:
    for query in queries_of(board):
        names = metric_names(query)
        assert names, query
        assert names <= own_metrics | ray_metrics, query
    board_metrics = {
        name for query in queries_of(board) for name in metric_names(query) if name.startswith("shardyard_")
    }
    alert_metrics = {name for rule in rules() for name in metric_names(rule["expr"])}
    assert alert_metrics <= board_metrics, "who is alerted looks at the board"


def test_panels_lie_side_by_side(board: Manifest) -> None:
    cells = [
        (x, y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24, "columns of Grafana's grid"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_grafana_reads_all_of_the_board(board: Manifest) -> None:
    """Its own types of dashboards take every field, and write the same again: none is misspelt or of a wrong kind."""
    dashboards = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="of the extra dev")
    encoder = importlib.import_module("grafana_foundation_sdk.cog.encoder").JSONEncoder()
    importlib.import_module("grafana_foundation_sdk.cog.plugins").register_default_plugins()
    dashboard = dashboards.Dashboard.from_json(copy.deepcopy(board))
    assert _part_of(json.loads(encoder.encode(dashboard)), board) == board


def _part_of(value: Any, shape: Any) -> Any:
    """`value` without the fields that `shape` does not have: defaults that Grafana adds."""
    if isinstance(value, dict) and isinstance(shape, dict):
        return {key: _part_of(value[key], shape[key]) for key in shape if key in value}
    if isinstance(value, list) and isinstance(shape, list) and len(value) == len(shape):
        return [_part_of(item, item_shape) for item, item_shape in zip(value, shape, strict=True)]
    return value


def test_a_metric_that_is_misspelt_is_noticed(own_metrics: set[str]) -> None:
    assert metric_names("max(rate(shardyard_job_steps[5m])) / on (job) (a - b)") == {"shardyard_job_steps", "a", "b"}
    assert "shardyard_job_steps" not in own_metrics
    with pytest.raises(ValueError):
        promql_parser.parse("max by (job (shardyard_job_step)")


def test_alerts_say_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
        assert {"summary", "description"} <= rule["annotations"].keys(), rule["alert"]


def test_monitors_find_their_targets(overlay: Overlay) -> None:
    monitor = overlay.find("ServiceMonitor", "control-plane")["spec"]
    service = overlay.find("Service", "control-plane")
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    (token,) = [e for e in overlay.pod("control-plane").container["env"] if e["name"] == "SHARDYARD_TOKEN"]
    assert endpoint["authorization"]["credentials"] == token["valueFrom"]["secretKeyRef"]
    assert endpoint["honorLabels"] is True, "`job` is a training job"
    (ray_endpoint,) = overlay.find("PodMonitor", "ray")["spec"]["podMetricsEndpoints"]
    assert ray_endpoint["port"] == "metrics"
    for pod in overlay.pods_of("ray-worker"):
        assert ray_endpoint["port"] in pod.ports


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool, which evaluates the alerts, is not installed (Debian: prometheus)")
    rule_file = tmp_path / "rules.yaml"
    bare = [{key: value for key, value in rule.items() if key != "annotations"} for rule in rules()]
    rule_file.write_text(yaml.safe_dump({"groups": [{"name": "shardyard", "rules": bare}]}))
    case_file = tmp_path / "cases.yaml"
    case_file.write_text(CASES.read_text().replace("RULES", str(rule_file)))
    with_annotations = tmp_path / "annotated.yaml"
    with_annotations.write_text(yaml.safe_dump({"groups": [{"name": "shardyard", "rules": rules()}]}))
    for command in (["check", "rules", with_annotations], ["test", "rules", case_file]):
        run = subprocess.run([promtool, *command], capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stdout + run.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    checks = [check for case in yaml.safe_load(CASES.read_text())["tests"] for check in case["alert_rule_test"]]
    firing_names = {check["alertname"] for check in checks if check.get("exp_alerts")}
    silent_names = {check["alertname"] for check in checks if not check.get("exp_alerts")}
    assert firing_names == silent_names == {rule["alert"] for rule in rules()}
