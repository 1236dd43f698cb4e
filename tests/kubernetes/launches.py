"""Launches, node pools and settings for RayJobs, drawn at random or given."""

from typing import Any

from hypothesis import strategies as st
from pydantic import SecretStr

from moe.plan import Cluster, plan_job
from moe.spec import JobSpec
from service.control.launcher.slots import slots
from service.kuberay_settings import KubeRaySettings
from service.node_pool import NodePool
from service.wire.launch import Launch
from tests.service.control_plane import spec

GIB = 1024**3
PLAN = plan_job(JobSpec.parse(spec()), Cluster(num_nodes=1, devices_per_node=2, memory_bytes=8 * GIB), 1)
LAUNCH_PATH = f"/storage/jobs/job-abcdefghijkl/attempts/1/launch.{'0' * 64}.json"
IMAGE = "registry.example/shardyard:1.4"


def pool(name: str = "h100", nodes: int = 4, gpus: int = 8, cpus: float = 64, **fields: Any) -> NodePool:
    return NodePool(name=name, nodes=nodes, gpus_per_node=gpus, cpus_per_node=cpus, memory=512 * GIB, **fields)


def settings(*pools: NodePool, **fields: Any) -> KubeRaySettings:
    return KubeRaySettings(image=IMAGE, pools=pools or (pool(),), **fields)


def launch(num_workers: int = 8, gpus: int = 1, **fields: Any) -> Launch:
    resources = {"num_workers": num_workers, **fields.pop("resources", {})}
    accepted = Launch(
        **{
            "job_id": "job-abcdefghijkl", "attempt": 1, "spec": JobSpec.parse(spec(resources=resources)),
            "plan": PLAN, "gpus_per_worker": gpus, "storage": "/storage/jobs/job-abcdefghijkl",
            "cache": "/storage/cache", "events_url": "http://control-plane:8321",
            "token": SecretStr("0123456789abcdef"), "max_failures": 3, "owner": "local", **fields,
        }
    )  # fmt: skip
    # Of a plan, a RayJob depends on the number of workers alone: planning for each would take a second.
    return accepted.model_copy(update={"plan": PLAN.model_copy(update={"num_workers": num_workers})})


quantities = st.sampled_from(["64Gi", "512Gi", "600M", "1.5Ti"])
pools = st.builds(
    lambda name, nodes, gpus, cpus, memory, **fields: NodePool(
        name=name, nodes=nodes, gpus_per_node=gpus, cpus_per_node=gpus + cpus, memory=memory, **fields
    ),
    name=st.from_regex(r"[a-z]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True),
    nodes=st.integers(1, 16),
    gpus=st.integers(0, 8),
    cpus=st.sampled_from([1, 1.5, 7, 32.25]),
    memory=quantities,
    gpu_resource=st.sampled_from(["nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-3g.40gb"]),
    resources=st.sampled_from([{}, {"rdma/hca_shared_devices_a": "1"}]),
    node_selector=st.sampled_from([{}, {"example.org/gpu": "h100"}]),
    tolerations=st.sampled_from([(), ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},)]),
    runtime_class=st.sampled_from(["", "nvidia"]),
    annotations=st.sampled_from([{}, {"k8s.v1.cni.cncf.io/networks": "sriov-a, sriov-b"}]),
    config_map=st.sampled_from(["", "nccl"]),
    topology=st.sampled_from(["", "cloud.google.com/gce-topology-block"]),
    topology_mode=st.sampled_from(["required", "preferred"]),
    node_price_per_hour=st.sampled_from([None, 98.32]),
)


@st.composite
def kuberay_settings(draw: st.DrawFn, **fields: Any) -> KubeRaySettings:
    named = draw(st.lists(pools, min_size=1, max_size=3, unique_by=lambda node_pool: node_pool.name))
    queue = draw(st.sampled_from(["", "team-a"]))
    options = {
        "queue": queue,
        "priority_class": draw(st.sampled_from(["", "high"])) if queue else "",
        "namespace": draw(st.sampled_from(["", "training"])),
        "image_pull_secrets": draw(st.sampled_from([(), ("registry",)])),
        "token_secret": draw(st.sampled_from(["", "ray-token"])),
        "storage_claim": draw(st.sampled_from(["", "storage"])),
        "storage_secret": draw(st.sampled_from(["", "s3"])),
        "head_cpus": draw(st.sampled_from(["500m", "2"])),
        "head_node_selector": draw(st.sampled_from([{}, {"example.org/pool": "cpu"}])),
        "ttl_s": draw(st.integers(0, 600)),
        **fields,
    }
    return settings(*named, **options)


@st.composite
def launches_on(draw: st.DrawFn, kuberay: KubeRaySettings, **fields: Any) -> Launch:
    """A launch that one of the pools holds."""
    node_pool = draw(st.sampled_from(kuberay.pools))
    gpus = draw(st.integers(0, 1)) if node_pool.gpus_per_node else 0
    most = slots(node_pool.cpus_per_node, node_pool.gpus_per_node, 1, gpus) * node_pool.nodes
    return launch(
        draw(st.integers(1, min(most, 200))),
        gpus,
        attempt=draw(st.integers(1, 10**6)),
        job_id="job-" + draw(st.from_regex(r"[a-z2-7]{12}", fullmatch=True)),
        pool=draw(st.sampled_from(["", node_pool.name])),
        cache=draw(st.sampled_from(["/storage/cache", "/tmp/cache", "/var/cache/shardyard"])),
        **fields,
    )
