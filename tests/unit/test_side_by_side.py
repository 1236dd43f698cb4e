"""Two passes take turns where they give way; an error of either ends both."""

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch

from moe.activity import activities, doing
from moe.parallel.collective import collective, during_action
from moe.parallel.side_by_side import give_way, side_by_side

CPU = torch.device("cpu")


def passes(noted: list[str], *names: str, num_parts: int = 3, fails: str = "") -> list[Callable[[], None]]:
    """Passes of a name each, which note their parts and give way after each; that named `fails` ends in its second."""

    def run(name: str) -> None:
        for part in range(num_parts):
            noted.append(f"{name}{part}")
            if name == fails and part == 1:
                raise ValueError(name)
            give_way()

    return [lambda name=name: run(name) for name in names]  # type: ignore[misc]


def test_a_pass_alone_gives_way_to_none() -> None:
    noted: list[str] = []
    side_by_side(CPU, *passes(noted, "a"))
    assert noted == ["a0", "a1", "a2"]


def test_passes_alternate() -> None:
    noted: list[str] = []
    side_by_side(CPU, *passes(noted, "a", "b"))
    assert noted == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_the_longer_pass_ends_alone() -> None:
    noted: list[str] = []
    side_by_side(CPU, passes(noted, "a", num_parts=1)[0], passes(noted, "b")[0])
    side_by_side(CPU, passes(noted, "c")[0], passes(noted, "d", num_parts=1)[0])
    assert noted == ["a0", "b0", "b1", "b2", "c0", "d0", "c1", "c2"]


@pytest.mark.parametrize(("fails", "parts"), [("a", ["a0", "b0", "a1"]), ("b", ["a0", "b0", "a1", "b1"])])
def test_an_error_ends_both(fails: str, parts: list[str]) -> None:
    noted: list[str] = []
    with pytest.raises(ValueError, match=fails):
        side_by_side(CPU, *passes(noted, "a", "b", fails=fails))
    assert noted == parts
    side_by_side(CPU, *passes(noted, "c", "d"))
    assert noted[-6:] == ["c0", "d0", "c1", "d1", "c2", "d2"]


def test_gradients_are_computed_in_either_pass() -> None:
    x = torch.ones(3, requires_grad=True)

    def differentiate() -> None:
        give_way()
        (2 * x).sum().backward()

    side_by_side(CPU, differentiate, differentiate)
    assert x.grad is not None
    assert x.grad.tolist() == [4, 4, 4]


def test_errors_of_collectives_name_the_action_of_their_pass() -> None:
    names: list[str] = []

    def run(action: str, num_parts: int) -> None:
        with during_action(action):
            for _ in range(num_parts):
                give_way()
                with collective("all-to-all"):
                    names.append(str(activities(threading.get_ident())[-1]))

    for lengths in ((1, 3), (3, 1)):
        names.clear()
        side_by_side(CPU, *(partial(run, *of_pass) for of_pass in zip(("first", "second"), lengths, strict=True)))
        assert Counter(names) == {"all-to-all (first)": lengths[0], "all-to-all (second)": lengths[1]}
        with collective("all-reduce"):
            assert str(activities(threading.get_ident())[-1]) == "all-reduce"


def test_the_thread_of_the_first_pass_is_in_the_collectives_of_both() -> None:
    names: list[str] = []
    main = threading.get_ident()

    def run(name: str) -> None:
        give_way()
        with collective(name):
            names.append(str(activities(main)[-1]))

    with doing("step"):
        side_by_side(CPU, partial(run, "all-to-all of the first"), partial(run, "all-to-all of the second"))
        assert [str(activity) for activity in activities(main)] == ["step"]
    assert names == ["all-to-all of the first", "all-to-all of the second"]
