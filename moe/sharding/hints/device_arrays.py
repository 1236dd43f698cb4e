"""Device assignments of the paper (GShard, arXiv 2006.16668, section 3.2): arrays whose shape is the number of parts of
each dimension, and whose entries are the devices that have the slices."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from moe.sharding.placement import AxisPlacement, split
from moe.spec import SpecError, spec_error

Order = tuple[int, ...]
"""Device at each place of a mesh, whose last axis runs fastest."""


def pin_of_array(
    ids: Any, num_dims: int, mesh: Mapping[str, int], origin: str, devices: Sequence[int] = ()
) -> tuple[AxisPlacement, ...]:
    """Splits over mesh axes that give every device the slice that an array gives it. `devices` gives the device number
    at each place of the mesh; by default 0, 1, 2 and so on. Raises SpecError if no
    such splits exist."""
    device_order = tuple(devices) or tuple(range(math.prod(mesh.values())))
    for dims, order in _orders(ids, num_dims, mesh, origin):
        if order == device_order:
            return tuple(map(split, dims))
    raise _refusal(ids, mesh, origin, f"matches no split over the axes of the mesh {dict(mesh)}")


def common_order(arrays: Iterable[tuple[Any, int, str]], mesh: Mapping[str, int]) -> Order:
    """Order of devices on a mesh in which every array is a split over mesh axes; 0, 1, 2 and so on if that is one. Each
    array comes as (ids, number of dimensions of its tensor, path of the hint). Raises SpecError where no order suits
    all arrays."""
    in_order: Order = tuple(range(math.prod(mesh.values())))
    common: list[Order] = []
    first = ""
    for ids, num_dims, path in arrays:
        orders = list(dict.fromkeys(order for _, order in _orders(ids, num_dims, mesh, path)))
        common_orders = [order for order in common if order in orders] if first else orders
        if not common_orders:
            rule = f"matches no split over the axes of the mesh {dict(mesh)}"
            raise _refusal(ids, mesh, path, f"{rule} together with {first}" if first else rule)
        common, first = common_orders, first or path
    return in_order if in_order in common or not common else common[0]


def shape_of_array(ids: Any) -> tuple[int, ...]:
    """Number of parts of each dimension; empty if nested lists have different lengths."""
    try:
        return np.array(ids).shape
    except ValueError:
        return ()


def _orders(ids: Any, num_dims: int, mesh: Mapping[str, int], path: str) -> Iterator[tuple[tuple[int, ...], Order]]:
    """(dimension that each axis splits, order of devices on the mesh with which the array is that split). Raises
    SpecError for an array that does not contain all devices once."""
    degrees = tuple(mesh.values())
    num_devices = math.prod(degrees)
    shape = shape_of_array(ids)
    if len(shape) != num_dims or sorted(np.array(ids).reshape(-1).tolist()) != list(range(num_devices)):
        rule = f"must be a {num_dims}-dimensional array with each of the {num_devices} devices once"
        raise spec_error("invalid_value", path, f"shape {shape}", rule, "use one entry per slice")
    array, places = np.array(ids), np.arange(num_devices).reshape(degrees)
    for dims in itertools.product(range(num_dims), repeat=len(degrees)):
        cuts = [
            math.prod(d for d, dim in zip(degrees, dims, strict=True) if dim == array_dim)
            for array_dim in range(num_dims)
        ]
        if tuple(cuts) == shape:
            axes = sorted(range(len(degrees)), key=lambda axis: (dims[axis], axis))
            order = np.empty(num_devices, dtype=int)
            order[places.transpose(axes).reshape(-1)] = array.reshape(-1)
            yield dims, tuple(order.tolist())


def _refusal(ids: Any, mesh: Mapping[str, int], path: str, rule: str) -> SpecError:
    remedy = "use a mesh whose axes multiply to the array's shape, and one device order in all arrays"
    return spec_error("invalid_value", path, np.array2string(np.array(ids), threshold=16), rule, remedy)
