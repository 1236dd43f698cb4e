"""Types of the matrices of a GGUF file. No torch."""

from enum import StrEnum


class GgufType(StrEnum):
    """Type of the matrices of a GGUF file."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    """8 bits, with a float16 scale for each 32 values of a row."""
