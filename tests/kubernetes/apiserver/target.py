"""What a request names: a resource, a place, and a selection of its objects."""

from typing import Any, NamedTuple

from tests.kubernetes.apiserver.definitions import Definition
from tests.kubernetes.apiserver.selectors import check_fields, matches_fields, matches_labels

Object = dict[str, Any]


class Target(NamedTuple):
    """What a path names."""

    definition: Definition
    namespace: str
    name: str
    subresource: str


def selects(target: Target, query: Any, value: Object) -> bool:
    if target.name and value["metadata"]["name"] != target.name:
        return False
    fields = query.get("fieldSelector", "")
    check_fields(target.definition.plural, fields)
    return matches_labels(value, query.get("labelSelector", "")) and matches_fields(value, fields)
