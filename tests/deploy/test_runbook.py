"""The runbook of docs/kubernetes.md quotes what the service says, and each symptom is provoked by a test."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.deploy.deployment import ROOT

DOCUMENT = ROOT / "docs" / "kubernetes.md"
PLACEHOLDER = re.compile(r"\b(?!SHARDYARD)[A-Z]{2,}[A-Z_]*\b|\bN\b")
"""What differs from case to case in a quoted message."""
SHORTEST = 6
"""Fewest characters of a part between placeholders that is looked up."""
COMMON = re.compile(r"GPU|CPU|OOM")


def symptoms() -> list[str]:
    """First columns of the runbook's tables."""
    runbook = DOCUMENT.read_text().partition("## Runbook")[2]
    return re.findall(r"^\| `(.+?)` \|", runbook, flags=re.MULTILINE)


def parts_of(symptom: str) -> list[str]:
    """Texts of a symptom between its placeholders."""
    marked = PLACEHOLDER.sub(lambda match: match[0] if COMMON.fullmatch(match[0]) else "\0", symptom)
    return [part for text in marked.split("\0") if len(part := text.strip(" ():;,")) >= SHORTEST]


@cache
def texts_of_the_service() -> list[str]:
    """Every string in the service's source, f-strings by their fixed parts."""
    return [
        node.value
        for folder in ("service", "moe/storage")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


@pytest.mark.parametrize("symptom", symptoms())
def test_the_service_says_it(symptom: str) -> None:
    parts = parts_of(symptom)
    assert parts, "nothing to look up"
    for part in parts:
        assert any(part in text for text in texts_of_the_service()), f"{part!r} is said nowhere"


PROVOKED = {
    ("tests/kubernetes/test_kuberay_settings.py", "test_settings_that_break_a_rule"): ("kuberay.SETTING is required",),
    ("tests/kubernetes/test_preflight.py", "test_missing_rights"): ("the credentials may not",),
    ("tests/kubernetes/test_preflight.py", "test_an_older_operator"): ("install KubeRay VERSION",),
    ("tests/kubernetes/test_preflight.py", "test_a_cluster_without_claim_and_queue"): (
        "names no LocalQueue",
        "names no PersistentVolumeClaim",
    ),
    ("tests/kubernetes/test_preflight.py", "test_access_modes_of_the_claim"): ("must contain ReadWriteMany",),
    ("tests/kubernetes/test_preflight.py", "test_storage_that_pods_do_not_mount"): ("storage_roots (=PATH)",),
    ("tests/unit/test_storage_packages.py", "test_a_missing_package_is_named_with_its_extra"): ("needs the package",),
    ("tests/service_cli/test_up.py", "test_it_refuses_what_it_cannot_run_on_before_anything_starts"): (
        "cannot use the database",
    ),
    ("tests/service/test_attacks.py", "test_nothing_is_served_without_the_token"): ("this service requires",),
    ("tests/service/test_attacks.py", "test_no_web_page_posts_a_job"): ("this service does not serve",),
    ("tests/kubernetes/test_outcome.py", "test_waits"): (
        "no KubeRay operator has acted",
        "cannot pull image",
        "no node has room",
        "POD waits for its volume claim",
        "POD cannot mount its volumes",
        "the namespace's quota",
        "an admission webhook",
        "waiting in queue",
        "queue QUEUE does not admit",
        "Kueue has not put",
    ),
    ("tests/kubernetes/test_outcome.py", "test_ends"): (
        "KubeRay refuses RayJob",
        "Kueue evicted it",
        "its driver was started",
        "its RayJob was deleted",
        "RayJob NAME was deleted",
    ),
    ("tests/kubernetes/test_ray_job.py", "test_too_large_a_gang_is_refused"): ("no node pool holds",),
    ("tests/procs/test_driver_watch.py", "test_what_a_cluster_lacks"): ("waiting for resources",),
    ("tests/service/test_reachability.py", "test_jobs_and_the_api_say_since_when_and_why"): (
        "the cluster has been unreachable",
    ),
    ("tests/ray/test_two_nodes.py", "test_a_lost_node_is_named_with_its_ranks"): ("node ADDRESS",),
    ("tests/kubernetes/test_outcome.py", "test_runs_in_trouble"): (
        "node NODE does not answer",
        "container CONTAINER",
        "evicted, because",
        "preempted by",
    ),
    ("tests/ray/test_two_nodes.py", "test_gpus_that_only_the_books_have_are_not_trained_without"): (
        "was assigned a GPU",
    ),
    ("tests/procs/test_heartbeats.py", "test_a_rank_that_others_wait_for_is_ended"): ("all ranks idle",),
    ("tests/service/test_records.py", "test_checkpoints_that_fail_are_in_the_jobs_reason_until_one_is_committed"): (
        "the checkpoint of step",
    ),
    ("tests/service/test_run_status.py", "test_a_driver_that_was_stopped_is_named_and_no_other"): (
        "workers that die or hang",
    ),
    ("tests/service/test_failure_history.py", "test_a_job_whose_cluster_is_lost_again_and_again_is_paused"): (
        "attempt N was lost",
    ),
    ("tests/service/test_deletion.py", "test_a_root_that_is_not_there_is_waited_for"): ("cannot be deleted yet",),
}
"""Beginnings of the symptoms that a test provokes, by the test's file and name."""


def test_every_symptom_is_provoked_by_a_test() -> None:
    provoked = tuple(beginning for beginnings in PROVOKED.values() for beginning in beginnings)
    assert [symptom for symptom in symptoms() if not symptom.startswith(provoked)] == []
    for path, name in PROVOKED:
        assert f"def {name}(" in Path(ROOT, path).read_text(), f"{path}::{name}"


def test_the_alerts_are_those_of_the_component() -> None:
    (document,) = yaml.safe_load_all((ROOT / "k8s/components/monitoring/alerts.yaml").read_text())
    alerts = {rule["alert"] for group in document["spec"]["groups"] for rule in group["rules"]}
    assert set(re.findall(r"`(Shardyard\w+)`", DOCUMENT.read_text())) == alerts
