"""Constants of kernels on real GPUs, by device. `python -m benchmarks.device_constants` fits them on measurements and
writes `measured.json`; docs/planner.md has their errors.

float32 (TF32 on tensor cores) and float64 were not measured: they are assumed to reach bfloat16's share of their own
peak. Between nodes only H100 and H200 were measured: other devices have H100's `hop_s` and `forward_bytes_per_s`, and
its `line_bytes_per_s` at the ratio of the adapters. DeepEP was not measured on A100.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe.plan.cluster.kernels import (
    CollectiveCost,
    ExchangeCost,
    FusedAttention,
    GroupedExperts,
    Kernels,
    MatrixProducts,
)

PATH = Path(__file__).with_suffix(".json")


def kernels_from_constants(constants: Mapping[str, Any]) -> Kernels:
    """Kernels of one device from JSON: `products` and `experts` by dtype, `attention` by width, `ring`, `all_to_all`
    and `exchange`."""
    exchange = constants["exchange"]
    return Kernels(
        products={dtype: MatrixProducts(**fields) for dtype, fields in constants["products"].items()},
        experts={dtype: GroupedExperts(**fields) for dtype, fields in constants["experts"].items()},
        attention={int(width): FusedAttention(**fields) for width, fields in constants["attention"].items()},
        ring=CollectiveCost(**constants["ring"]),
        all_to_all=CollectiveCost(**constants["all_to_all"]),
        exchange=None if exchange is None else ExchangeCost(**exchange),
    )


MEASURED = {
    device: kernels_from_constants(constants)
    for device, constants in json.loads(PATH.read_text(encoding="utf-8")).items()
}
