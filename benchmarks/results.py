"""Figures with the machine and the software versions of the measurement."""

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
_PACKAGES = (
    "shardyard", "torch", "ray", "fastapi", "sqlalchemy", "numpy", "tokenizers", "transformers", "deepspeed",
    "torchtitan",
)  # fmt: skip


def machine() -> dict[str, Any]:
    """Processor, cores, memory, system, and the load average before the benchmark."""
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_average_before": round(_LOAD_BEFORE, 2),
    }


def versions() -> dict[str, str]:
    version_by_package = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            version_by_package[package] = version(package)
        except PackageNotFoundError:
            continue
    return version_by_package


def write(name: str, figures: Any) -> Path:
    """Write `figures` to `results/NAME.json` and return its path."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    record = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "figures": figures,
    }
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return path


_LOAD_BEFORE = os.getloadavg()[0]
