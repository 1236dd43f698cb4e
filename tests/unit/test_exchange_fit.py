"""Which models context ranks can exchange keys and values of, and what is said of the others."""

import pytest

from moe.plan.fit import can_split_heads, fit_problems
from tests.parity.combinations import model_of, refused_paths
from tests.parity.language_models import language_model
from tests.parity.trajectory import Degrees

GQA = "GQA with norms after it"
"""4 query heads, 2 key and value heads."""


@pytest.mark.parametrize(
    ("heads", "is_possible"),
    [((4, 2, 2), True), ((4, 2, 4), True), ((4, 1, 4), True), ((6, 2, 3), False), ((4, 4, 8), False)],
)
def test_heads_are_split_evenly_or_shared(heads: tuple[int, int, int], is_possible: bool) -> None:
    assert can_split_heads(*heads) is is_possible


@pytest.mark.parametrize(
    ("attention", "degrees"),
    [
        (GQA, {"context": 1}), (GQA, {"context": 4}), (GQA, {"context": 2, "tensor": 2}), ("MLA", {"context": 2}),
        ("DeltaNet and gated GQA", {"context": 2}),
    ],
)  # fmt: skip
def test_heads_that_divide_fit(attention: str, degrees: dict[str, int]) -> None:
    assert not fit_problems(language_model(attention), degrees, "heads")


@pytest.mark.parametrize(
    ("attention", "degrees"), [(GQA, {"context": 8}), (GQA, {"context": 4, "tensor": 2}), ("MLA", {"context": 4})]
)
def test_heads_that_do_not_divide_are_refused(attention: str, degrees: dict[str, int]) -> None:
    spec = language_model(attention)
    (problem,) = fit_problems(spec, degrees, "heads")
    assert (problem.code, problem.path, problem.value) == ("not_divisible", "parallel.context_exchange", "heads")
    assert f"(={degrees['context']})" in problem.rule
    assert not fit_problems(spec, degrees, "ring")


def test_an_exchange_without_effect_is_refused() -> None:
    spec = language_model("MLA with an indexer")
    for exchange in ("ring", "heads"):
        (problem,) = fit_problems(spec, {"context": 2}, exchange)
        assert (problem.code, problem.path) == ("not_applicable", "parallel.context_exchange")
    assert not fit_problems(spec, {"context": 2}, "gather")


def test_a_model_is_not_built_with_heads_that_do_not_divide() -> None:
    degrees = Degrees(data=4, context=4, context_exchange="heads")
    assert refused_paths(model_of(), degrees) == {"parallel.context_exchange"}
