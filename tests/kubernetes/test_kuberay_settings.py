"""Settings of jobs on Kubernetes: read from the environment, and refused in words at start."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.spec.errors import RuleError
from service.cli.failures import Misuse
from service.cli.local import settings_for
from service.kuberay_settings import KubeRaySettings
from service.quantities import format_bytes, format_cores, parse_quantity
from tests.kubernetes.launches import pools

POOL = {"name": "h100", "nodes": 2, "cpus_per_node": "64", "memory": "512Gi", "accelerator": "H100"}
KUBERAY = {"LAUNCHER": "kuberay", "KUBERAY_IMAGE": "shardyard:1", "KUBERAY_POOLS": json.dumps([POOL])}


def set_environment(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(f"SHARDYARD_{name}", value)


def test_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    template = tmp_path / "pod.yaml"
    template.write_text("spec: {schedulerName: volcano}\n")
    set_environment(
        monkeypatch, **KUBERAY, KUBERAY_NAMESPACE="training", KUBERAY_SERVICE_ACCOUNT="trainer", KUBERAY_QUEUE="team",
        KUBERAY_HEAD_MEMORY="4Gi", KUBERAY_HEAD_CPUS="500m", KUBERAY_POD_TEMPLATE_FILE=str(template),
        KUBERAY_TEMPLATE_SECRETS='["s3"]', STORAGE_ROOTS='["/a"]',
    )  # fmt: skip
    settings = settings_for()
    kuberay = settings.kuberay
    assert (settings.launcher, kuberay.namespace, kuberay.service_account) == ("kuberay", "training", "trainer")
    assert (kuberay.head_memory, kuberay.head_cpus) == (4 * 1024**3, 0.5)
    assert kuberay.pod_template == {"spec": {"schedulerName": "volcano"}}
    assert (kuberay.template_secrets, settings.storage_roots) == (("s3",), ("/a",))
    (pool,) = kuberay.pools
    assert (pool.gpus_per_node, pool.memory, pool.shared_memory_bytes) == (8, 512 * 1024**3, 128 * 1024**3)
    assert KubeRaySettings.model_validate_json(kuberay.model_dump_json(exclude={"pod_template_file"})) == (
        kuberay.model_copy(update={"pod_template_file": None})
    )


def pool(**changes: Any) -> str:
    return json.dumps([{**POOL, **changes}])


REFUSED: list[tuple[dict[str, str], str]] = [
    ({"KUBERAY_IMAGE": ""}, "SHARDYARD_KUBERAY_IMAGE"),
    ({"KUBERAY_POOLS": "[]"}, "SHARDYARD_KUBERAY_POOLS"),
    ({"KUBERAY_POOLS": "{"}, "kuberay.pools (='{') must be a JSON list"),
    (
        {"KUBERAY_QUEUES": "a, b"},
        """kuberay.queues (='a, b') must be a JSON list; write it as SHARDYARD_KUBERAY_QUEUES='["a", "b"]'""",
    ),
    ({"KUBERAY_QUEUES": '{"a": 1}'}, "kuberay.queues (={'a': 1}) must be a list"),
    ({"KUBERAY_QUEUES": "shardyard:1"}, "SHARDYARD_KUBERAY_QUEUES"),
    ({"KUBERAY_HEAD_NODE_SELECTOR": "a=b"}, "kuberay.head_node_selector (='a=b') must be a JSON object"),
    ({"KUBERAY_HEAD_NODE_SELECTOR": '["a"]'}, "kuberay.head_node_selector (=['a']) must be a mapping"),
    ({"KUBERAY": "[]"}, "kuberay (=[]) must be a mapping"),
    ({"KUBERAY": "on"}, "kuberay (='on') must be a JSON object"),
    (
        {"DATA_ROOTS": "/data?key=secret"},
        """data_roots must be a JSON list; write it as SHARDYARD_DATA_ROOTS='["/data"]'""",
    ),
    ({"KUBERAY_HEAD_MEMORY": "1"}, "kuberay.head_memory (='1')"),
    ({"KUBERAY_HEAD_CPUS": "1m"}, "kuberay.head_cpus (='1m')"),
    ({"KUBERAY_SERVICE_ACCOUNT": ""}, "kuberay.service_account (='')"),
    ({"KUBERAY_PYTHON": " "}, "kuberay.python (=' ')"),
    ({"KUBERAY_POOLS": pool(memory="1")}, "kuberay.pools[0].memory (='1')"),
    ({"KUBERAY_POOL": "[]"}, "kuberay.pool "),
    ({"KUBERAY_NAMESPACE": "Training"}, "kuberay.namespace (='Training')"),
    ({"KUBERAY_QUEUE": "q" * 64}, "kuberay.queue"),
    ({"KUBERAY_QUEUE": "team", "KUBERAY_PRIORITY_CLASS": "a b"}, "kuberay.priority_class"),
    ({"KUBERAY_SERVICE_ACCOUNT": "../default"}, "kuberay.service_account"),
    ({"KUBERAY_STORAGE_CLAIM": "Storage"}, "kuberay.storage_claim"),
    ({"KUBERAY_TEMPLATE_SECRETS": '["a_b"]'}, "kuberay.template_secrets[0]"),
    ({"KUBERAY_IMAGE": "a b"}, "kuberay.image"),
    ({"KUBERAY_HEAD_CPUS": "9" * 400}, "kuberay.head_cpus"),
    ({"KUBERAY_HEAD_MEMORY": "9" * 400}, "kuberay.head_memory"),
    ({"KUBERAY_POOLS": "[" * 5000}, "nested too deeply"),
    ({"KUBERAY_POOLS": pool(runtime_class="A B")}, "kuberay.pools[0].runtime_class"),
    ({"KUBERAY_POOLS": pool(name="H100")}, "kuberay.pools[0].name"),
    ({"KUBERAY_POOLS": pool(nodes=0)}, "kuberay.pools[0].nodes"),
    ({"KUBERAY_POOLS": pool(memory="much")}, "kuberay.pools[0].memory"),
    ({"KUBERAY_POOLS": pool(memory=True)}, "kuberay.pools[0].memory"),
    ({"KUBERAY_POOLS": pool(cpus_per_node="4")}, "cpus_per_node (=4)"),
    ({"KUBERAY_POOLS": pool(gpus_per_node=0)}, "accelerator"),
    ({"KUBERAY_POOLS": pool(shared_memory="600Gi")}, "shared_memory"),
    ({"KUBERAY_POOLS": pool(resources={"nvidia.com/gpu": "1"})}, "nvidia.com/gpu"),
    ({"KUBERAY_POOLS": pool(tolerations=[{"operator": "Equal"}])}, "kuberay.pools[0].tolerations[0]"),
    ({"KUBERAY_POOLS": json.dumps([POOL, POOL])}, "h100"),
    ({"KUBERAY_POD_TEMPLATE_FILE": "/absent.yaml"}, "/absent.yaml"),
    ({"KUBERAY_POD_TEMPLATE_FILE": "/dev/null"}, "no mapping"),
    ({"KUBERAY_STORAGE_PATH": "storage"}, "kuberay.storage_path"),
    ({"KUBERAY_PRIORITY_CLASS": "high"}, "priority_class"),
    ({"KUBERAY_WARM_NODES": "3"}, "warm_nodes (=3)"),
    ({"KUBERAY_WARM_POOL": "a100"}, "warm_pool (='a100')"),
    ({"LAUNCHER": "k8s"}, "launcher"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_settings_that_break_a_rule(monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], words: str) -> None:
    set_environment(monkeypatch, **{**KUBERAY, **changes})
    with pytest.raises(Misuse) as error:
        settings_for()
    assert words in str(error.value)


@given(st.integers(1, 2**60))
def test_bytes_as_quantities(size_bytes: int) -> None:
    assert parse_quantity(format_bytes(size_bytes)) == size_bytes


@given(st.integers(1, 10**6))
def test_cores_as_quantities(millicores: int) -> None:
    assert parse_quantity(format_cores(millicores / 1000)) * 1000 == millicores


@given(st.text(max_size=10))
def test_any_quantity_is_parsed_or_refused(text: str) -> None:
    with suppress(RuleError):
        assert parse_quantity(text) >= 0


@given(pools)
def test_a_pool_survives_its_own_json(node_pool: Any) -> None:
    assert type(node_pool).model_validate_json(node_pool.model_dump_json()) == node_pool
