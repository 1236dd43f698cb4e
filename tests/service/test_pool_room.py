"""Room of node pools, against placing every pod by hand."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.spec import ResourcesSpec
from service.control.launcher.kuberay.pools import cluster_facts, worker_pods
from service.control.launcher.launcher import LaunchRefusal
from service.control.scheduling.admission import Admit, MustWait, NeverFits, admit
from service.control.scheduling.gang import Gang
from service.control.scheduling.pool_room import workers_that_fit
from service.node_pool import NodePool

GIB = 1024**3


def pool(name: str = "gpu", nodes: int = 2, gpus: int = 8, cpus: float = 64) -> NodePool:
    return NodePool(name=name, nodes=nodes, gpus_per_node=gpus, cpus_per_node=cpus, memory=512 * GIB)


def fits(node_pool: NodePool, gangs: list[Gang]) -> bool:
    """Whether some placement of all gangs' pods, one pod of a gang a node, respects every node's resources."""
    pods = []
    for index, gang in enumerate(gangs):
        try:
            shape = worker_pods(node_pool, gang.workers, gang.cpus_per_worker, gang.gpus_per_worker)
        except LaunchRefusal:
            return False
        pods += [(index, shape.cpus, shape.gpus)] * shape.num_pods
    nodes = range(node_pool.nodes)
    for placement in product(nodes, repeat=len(pods)):
        if all(
            sum(cpus for (_, cpus, _), place in zip(pods, placement, strict=True) if place == node)
            <= node_pool.cpus_per_node + 1e-9
            and sum(gpus for (_, _, gpus), place in zip(pods, placement, strict=True) if place == node)
            <= node_pool.gpus_per_node
            for node in nodes
        ) and len({(index, place) for (index, _, _), place in zip(pods, placement, strict=True)}) == len(pods):
            return True
    return False


def gang_of(node_pool: NodePool) -> st.SearchStrategy[Gang]:
    gpus = st.sampled_from([0, 1]) if node_pool.gpus_per_node else st.just(0)
    return st.builds(Gang, st.integers(1, 5), st.integers(1, 3), gpus, st.just(node_pool.name))


pools = st.builds(
    lambda nodes, gpus, extra: pool(nodes=nodes, gpus=gpus, cpus=max(1, gpus) + extra),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(0, 3),
)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_what_is_admitted_can_be_placed(data: st.DataObject) -> None:
    node_pool = data.draw(pools)
    gangs: list[Gang] = []
    for _ in range(data.draw(st.integers(0, 3))):
        gang = data.draw(gang_of(node_pool))
        if fits(node_pool, [*gangs, gang]):
            gangs.append(gang)
    new = data.draw(gang_of(node_pool))
    nodes = cluster_facts([node_pool]).nodes
    room = workers_that_fit(nodes, gangs, new.cpus_per_worker, new.gpus_per_worker)
    for workers in range(1, room + 1):
        # The scheduler places the running gangs anyhow; this one must fit beside some placement of theirs.
        assert fits(node_pool, [*gangs, Gang(workers, new.cpus_per_worker, new.gpus_per_worker, new.pool)])
    if not gangs:
        assert not fits(node_pool, [Gang(room + 1, new.cpus_per_worker, new.gpus_per_worker, new.pool)])


def test_a_gang_takes_whole_nodes_and_a_small_one_its_share() -> None:
    nodes = cluster_facts([pool(nodes=3)]).nodes
    twelve = Gang(12, 1, 1, "gpu")  # two nodes, though four of their GPUs stay idle
    assert workers_that_fit(nodes, [twelve], 1, 1) == 8
    assert workers_that_fit(nodes, [twelve, Gang(3, 1, 1, "gpu")], 1, 1) == 5
    assert workers_that_fit(nodes, [twelve, Gang(8, 1, 1, "gpu")], 1, 1) == 0


def test_a_job_runs_on_one_pool() -> None:
    facts = cluster_facts([pool("a", nodes=1), pool("b", nodes=2)])

    def verdict(workers: int, **gangs: Gang) -> str:
        outcome = admit(ResourcesSpec(num_workers=workers), facts, gangs)
        return outcome.gang.pool if isinstance(outcome, Admit) else type(outcome).__name__

    assert [verdict(8), verdict(9), verdict(16), verdict(17)] == ["a", "b", "b", NeverFits.__name__]
    busy = Gang(8, 1, 1, "a")
    assert verdict(8, first=busy) == "b"
    assert verdict(16, first=busy) == "b"
    assert verdict(16, first=busy, second=Gang(2, 1, 1, "b")) == MustWait.__name__
    ranged = admit(ResourcesSpec(min_workers=2, max_workers=16), facts, {"first": busy})
    assert isinstance(ranged, Admit)
    assert (ranged.gang.workers, ranged.gang.pool) == (16, "b")


def test_workers_without_gpus_leave_gpus_free() -> None:
    facts = cluster_facts([pool("gpu"), pool("cpu", gpus=0)])
    outcome = admit(ResourcesSpec(num_workers=4, gpus_per_worker=0), facts, {})
    assert isinstance(outcome, Admit)
    assert outcome.gang.pool == "cpu"


@pytest.mark.parametrize(
    ("workers", "pods", "per_pod", "gpus", "cpus"),
    [(16, 2, 8, 8, 64.0), (12, 2, 8, 8, 64.0), (8, 1, 8, 8, 64.0), (3, 1, 3, 3, 24.0), (1, 1, 1, 1, 8.0)],
)
def test_pods_of_a_gang(workers: int, pods: int, per_pod: int, gpus: int, cpus: float) -> None:
    shape = worker_pods(pool(), workers, 1, 1)
    assert (shape.num_pods, shape.workers_per_pod, shape.gpus, shape.cpus) == (pods, per_pod, gpus, cpus)
    assert shape.memory_bytes == 512 * GIB * per_pod // 8
    with pytest.raises(LaunchRefusal, match="no node pool holds 17 workers"):
        worker_pods(pool(), 17, 1, 1)
