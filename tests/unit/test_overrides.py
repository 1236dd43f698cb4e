"""Functions that a context replaces, within it and in its thread alone."""

import inspect
from threading import Thread

import pytest

from moe.overrides import overridable, overriding
from moe.sharding.bindings.bindings import BINDINGS


@overridable
def double(x: int) -> int:
    return 2 * x


@overridable
def double_twice(x: int) -> int:
    return double(double(x))


class Adder:
    def __init__(self, term: int) -> None:
        self.term = term

    @overridable
    def add(self, x: int, *, times: int = 1) -> int:
        return x + self.term * times


def negate(x: int) -> int:
    return -x


def test_a_function_is_replaced_in_the_innermost_context_of_its_thread_only() -> None:
    assert double(3) == 6
    with overriding({double: negate}):
        assert double(3) == -3
        assert double_twice(3) == 3
    assert double(3) == 6
    with overriding({double: negate}):
        with overriding({}):
            assert double(3) == 6
        assert double(3) == -3
    with pytest.raises(KeyError), overriding({double: negate}):
        raise KeyError
    assert double(3) == 6
    results: list[int] = []
    thread = Thread(target=lambda: results.append(double(3)))
    with overriding({double: negate}):
        thread.start()
        thread.join()
    assert results == [6]


def test_replacements_may_be_of_methods_and_call_others() -> None:
    with overriding({double: negate, double_twice: lambda x: double(x) - 1}):
        assert double_twice(3) == -4
    with overriding({Adder.add: lambda adder, x, times=1: x - adder.term * times}):
        assert Adder(2).add(10, times=3) == 4
    assert Adder(2).add(10, times=3) == 16


@pytest.mark.parametrize("function", BINDINGS, ids=lambda function: function.__qualname__)
def test_a_binding_takes_the_arguments_of_its_function(function) -> None:
    original, replacement = (
        [(parameter.kind, parameter.default) for parameter in inspect.signature(variant).parameters.values()]
        for variant in (function, BINDINGS[function])
    )
    assert original == replacement
