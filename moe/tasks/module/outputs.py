"""Outputs of a user module: the loss and further scalars to record."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from moe.spec import SpecError, spec_error

LOSS = "loss"
MAX_NUMBERS = 32
MAX_NAME = 64


def loss_and_numbers(output: Any, code: str) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, other scalars by name) of a module's output.

    The output is the loss, a mapping with the key `loss`, or the tuple (loss, mapping); non-scalar values are ignored.
    Raises SpecError.
    """
    match output:
        case Tensor():
            loss, other_outputs = output, {}
        case Mapping() if LOSS in output:
            loss, other_outputs = (output[LOSS], {name: value for name, value in output.items() if name != LOSS})
        case (Tensor() as loss, Mapping() as other_outputs):
            pass
        case _:
            raise _output_error(code, f"returns a {type(output).__name__} without a loss")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise _output_error(code, "returns a loss that is not a scalar")
    numbers = {
        str(name): value.detach()
        for name, value in other_outputs.items()
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    }
    if len(numbers) > MAX_NUMBERS or any(len(name) > MAX_NAME for name in numbers):
        raise _output_error(
            code, f"returns more than {MAX_NUMBERS} scalars, or names of more than {MAX_NAME} characters"
        )
    return loss.reshape(()), numbers


def _output_error(code: str, rule: str) -> SpecError:
    remedy = f"return the loss, or a dict with it as {LOSS!r} and at most {MAX_NUMBERS} other scalars"
    return spec_error("unsupported", "model.build", code, f"returns a module that {rule}", remedy)
