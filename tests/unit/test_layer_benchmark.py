"""The inputs that the layer benchmark times."""

from functools import partial
from itertools import pairwise

import torch

from benchmarks.contenders import Contender, Loads, Shape, tokens
from benchmarks.layer import mean_loads, round_times


def test_each_round_has_other_tokens_the_same_for_all() -> None:
    """A repeated load would hide the cost of a new one."""
    shape, inputs = Shape("relu", 4, 3, 2, 2, 1, skewed=True), {"a": [], "b": []}

    def run(name: str, x: torch.Tensor) -> torch.Tensor:
        inputs[name].append(x.detach().clone())
        return x * 2

    parts = [Contender(name, partial(run, name), []) for name in inputs]
    rounds = [tokens(shape, torch.float32, torch.device("cpu"), draw) for draw in range(3)]
    times = round_times(parts, iter(rounds), dict.fromkeys(inputs, torch.ones(4, 3)))
    assert [len(durations) for durations in times.values()] == [3, 3]
    for x, of_a, of_b in zip(rounds, inputs["a"], inputs["b"], strict=True):
        assert torch.equal(of_a, x)
        assert torch.equal(of_b, x)
    assert not any(torch.equal(x, next_x) for x, next_x in pairwise(rounds))
    assert all(bool((x[:, 0] == 1).all()) for x in rounds), "as skewed as the first"


def test_loads_are_those_of_the_rounds_that_are_timed() -> None:
    part = Contender("a", lambda x: x, [], loads=lambda x: Loads(float(x), 3 * float(x)))
    assert mean_loads(part, iter(map(torch.tensor, (0.5, 1.0)))) == Loads(0.75, 2.25)
