"""How many workers a job is planned for, and when they are admitted to a cluster."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.plan import Cluster
from moe.spec import JobSpec, ResourcesSpec
from service.control.launcher.launcher import ClusterFacts, NodeFacts
from service.control.scheduling.admission import Admit, Gang, MustWait, NeverFits, admit, fingerprint
from service.control.scheduling.planning import check_degrees, plan_on
from tests.service.control_plane import spec


@pytest.mark.parametrize(
    ("parallel", "workers"), [({"data": 1}, 4), ({"data": 3}, 6), ({"expert": 4}, 4), ({"data": 2, "expert": 2}, 4)]
)
def test_of_a_range_the_most_workers_that_the_degrees_divide_are_planned_for(
    parallel: dict[str, int], workers: int
) -> None:
    given = spec(
        model={"preset": "gshard-tiny", "moe": {"num_experts": 8}},
        resources={"min_workers": 1, "max_workers": 7},
        parallel=parallel,
    )
    wanted = JobSpec.parse(given)
    check_degrees(wanted)
    cluster = Cluster(num_nodes=1, devices_per_node=8, memory_bytes=2**40)
    assert plan_on(wanted, cluster).num_workers == workers


nodes = st.lists(
    st.builds(
        NodeFacts,
        id=st.uuids().map(str),
        ip=st.just("10.0.0.1"),
        cpus=st.integers(0, 16),
        gpus=st.integers(0, 8),
        memory_bytes=st.just(1 << 30),
    ),
    max_size=5,
)
resources = st.builds(
    lambda fewest, more, cpus, gpus: ResourcesSpec(
        min_workers=fewest, max_workers=fewest + more, cpus_per_worker=cpus, gpus_per_worker=gpus
    ),
    st.integers(1, 20),
    st.integers(0, 10),
    st.integers(1, 4),
    st.sampled_from(["auto", 0, 1]),
)


@given(nodes, st.lists(resources, max_size=12))
def test_what_is_admitted_fits(nodes: list[NodeFacts], queue: list[ResourcesSpec]) -> None:
    cluster = ClusterFacts(nodes=tuple(nodes))
    held: dict[str, Gang] = {}
    for number, wanted in enumerate(queue):
        verdict = admit(wanted, cluster, held)
        if isinstance(verdict, Admit):
            assert wanted.min_num_workers <= verdict.gang.workers <= wanted.max_num_workers
            held[f"job-{number}"] = verdict.gang
        elif isinstance(verdict, MustWait):
            assert held
            assert isinstance(admit(wanted, cluster, {}), Admit)
        else:
            assert isinstance(admit(wanted, cluster, {}), NeverFits)
    assert sum(gang.workers * gang.cpus_per_worker for gang in held.values()) <= cluster.cpus
    assert sum(gang.workers * gang.gpus_per_worker for gang in held.values()) <= cluster.gpus


def test_a_gang_is_not_split_over_what_no_worker_fits_in() -> None:
    three = ClusterFacts(nodes=tuple(NodeFacts(id=str(i), ip="", cpus=3, memory_bytes=1) for i in range(2)))
    verdict = admit(ResourcesSpec(num_workers=3, cpus_per_worker=2), three, {})
    assert verdict == NeverFits(
        "needs 3 workers of 2 CPUs each; the cluster has 6 CPUs on 2 nodes, room for 2 such workers"
    )


def test_a_cluster_is_known_by_what_it_offers() -> None:
    one = NodeFacts(id="a", ip="1", cpus=4, memory_bytes=8 << 30)
    same = NodeFacts(id="b", ip="2", cpus=4, memory_bytes=(8 << 30) + 5000)
    more = NodeFacts(id="a", ip="1", cpus=5, memory_bytes=8 << 30)
    prints = [fingerprint(ClusterFacts(nodes=(node,))) for node in (one, same, more)]
    assert prints[0] == prints[1] != prints[2]
