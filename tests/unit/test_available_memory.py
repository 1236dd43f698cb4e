"""Memory that `doctor` and `up` count as available within a control group."""

import sys
from pathlib import Path

import pytest

from service.cli.checks import available_memory_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
MIB = 1 << 20
STATISTICS = {"anon": 60 * MIB, "inactive_file": 20 * MIB, "active_file": 8 * MIB, "slab_reclaimable": 2 * MIB}


@pytest.mark.parametrize(
    ("limit", "statistics", "available"),
    [
        (str(100 * MIB), STATISTICS, 40 * MIB),
        (str(100 * MIB), {}, 10 * MIB),
        (str(80 * MIB), {"inactive_file": MIB}, 0),  # the limit was lowered below what is used
    ],
    ids=["page cache", "without statistics", "beyond the limit"],
)
def test_page_cache_is_available(tmp_path: Path, limit: str, statistics: dict[str, int], available: int) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{90 * MIB}\n")
    (tmp_path / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in statistics.items()))
    assert available_memory_bytes(tmp_path) == available


@pytest.mark.parametrize("files", [{}, {"memory.max": "max", "memory.current": "1"}], ids=["none", "unlimited"])
def test_without_a_limit_the_machines_memory_counts(tmp_path: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert (available_memory_bytes(tmp_path) or 0) > MIB
