"""The host waits for its device once per MoE layer, under every layout, router and backend, and rarely elsewhere."""

import pytest

from moe.experts import BACKENDS
from moe.spec import MoESpec
from tests.parity.combinations import ROUTERS, model_of, train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees, Shape
from tests.rehearsal.run import WaitCounts, backlog_of_layer, numbers_on_the_host, waits_of_layer, waits_of_step

LAYOUTS = (
    Degrees(), Degrees(expert=2), Degrees(expert=2, num_chunks=3), Degrees(expert=2, max_rows=9),
    Degrees(expert_tensor=2), Degrees(data=2, fsdp=2, expert_fsdp=2), Degrees(expert=2, tensor=2),
    Degrees(expert=2, ranks_per_node=1), Degrees(expert=4, ranks_per_node=2, max_rows=9),
)  # fmt: skip
BIASED = "gated experts with biases, shared ones with a gate"
LAYERS = 2


def spec_of(router: str) -> MoESpec:
    return MoESpec(**{"num_experts": 4, "model_dim": 16, "hidden_dim": 24, "group_tokens": 32, **ROUTERS[router]})


def assert_one_wait(waits: dict[str, WaitCounts]) -> None:
    assert sum(waits["forward"].values()) == 1, waits["forward"]
    assert waits["backward"] == {}


@pytest.mark.sample(3)
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_a_layer_waits_for_its_device_once_under_every_layout(ranks: Pools, degrees: Degrees) -> None:
    for waits in ranks[degrees.workers].run(waits_of_layer, spec_of("gshard"), degrees):
        assert_one_wait(waits)


@pytest.mark.sample(2)
@pytest.mark.parametrize("router", ROUTERS)
def test_no_router_asks_its_device_anything_else(ranks: Pools, router: str) -> None:
    assert_one_wait(ranks[1].run(waits_of_layer, spec_of(router), Degrees())[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_backend_asks_its_device_anything_else(ranks: Pools, backend: str) -> None:
    for waits in ranks[2].run(waits_of_layer, spec_of(BIASED), Degrees(expert=2, num_chunks=2), backend):
        assert_one_wait(waits)


@pytest.mark.sample(1)
@pytest.mark.parametrize("degrees", [Degrees(expert=2), Degrees(expert=2, ranks_per_node=1)], ids=str)
def test_shared_experts_run_while_ranks_exchange_their_counts(ranks: Pools, degrees: Degrees) -> None:
    spec = spec_of(BIASED)
    for shared_hidden_dim, runs_beside in ((spec.shared_hidden_dim, True), (None, False)):
        changed = spec.model_copy(update={"shared_hidden_dim": shared_hidden_dim, "shared_gate": False})
        for backlog in ranks[2].run(backlog_of_layer, changed, degrees):
            (number,) = backlog
            assert (number > 0) == runs_beside, number


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("degrees", "passes"),
    [
        (Degrees(micro_batch_groups=2, recompute="selective"), 1),
        (Degrees(expert=2, recompute="full"), 2),
        (Degrees(expert=2, data=2, tensor=2, fsdp=2, expert_fsdp=2), 1),
    ],
    ids=str,
)
def test_a_step_waits_in_its_layers_alone(ranks: Pools, degrees: Degrees, passes: int) -> None:
    """Recomputed blocks wait again; the step's record is read later."""
    model, train = model_of(), train_of()
    assert len(model.moe_layers) == LAYERS
    for waits, num_micro_batches in ranks[degrees.workers].run(waits_of_step, model, train, degrees, Shape(groups=4)):
        by_file: dict[str, int] = {}
        for place, number in waits.items():
            file = place.rpartition(", ")[2].rpartition(":")[0]
            by_file[file] = by_file.get(file, 0) + number
        assert by_file == {"moe/dispatch/dispatcher.py": LAYERS * passes * num_micro_batches}


def test_a_number_of_a_users_module_may_be_on_the_host(ranks: Pools) -> None:
    ((grad_norm, numbers, waits),) = ranks[1].run(numbers_on_the_host)
    assert (grad_norm, numbers) == (3.0, {"temperature": 0.5, "nll": 1.0})
    assert {place.rpartition(":")[0] for place in waits} == {
        "copy from the host, moe/train/summed_totals.py",
        "event, moe/train/summed_totals.py",
    }
