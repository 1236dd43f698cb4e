"""All kernels compile for every architecture of the table, without a GPU; none spills registers or needs more shared
memory than there is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Of one program, by compute capability (CUDA C++ programming guide, technical specifications)."""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_no_kernel_spills(dtype: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    out = tmp_path / "kernels.json"
    command = [sys.executable, "-m", "benchmarks.kernels_ahead", "--dtype", dtype, "--out", out]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    kernels = json.loads(out.read_text())["kernels"]
    assert {kernel["capability"] for kernel in kernels} == {80, 90, 100}
    assert [kernel for kernel in kernels if kernel["spilled_bytes"]] == []
    assert all(kernel["shared_bytes"] <= MAX_SHARED_BYTES[kernel["capability"]] for kernel in kernels)
