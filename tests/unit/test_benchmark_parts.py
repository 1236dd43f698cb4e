"""Parts of benchmarks that follow the product's interfaces."""

from abc import ABC, abstractmethod

import pytest

from benchmarks import side, training
from benchmarks.control_plane import NoCluster
from moe.train.control import Control
from service.control.launcher.launcher import LauncherUnavailable


def test_a_cluster_that_is_away_answers_nothing() -> None:
    cluster = NoCluster()
    for ask in (cluster.cluster, cluster.calibrate):
        with pytest.raises(LauncherUnavailable):
            ask()


def test_parts_of_a_step_that_are_timed_are_there() -> None:
    assert [name for place, name, _ in training.functions_of_parts() if not hasattr(place, name)] == []


class EarlierControl(ABC):
    """Control as commits have it whose `poll` is called `requested`."""

    @abstractmethod
    def requested(self) -> None: ...


@pytest.mark.parametrize(("control", "name"), [(Control, "poll"), (EarlierControl, "requested")])
def test_rounds_of_a_training_loop_follow_the_name_that_it_calls(
    control: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    monkeypatch.setattr(side, "_say", lambda seconds: told.append(seconds))
    monkeypatch.setattr(side, "_asked", lambda: None)

    def run(turns: object) -> None:
        for _ in range(5):
            getattr(turns, name)()

    with pytest.raises(RuntimeError, match="the demo ended before its rounds did"):
        side._in_turns(run, control, 2)(0)
    assert len(told) == 2
