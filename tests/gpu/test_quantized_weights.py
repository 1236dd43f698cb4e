"""Codes of narrow forms are decoded on a GPU as on a CPU, by bitsandbytes kernels where installed."""

import pytest
import torch

from moe.parallel import QuantizedWeight, QuantScheme
from moe.parallel.block_kernels import runs_on
from moe.parallel.quantized import quantize
from moe.spec.parameter import Form

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none"),
]
CODED: tuple[Form, ...] = ("int8", "nf4")


@pytest.mark.parametrize("form", CODED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 256, 40), (70, 33), (2, 5, 128)])
def test_a_gpu_decodes_what_a_cpu_does(form: Form, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for dim in range(len(shape)):
        scheme = QuantScheme(form, dim, shape[dim])
        codes, scales = quantize(values, scheme)
        assert scales is not None
        gpu_weight = QuantizedWeight(codes.cuda(), scales.cuda(), scheme)
        assert torch.equal(gpu_weight.dequantize(dtype).cpu(), QuantizedWeight(codes, scales, scheme).dequantize(dtype))


def test_kernels_run_here() -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    assert runs_on(torch.device("cuda"))
