"""Training by kernels on several ranks against one process without them."""

import os

import pytest

from tests.kernels.runs import optimizer_class_name, run_by_kernels
from tests.parity.combinations import ROUTERS, assert_same, model_of, train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees, Shape, run

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")

LAYOUTS = (
    Degrees(expert=2), Degrees(expert=2, num_chunks=3), Degrees(expert=2, max_rows=9),
    Degrees(expert=2, recompute="selective"), Degrees(expert=2, recompute="full"), Degrees(expert_tensor=2),
    Degrees(expert=4, ranks_per_node=2), Degrees(data=2, fsdp=2, expert_fsdp=2),
)  # fmt: skip
BIASED = "gated experts with biases, shared ones with a gate"


@pytest.mark.sample(2)
@pytest.mark.parametrize("router", ["gshard", BIASED])
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_a_layout_trains_by_kernels_as_one_process_without_them(ranks: Pools, degrees: Degrees, router: str) -> None:
    model, train = model_of(**ROUTERS[router]), train_of("float32")
    reference = run(model, train, Degrees(), Shape(), 1)
    for records, num_passes in ranks[degrees.workers].run(run_by_kernels, model, train, degrees, 1):
        assert num_passes > 0
        for record in records:
            del record["gradients"]  # the optimizer's kernel does not store clipped ones
        assert_same(records, reference, 1e-4)


@pytest.mark.parametrize(("num_with_kernels", "optimizer"), [(2, "FusedAdamW"), (1, "AdamW"), (0, "AdamW")])
def test_all_ranks_have_the_same_optimizer(ranks: Pools, num_with_kernels: int, optimizer: str) -> None:
    """Else replicas of a parameter would drift apart by rounding."""
    assert ranks[2].run(optimizer_class_name, num_with_kernels) == [optimizer, optimizer]
