"""What loads torch and what must not, seen from a fresh interpreter."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "tokenizers", "sacrebleu", "pyarrow", "pandas")


@pytest.mark.parametrize(
    "module",
    ["moe", "moe.spec", "moe.plan", "moe.records", "service.control.app", "service.client", "service.cli.main"],
)
def test_light_modules_load_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_library_hands_its_names_on() -> None:
    code = (
        "from moe import JobSpec, MoESpec, MoELayer, TokenContext, build_model\n"
        "from moe.routing import route\nfrom moe.spec import presets\nfrom moe.plan import Cluster, plan_job\n"
        "import moe, sys\nassert 'build_model' in dir(moe)\nassert 'service' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_a_name_that_is_not_there() -> None:
    import moe

    with pytest.raises(AttributeError, match="module 'moe' has no attribute 'Layer'"):
        _ = moe.Layer
