"""Paths of a module's blocks, which `recompute` computes again: the members of a list of layers."""

from collections import Counter, defaultdict

from torch import fx, nn

from moe.sharding.lines import BLOCK

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def note_blocks(module: nn.Module, graph: fx.Graph) -> None:
    """Set `BLOCK` of the operators of a module's graph: the path of the outermost block that contains the operator, or
    None.

    A block is a member of a list of layers: `layers.3` of `layers.3.moe.shared`, `0.layers.3` where the whole network
    is one member of a list. A list of layers has two members of one kind, and no other member that contains a list
    whose layers have more parameters: in `Sequential(Linear, Encoder, Linear)` the encoder's layers are the blocks. On
    a path without a list of layers, the block is the outermost member of any list that contains no list of layers. A
    module with several paths is one block."""
    operators = [node for node in graph.nodes if node.op == "call_function"]
    paths, blocks = {node.meta.get("block") or "" for node in operators}, _BlockPaths(module)
    block_of = {path: blocks.block_of(path) for path in paths}
    for node in operators:
        node.meta[BLOCK] = block_of[node.meta.get("block") or ""]


class _BlockPaths:
    def __init__(self, module: nn.Module) -> None:
        self._modules = dict(module.named_modules(remove_duplicate=False))
        members: dict[str, list[str]] = defaultdict(list)
        for path in self._modules:
            if _is_member(path):
                members[_owner(path)].append(path)
        self._lists_of_layers = self._find_lists_of_layers(members)
        self._by_module: dict[int, str] = {}
        """Outermost blocks by the id of a member of a list of layers, which may have other paths, too."""
        for path in self._modules:
            if _is_member(path) and _owner(path) in self._lists_of_layers:
                outermost = next(part for part in _prefixes(path) if _owner(part) in self._lists_of_layers)
                self._by_module.setdefault(id(self._modules[path]), outermost)

    def block_of(self, path: str) -> str | None:
        prefixes = _prefixes(path)
        blocks = (self._by_module.get(id(self._modules.get(prefix))) for prefix in prefixes)
        members = (prefix for prefix in prefixes if _is_member(prefix) and not self._has_layers(prefix))
        return next(filter(None, blocks), None) or next(members, None)

    def _has_layers(self, path: str) -> bool:
        return any(_contains(path, owner) for owner in self._lists_of_layers)

    def _find_lists_of_layers(self, members: dict[str, list[str]]) -> set[str]:
        num_parameters: dict[str, int] = {}
        """Parameters of the members that have another of their kind, by the path of the list."""
        singles: dict[str, list[str]] = {}
        for owner, paths in members.items():
            kinds = {path: _kind(self._modules[path]) for path in paths}
            counts = Counter(kinds.values())
            layers = [path for path in paths if counts[kinds[path]] > 1]
            if layers:
                num_parameters[owner] = sum(map(self._num_parameters, layers))
                singles[owner] = [path for path in paths if counts[kinds[path]] == 1]
        return {
            owner
            for owner, number in num_parameters.items()
            if not any(
                number < inner_number and _contains(single, inner)
                for single in singles[owner]
                for inner, inner_number in num_parameters.items()
            )
        }

    def _num_parameters(self, path: str) -> int:
        return sum(parameter.numel() for parameter in self._modules[path].parameters())


def _kind(module: nn.Module) -> object:
    """The class, and the kinds of the children of torch's containers: all `Sequential` are of one class."""
    if type(module) in _CONTAINERS:
        return type(module), *map(_kind, module.children())
    return type(module)


def _prefixes(path: str) -> list[str]:
    """Paths of the modules that contain a module, outermost first, and its own."""
    names = path.split(".")
    return [".".join(names[:length]) for length in range(1, len(names) + 1)]


def _is_member(path: str) -> bool:
    return path.rpartition(".")[2].isdecimal()


def _owner(path: str) -> str:
    return path.rpartition(".")[0]


def _contains(path: str, inner: str) -> bool:
    return inner == path or inner.startswith(f"{path}.")
