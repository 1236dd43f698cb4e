"""Hooks of a module and its parts: those that forward registers are taken off again, as models of the transformers
library register some in their first call."""

from torch import nn

_KINDS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)


class Hooks:
    """Hooks of a module's parts, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [
            (hooks, dict(hooks))
            for part in module.modules()
            for kind in _KINDS
            if (hooks := vars(part).get(kind)) is not None
        ]

    def were_added(self) -> bool:
        return any(hooks != before for hooks, before in self._before)

    def put_back(self) -> None:
        for hooks, before in self._before:
            if hooks != before:
                hooks.clear()
                hooks.update(before)
