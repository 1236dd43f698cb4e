"""Tables of measured kernel times, and the data sheets of the devices.

They are NVIDIA's, in the package aiconfigurator-core (PyPI, Apache-2.0): `systems/data/<device>/<kernel>/<framework>/
<version>/*.parquet`. For each shape the fastest kernel of all frameworks, versions and libraries is used.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

PACKAGE, RELEASE = "aiconfigurator-core", "0.12.0"

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Table = dict[str, NDArray[Any]]
"""Columns of one length, by name."""


class NoTables(Exception):
    """The tables are missing; the message says how to get them."""


@dataclass(frozen=True)
class Sheet:
    """Data sheet of a device: peaks of dense arithmetic, and bytes per second of one device in one direction."""

    name: str
    """Name of the device's folder in the package."""
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    link_bytes_per_s: float
    adapter_bytes_per_s: float = 50e9
    """Rate of the device's share of the node's network adapters."""
    devices_per_node: int = 8
    """Devices per node of the measured machines."""


def _sheet(
    name: str, bfloat16: float, float32: float, float64: float, memory: float, link: float, **fields: Any
) -> Sheet:
    """Sheet from TFLOP/s, TB/s and GB/s; float32 is TF32 on tensor cores."""
    peaks = {"bfloat16": bfloat16 * 1e12, "float32": float32 * 1e12, "float64": float64 * 1e12}
    if name != "a100_sxm":
        peaks["fp8"] = 2 * peaks["bfloat16"]
    return Sheet(name, peaks, memory * 1e12, link * 1e9, **fields)


# Adapters per GPU: ConnectX-6 at 200 Gb/s, ConnectX-7 at 400 Gb/s, ConnectX-8 at 800 Gb/s on B300 and GB300.
SHEETS = {
    "a100-80": _sheet("a100_sxm", 312, 156, 19.5, 2.039, 300, adapter_bytes_per_s=25e9),
    "h100": _sheet("h100_sxm", 989, 494, 67, 3.35, 450),
    "h200": _sheet("h200_sxm", 989, 494, 67, 4.8, 450),
    "b200": _sheet("b200_sxm", 2250, 1125, 37, 7.7, 900),
    "gb200": _sheet("gb200", 2500, 1250, 40, 8.0, 900, devices_per_node=4),
    "b300": _sheet("b300_sxm", 2250, 1125, 1.3, 7.75, 900, adapter_bytes_per_s=100e9),
    "gb300": _sheet("gb300", 2500, 1250, 1.4, 8.0, 900, adapter_bytes_per_s=100e9, devices_per_node=4),
}


def folder_of(folder: Path | None) -> tuple[Path, str]:
    """(folder of the tables, their release): `folder` if given, else that of the installed package."""
    if folder is not None:
        if not (folder / "h100_sxm").is_dir():
            raise NoTables(
                f"--data (={folder}) must be the folder that has a folder for each device, h100_sxm among them; "
                f"it is `systems/data` of the package {PACKAGE}"
            )
        return folder, RELEASE
    module = find_spec("aiconfigurator_core")
    data_folder = None if module is None or module.origin is None else Path(module.origin).parent / "systems" / "data"
    if data_folder is None or not data_folder.is_dir():
        raise NoTables(
            f"the tables are in the package {PACKAGE}, which is not installed here; `pip install -e .[kernels]` brings "
            "it, or name its unpacked folder `systems/data`: --data FOLDER"
        )
    try:
        return data_folder, version(PACKAGE)
    except PackageNotFoundError:
        return data_folder, RELEASE


def files(folder: Path, sheet: Sheet, pattern: str) -> Iterator[Path]:
    """Files of one device; `pattern` is kernel/framework/version/file with asterisks."""
    yield from sorted((folder / sheet.name).glob(f"{pattern}.parquet"))


def columns(path: Path, names: Sequence[str], absent: Mapping[str, Any] | None = None) -> Table:
    """Columns of a file: numbers as float64, the rest as text. `absent` has values for columns that older files
    lack."""
    absent = absent or {}
    present = set(pq.read_schema(path).names)
    table = pq.read_table(path, columns=[name for name in names if name in present or name not in absent])
    columns_by_name: Table = {}
    for name in names:
        if name not in present and name in absent:
            columns_by_name[name] = np.full(table.num_rows, absent[name])
            continue
        values = np.asarray(table[name].to_pylist())
        columns_by_name[name] = values.astype(np.float64) if values.dtype.kind in "iufb" else values.astype(np.str_)
    return columns_by_name


def take(table: Table, rows: NDArray[Any]) -> Table:
    return {name: values[rows] for name, values in table.items()}


def join(tables: Sequence[Table]) -> Table:
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]} if tables else {}


def groups(table: Table, names: Sequence[str]) -> NDArray[np.int64]:
    """Group number of each row; rows that are equal in these columns share it."""
    codes = [np.unique(table[name], return_inverse=True)[1].ravel() for name in names]
    return np.unique(np.stack(codes, 1), axis=0, return_inverse=True)[1].ravel()


def fastest(table: Table, names: Sequence[str]) -> Table:
    """Row with the least `seconds` among rows that are equal in these columns."""
    if not len(table["seconds"]):
        return table
    table = take(table, np.argsort(table["seconds"], kind="stable"))
    return take(table, np.unique(groups(table, names), return_index=True)[1])


GLITCH = 1.3


def glitches(table: Table, alike: Sequence[str], sizes: Sequence[tuple[str, int]]) -> Mask:
    """Rows that took more than 1.3 times as long as a larger one with equal `alike` columns. `sizes` are columns with
    a sign: 1 if more of it is more work, else -1."""
    is_slower = np.zeros(len(table["seconds"]), bool)
    number = groups(table, alike)
    amounts = np.stack([sign * table[name] for name, sign in sizes], 1)
    order = np.argsort(number, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(number[order])) + 1):
        larger = (amounts[rows][None] >= amounts[rows][:, None]).all(2)
        seconds = table["seconds"][rows]
        is_slower[rows] = seconds > GLITCH * np.where(larger, seconds[None], np.inf).min(1)
    return is_slower
