"""Functions of a module job: their names, permissions and the only place that imports them."""

from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from typing import Any

from moe.spec import JobSpec, ModuleDataSpec, ModuleModelSpec, Problem, SpecError, spec_error

SETTING = "SHARDYARD_ALLOWED_CODE"
MAX_SHOWN = 10


def functions_of(spec: JobSpec) -> dict[str, str]:
    """Functions that a job names, by path in the spec; empty for other kinds of jobs."""
    functions = {}
    if isinstance(spec.model, ModuleModelSpec):
        functions["model.build"] = spec.model.build
    if isinstance(spec.data, ModuleDataSpec):
        functions["data.batches"] = spec.data.batches
    return functions


def check_allowed(spec: JobSpec, allowed_code: Collection[str]) -> None:
    """Raise SpecError for functions of a job that are not in `allowed_code`. Only compares names."""
    if problems := list(_not_allowed(functions_of(spec), allowed_code)):
        raise SpecError(problems)


def _not_allowed(functions: dict[str, str], allowed_code: Collection[str]) -> Iterator[Problem]:
    sorted_names = sorted(allowed_code)
    shown_names = ", ".join(sorted_names[:MAX_SHOWN]) + (", ..." if len(sorted_names) > MAX_SHOWN else "")
    remedy = f"ask the operator to add it to {SETTING}" + (f", or use one of {shown_names}" if sorted_names else "")
    for path, code in functions.items():
        if code not in allowed_code:
            yield Problem("not_allowed", path, code, "is not an allowed function", remedy)


def import_function(code: str, path: str) -> Callable[..., Any]:
    """Import `module:function`, running the module's top level. Callers must have checked permission.

    Raises SpecError at `path` in the spec if there is no such function.
    """
    module, _, name = code.partition(":")
    try:
        function = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        rule = f"cannot be imported: there is no module {error.name!r}"
        raise spec_error(
            "not_found", path, code, rule, "install it where jobs run, or put its folder on PYTHONPATH"
        ) from error
    except AttributeError as error:
        raise spec_error("not_found", path, code, f"does not exist: {error}", "correct the function's name") from error
    except Exception as error:
        rule = f"cannot be imported: {type(error).__name__}: {error}"
        raise spec_error("user_code", path, code, rule, "correct the module") from error
    if not callable(function):
        raise spec_error("wrong_type", path, code, "is not a function", "name a function or class")
    return function
