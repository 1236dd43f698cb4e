"""Constants of the planner's kernels, fitted on NVIDIA's measurements of its GPUs: `pip install -e .[kernels]` installs
the tables, or `--data FOLDER` names their folder.

Writes `moe/plan/cluster/measured.json`, `benchmarks/results/device_constants.json` and the section on kernels of
docs/planner.md within a minute. `--render` writes the first and the last from the recorded results.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.kernels import attention, collectives, exchange, experts, page, products
from benchmarks.kernels.constants import constants_of, render_json
from benchmarks.kernels.fitting import Figures
from benchmarks.kernels.tables import PACKAGE, SHEETS, NoTables, Sheet, folder_of
from moe.plan.cluster import measured
from moe.plan.cluster.kernels import ExchangeCost

RECORD = results.FOLDER / "device_constants.json"
_WIDER = ("float32", "float64")


def fit_device(
    folder: Path, sheet: Sheet, h100: ExchangeCost | None
) -> tuple[dict[str, Any], dict[str, Figures], ExchangeCost | None]:
    """(constants, errors, exchange) of one device; between nodes the exchange may take the constants of `h100`."""
    constants: dict[str, Any] = {"products": {}, "experts": {}}
    errors: dict[str, Figures] = {}
    for dtype in products.DTYPES:
        if dtype in sheet.flops_per_s:
            product, errors[f"products {dtype}"] = products.cross_validate(folder, sheet, dtype)
            expert, errors[f"experts {dtype}"] = experts.cross_validate(folder, sheet, dtype)
            constants["products"][dtype] = constants_of(product)
            constants["experts"][dtype] = constants_of(expert)
            if dtype == "bfloat16":
                wider = {dtype: products.derive_dtype(product, dtype, sheet) for dtype in _WIDER}
                wider_experts = {dtype: experts.derive_dtype(expert, dtype, sheet) for dtype in _WIDER}
    constants["products"] |= {dtype: constants_of(product) for dtype, product in wider.items()}
    constants["experts"] |= {dtype: constants_of(expert) for dtype, expert in wider_experts.items()}
    heads, attention_errors = attention.cross_validate(folder, sheet)
    constants["attention"] = {str(widths): constants_of(kernel) for widths, kernel in heads.items()}
    errors |= attention_errors
    for name in collectives.OPERATIONS:
        collective, errors[name] = collectives.cross_validate(folder, sheet, name)
        constants[name] = constants_of(collective)
    exchange_cost, exchange_errors = exchange.cross_validate(folder, sheet)
    errors |= exchange_errors
    if exchange_cost is not None and "exchange between nodes" not in errors and h100 is not None:
        exchange_cost = exchange.extend_between_nodes(exchange_cost, h100, sheet)
    constants["exchange"] = None if exchange_cost is None else constants_of(exchange_cost)
    return constants, errors, exchange_cost


def fit_all_devices(folder: Path, release: str) -> dict[str, Any]:
    """Constants and errors of all devices."""
    constants, errors = {}, {}
    h100: ExchangeCost | None = None
    for name, sheet in SHEETS.items():
        constants[name], errors[name], exchange = fit_device(folder, sheet, h100)
        h100 = exchange if name == "h100" else h100
        print(f"{name:>8}  " + "  ".join(f"{kernel} {errors[name][kernel]['error']:.3f}" for kernel in page.LIMITS
                                        if kernel in errors[name]), flush=True)  # fmt: skip
    return {
        "source": {"package": PACKAGE, "version": release, "licence": "Apache-2.0"},
        "error": "mean |ln(predicted / measured)| of shapes that were held out; `outside`: of rows not counted",
        "limits": page.LIMITS,
        "constants": constants,
        "errors": errors,
    }


def read_record() -> Mapping[str, Any]:
    record: Mapping[str, Any] = json.loads(RECORD.read_text())["figures"]
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description="fit the planner's kernels on measured ones")
    parser.add_argument("--data", type=Path, help="folder of the tables: `systems/data` of the package")
    parser.add_argument(
        "--render", action="store_true", help="write constants and docs from what is recorded; fit nothing"
    )
    args = parser.parse_args()
    if not args.render:
        try:
            folder, release = folder_of(args.data)
        except NoTables as error:
            print(f"benchmarks.device_constants: {error}", file=sys.stderr)
            return 2
        results.write("device_constants", fit_all_devices(folder, release))
    figures = read_record()
    measured.PATH.write_text(render_json(figures["constants"]), encoding="utf-8")
    page.write_section(figures)
    print(f"written to {measured.PATH}, {RECORD} and {page.PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
