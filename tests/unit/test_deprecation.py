"""Old names of public functions work for one release, and warn."""

import pytest
import torch

import moe.plan
import moe.routing
from moe.deprecation import renamed_arguments
from moe.routing import RoutingState
from moe.routing.recording import Recording


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (moe.routing, "recorded", "record_routing"),
        (moe.routing, "replayed", "replay_routing"),
        (moe.routing, "merged_recordings", "merge_recordings"),
        (moe.plan, "plan_anywhere", "plan_on_cluster"),
    ],
)
def test_an_old_function_name_is_the_new_function(module: object, old: str, new: str) -> None:
    with pytest.deprecated_call(match=f"{old} is deprecated; use {new}"):
        assert getattr(module, old) is getattr(module, new)
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        module.other  # type: ignore[attr-defined]  # noqa: B018


def test_old_method_names_call_the_new_methods() -> None:
    recording = Recording()
    recording.note(0, torch.arange(2), torch.tensor([[1], [0]]))
    with pytest.deprecated_call():
        assert torch.equal(recording.stacked(), recording.stack())
    with pytest.deprecated_call():
        assert RoutingState().taken(choices := torch.zeros(1, 2, 1)) is choices


def test_old_keyword_arguments_are_passed_on() -> None:
    @renamed_arguments(ends="end_ids")
    def generate(prompt: str, *, end_ids: int = 0) -> tuple[str, int]:
        return prompt, end_ids

    assert generate("a", end_ids=1) == ("a", 1)
    with pytest.deprecated_call(match=r"generate\(ends=\) is deprecated; use end_ids="):
        assert generate("a", ends=2) == ("a", 2)  # type: ignore[call-arg]
