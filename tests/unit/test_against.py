"""Two commits timed turn and turn about: a package that cannot be asked says so, and pairs are compared as pairs."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.against import ROOT, Side, compare, figures, line

SPEC = {"num_experts": 2, "model_dim": 4, "hidden_dim": 8, "router": "softmax_topk"}


def case(folder: Path) -> dict[str, Any]:
    return {"kind": "layer", "spec": SPEC, "tokens": 8, "dtype": "float32", "folder": str(folder), "passes": 1}


@pytest.mark.slow
def test_a_commit_beside_itself(tmp_path: Path) -> None:
    with Side(ROOT, 1) as one, Side(ROOT, 1) as other:
        found = compare(one, other, case(tmp_path), 2)
    assert found["rounds"] == 2
    assert min(found["before_ms"], found["now_ms"]) > 0


@pytest.mark.slow
def test_a_commit_without_a_layer_is_left_out_in_words(tmp_path: Path) -> None:
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe/__init__.py").write_text("")
    with Side(tmp_path, 1) as one, Side(tmp_path, 1) as other:
        told = line(compare(one, other, case(tmp_path), 2))
    assert told.startswith("left out: before, ImportError: cannot import name 'MoELayer' from 'moe'")


def test_pairs_are_compared_each_by_itself() -> None:
    """The machine became twice as slow in between: that is no difference."""
    found = figures([(1.0, 1.02), (1.0, 1.02), (2.0, 2.04), (2.0, 2.04)])
    assert found["difference"] == pytest.approx(0.02)
    assert found["quartiles"] == pytest.approx([0.02, 0.02])
