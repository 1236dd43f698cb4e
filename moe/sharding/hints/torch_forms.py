"""Conversion of torch's placements and meshes (`Shard`, `Replicate`, `DeviceMesh`) to ours."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from moe.sharding.hints.hints import Replicate, Shard, Split
from moe.spec import spec_error


def hint_of_torch(path: str, hint: Any, axes: Sequence[str] | None) -> Any:
    """Our hint for a DTensor placement, or for a sequence of them, one for each mesh axis in the order of `axes`;
    anything else is returned unchanged. A single placement is over all devices, as `Split(dim)` is. Raises SpecError
    for partial sums, and for a sequence whose mesh axes are not known."""
    if isinstance(hint, Placement):
        return _split(path, hint) or Replicate()
    if (
        not isinstance(hint, list | tuple)
        or not hint
        or not all(isinstance(placement, Placement) for placement in hint)
    ):
        return hint
    if axes is None or len(axes) != len(hint):
        axes_there = "there is no mesh" if axes is None else f"the mesh has {len(axes)}"
        rule = f"has placements for {len(hint)} mesh axes, but {axes_there}"
        remedy = 'pass plan(..., mesh=...) with as many axes, or use sharding.Shard({"data": 0})'
        raise spec_error("mismatch", path, str(hint), rule, remedy)
    splits = {axis: _split(path, placement) for axis, placement in zip(axes, hint, strict=True)}
    return Shard({axis: split.dim for axis, split in splits.items() if split is not None})


def _split(path: str, placement: Placement) -> Split | None:
    """The split of a DTensor placement; None for `Replicate`."""
    if type(placement) is TorchShard:
        return Split(placement.dim)
    if isinstance(placement, TorchReplicate):
        return None
    raise spec_error(
        "unsupported", path, str(placement), "does not shard a whole tensor", "use Shard(dim) or Replicate()"
    )


def axes_of_mesh(mesh: Any) -> Any:
    """Sizes of a DeviceMesh's axes by name (`axis0`, `axis1` where they have none); anything else is returned
    unchanged."""
    if not isinstance(mesh, DeviceMesh):
        return mesh
    names = mesh.mesh_dim_names or tuple(f"axis{number}" for number in range(mesh.ndim))
    return dict(zip(names, tuple(mesh.shape), strict=True))


def is_ascending(mesh: DeviceMesh) -> bool:
    """Whether ranks ascend along each axis of a mesh, as they do in its process groups."""
    ranks = mesh.mesh
    return all(bool((ranks.diff(dim=axis) > 0).all()) for axis in range(ranks.ndim))


def hints_of_torch(hints: Any, axes: Any) -> Any:
    """Hints by name, DTensor's placements converted to ours."""
    if not isinstance(hints, Mapping):
        return hints
    names = tuple(axes) if isinstance(axes, Mapping) else None
    return {name: hint_of_torch(f"hints[{name!r}]", hint, names) for name, hint in hints.items()}
