"""The table of transformers' mixture types in docs/families.md."""

import pytest

from benchmarks.coverage import PAGE, measure, with_table


@pytest.mark.slow
def test_the_table_of_mixtures_is_current():
    text, reasons = PAGE.read_text(), measure()
    assert with_table(text, reasons) == text, "`python -m benchmarks.coverage` writes it anew"
    assert reasons["mixtral"] is None
    assert "`mamba_dt_rank`" in str(reasons["jamba"])
