"""A GPU skips the update of a step that is not finite, as the host would have."""

import pytest
import torch

from tests.parity.combinations import ROUTERS, model_of, train_of
from tests.parity.trajectory import Degrees
from tests.rehearsal.divergence import diverge
from tests.rehearsal.test_late_records import OPTIMIZERS, PARTS, WITH_STATE, assert_equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none"),
]


@pytest.mark.parametrize("router", WITH_STATE)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_gpu_decides_as_the_host_does(optimizer: str, router: str) -> None:
    """Bit for bit, with both kinds of AdamW: the kernel's and torch's, for float64."""
    for part, dtype in zip(PARTS, ("bfloat16", "float64"), strict=True):
        train = train_of(dtype, optimizer=OPTIMIZERS[optimizer], ema_decay=0.5, clip_norm=0.1)
        late, immediate = (
            diverge(model_of(**ROUTERS[router]), train, Degrees(), part, device_decides, "cuda")
            for device_decides in (True, False)
        )
        assert_equal(late, immediate)
