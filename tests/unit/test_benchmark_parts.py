"""Parts of benchmarks that follow the product's interfaces, and two commits timed in turns."""

from abc import ABC, abstractmethod
from pathlib import Path

import pytest

from benchmarks import side, training
from benchmarks.against import ROOT, Side, compare, figures, line
from benchmarks.control_plane import NoCluster
from moe.train.control import Control
from service.control.launcher.launcher import LauncherUnavailable


def test_an_unavailable_cluster_and_the_timed_parts_of_a_step() -> None:
    cluster = NoCluster()
    for ask in (cluster.cluster, cluster.calibrate):
        with pytest.raises(LauncherUnavailable):
            ask()
    assert [name for place, name, _ in training.functions_of_parts() if not hasattr(place, name)] == []


class EarlierControl(ABC):
    """Control of earlier commits, whose `poll` is called `requested`."""

    @abstractmethod
    def requested(self) -> None: ...


@pytest.mark.parametrize(("control", "name"), [(Control, "poll"), (EarlierControl, "requested")])
def test_rounds_of_a_training_loop_follow_the_name_that_it_calls(
    control: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds_s: list[float] = []
    monkeypatch.setattr(side, "_say", lambda seconds: rounds_s.append(seconds))
    monkeypatch.setattr(side, "_read_request", lambda: None)

    def run(turns: object) -> None:
        for _ in range(5):
            getattr(turns, name)()

    with pytest.raises(RuntimeError, match="the demo ended before its rounds did"):
        side._in_turns(run, control, 2)(0)
    assert len(rounds_s) == 2


@pytest.mark.slow
@pytest.mark.parametrize("has_layer", [True, False])
def test_a_commit_beside_itself(has_layer: bool, tmp_path: Path) -> None:
    """One without a layer is left out, with the reason."""
    root = ROOT if has_layer else tmp_path
    if not has_layer:
        (tmp_path / "moe").mkdir()
        (tmp_path / "moe/__init__.py").write_text("")
    spec = {"num_experts": 2, "model_dim": 4, "hidden_dim": 8, "router": "softmax_topk"}
    case = {"kind": "layer", "spec": spec, "tokens": 8, "dtype": "float32", "folder": str(tmp_path), "passes": 1}
    with Side(root, 1) as before, Side(root, 1) as after:
        comparison = compare(before, after, case, 2)
    if has_layer:
        assert comparison["rounds"] == 2
        assert min(comparison["before_ms"], comparison["now_ms"]) > 0
    else:
        assert line(comparison).startswith("left out: before, ImportError: cannot import name 'MoELayer' from 'moe'")


def test_pairs_are_compared_each_by_itself() -> None:
    """A machine that becomes twice as slow halfway through makes no difference."""
    comparison = figures([(1.0, 1.02), (1.0, 1.02), (2.0, 2.04), (2.0, 2.04)])
    assert comparison["difference"] == pytest.approx(0.02)
    assert comparison["quartiles"] == pytest.approx([0.02, 0.02])
