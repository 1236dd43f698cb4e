"""Triton's interpreter without repeated work: it replaces the functions of `triton.language` by its own at each call of
a device function, which takes a quarter of its time, and also where they are its own already."""

import inspect
from typing import Any


def replace_language_once() -> None:
    """Leave modules alone whose functions the running kernel, or a device function before, has replaced."""
    from triton import language
    from triton.runtime import interpreter

    replace_language = interpreter._patch_lang

    def replace_if_original(function: Any) -> Any:
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        if any(module in (language, language.core) and language.core.is_builtin(module.load) for module in modules):
            return replace_language(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = replace_if_original
