"""Random draws that are the same on every machine: they use the generator's raw bits alone."""

import numpy as np
from numpy.typing import NDArray


def seeded_generator(seed: int, number: int, *, stream: int = 0, substream: int = 0) -> np.random.Philox:
    """Generator for the step, epoch or purpose `number`. Each `stream` and `substream` is a part of its counter space,
    apart from those of other users of the same seed and number."""
    return np.random.Philox(key=np.array([seed % 2**64, number], np.uint64), counter=[0, 0, substream, stream])


def uniform(generator: np.random.Philox, num_draws: int) -> NDArray[np.float64]:
    """Draws from [0, 1) with 53 bits each."""
    return np.asarray((generator.random_raw(num_draws) >> np.uint64(11)) * 2.0**-53, np.float64)


def permutation(generator: np.random.Philox, num_rows: int) -> NDArray[np.int64]:
    """Random order of [num_rows] indices, by draws of 64 bits: the chance that two are alike, and stay in order, is
    negligible."""
    return np.argsort(generator.random_raw(num_rows), kind="stable")
