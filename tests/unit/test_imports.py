"""Modules that load torch and modules that must not, each in a fresh interpreter."""

import subprocess
import sys

import pytest

import moe

HEAVY = ("torch", "ray", "tokenizers", "sacrebleu", "pyarrow", "pandas")


LIGHT = ("moe", "moe.spec", "moe.plan", "moe.records", "moe.interchange.expand", "service.control.app",
         "service.client", "service.cli.main")  # fmt: skip


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_load_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_library_hands_its_names_on_and_refuses_others() -> None:
    code = (
        "from moe import JobSpec, MoESpec, MoELayer, TokenContext, build_model\n"
        "from moe.routing import route\nfrom moe.spec import presets\nfrom moe.plan import Cluster, plan_job\n"
        "import moe, sys\nassert 'build_model' in dir(moe)\nassert 'service' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
    with pytest.raises(AttributeError, match="module 'moe' has no attribute 'Layer'"):
        _ = moe.Layer
