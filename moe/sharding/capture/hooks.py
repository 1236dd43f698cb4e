"""Hooks of a module and its submodules. Those that `forward` registers, as transformers models do in their first call,
are removed after capture."""

from torch import nn

_KINDS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)


class Hooks:
    """Snapshot of the hooks of a module and its submodules."""

    def __init__(self, module: nn.Module) -> None:
        self._originals = [
            (hooks, dict(hooks))
            for part in module.modules()
            for kind in _KINDS
            if (hooks := vars(part).get(kind)) is not None
        ]

    def were_added(self) -> bool:
        return any(hooks != original for hooks, original in self._originals)

    def put_back(self) -> None:
        for hooks, original in self._originals:
            if hooks != original:
                hooks.clear()
                hooks.update(original)
