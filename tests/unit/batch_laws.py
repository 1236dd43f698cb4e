"""Laws of the batches of both samplers."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

cuts_of_groups = st.lists(st.floats(0, 1), max_size=6).map(sorted)
"""Where a batch's groups are divided, as shares of their number."""


def assert_function_of_step(sampler: Callable[[], Any], steps: Sequence[int]) -> None:
    """Assert that a batch does not depend on the batches drawn before it."""
    forward, backward = sampler(), sampler()
    rows = {step: forward.batch(step).rows.tolist() for step in steps}
    assert rows == {step: backward.batch(step).rows.tolist() for step in reversed(steps)}


def assert_parts_equal_whole(batch: Any, fields: Sequence[str], cuts: Sequence[float]) -> Any:
    """Assert that parts equal the full batch, however groups are divided. Return the full batch."""
    num_groups = batch.num_groups
    full_batch, ends = batch.part(0, num_groups), [round(cut * num_groups) for cut in cuts]
    parts = [batch.part(*bounds) for bounds in zip([0, *ends], [*ends, num_groups], strict=True)]
    for field in fields:
        assert np.array_equal(np.concatenate([getattr(part, field) for part in parts]), getattr(full_batch, field))
    first_rows = np.cumsum([0, *(len(getattr(part, fields[0])) for part in parts)])
    assert [part.first_row for part in parts] == first_rows[:-1].tolist()
    return full_batch


def assert_missing_groups_are_refused(batch: Any) -> None:
    """Assert that the batch of step 5 refuses groups outside its 3."""
    assert batch.part(2, 2).first_row == len(batch.rows) * 2 // 3
    for groups in ((2, 1), (-1, 2), (0, 4)):
        with pytest.raises(ValueError, match="are outside the 3 groups of step 5"):
            batch.part(*groups)


def digest(sampler: Any, steps: Sequence[int]) -> str:
    """Digest of the rows of these steps: a run that resumes under a newer version must continue with the same
    batches."""
    rows = b"".join(sampler.batch(step).rows.astype("<i8").tobytes() for step in steps)
    return hashlib.sha256(rows).hexdigest()[:16]
