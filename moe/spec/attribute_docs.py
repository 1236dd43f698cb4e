"""Docstrings of attributes, which describe them in JSON Schemas. They are read from the source when a schema is made:
read as each class is made, as pydantic does, they take two fifths of the import of all specs."""

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise


def attribute_docstrings(model: type) -> dict[str, str]:
    """Docstrings of a class's annotated attributes, inherited ones included, by name. A class that annotates an
    attribute anew takes its docstring anew. Empty without source."""
    docstrings: dict[str, str] = {}
    for base in reversed(model.__mro__):
        for name in inspect.get_annotations(base):
            docstrings.pop(name, None)
        docstrings |= _of_module(base.__module__).get(base.__qualname__, {})
    return docstrings


@cache
def _of_module(name: str) -> dict[str, dict[str, str]]:
    """Docstrings of attributes by class."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except (OSError, TypeError):
        return {}
    return {node.name: _of_class(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _of_class(node: ast.ClassDef) -> dict[str, str]:
    return {
        statement.target.id: inspect.cleandoc(following.value.value)
        for statement, following in pairwise(node.body)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
        and isinstance(following.value.value, str)
    }
