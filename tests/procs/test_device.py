"""What a worker trains on: what it holds, and nothing else without a word."""

import pytest

from moe.spec import ResourcesSpec
from service.run.device import device_fault, device_of


def test_a_gpu_that_is_held_and_not_there_is_a_fault_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # before torch looks: none on any machine
    kind = ResourcesSpec(num_workers=1).trains_on(1)
    fault = device_fault(kind)
    assert fault is not None
    assert "was assigned a GPU but finds none: torch " in fault
    assert "resources.device=cpu" in fault


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 1), ("auto", 0)])
def test_cores_are_trained_on_where_that_is_said_or_no_gpu_is_held(device: str, gpus: int) -> None:
    kind = ResourcesSpec(num_workers=1, device=device).trains_on(gpus)
    assert device_fault(kind) is None
    assert device_of(kind).type == "cpu"
