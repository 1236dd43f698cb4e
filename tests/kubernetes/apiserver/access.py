"""Identities by token, and what RBAC allows them."""

from typing import Any, NamedTuple

from tests.kubernetes.apiserver.failure import Failure

Rule = dict[str, Any]


class Attributes(NamedTuple):
    """What a request does, as RBAC sees it."""

    verb: str
    group: str
    resource: str
    """With its subresource: `pods/status`."""
    namespace: str
    """Empty for cluster scope."""
    name: str


class Access:
    """Users by token. A user without rules may do everything."""

    def __init__(self, identities: dict[str, dict[str, Any]]) -> None:
        """`identities` maps a token to `user` and, unless it is an administrator, `rules`: those of Roles, each with
        the `namespace` of its Role, or with an empty one for those of ClusterRoles."""
        self._identities = identities

    def user(self, token: str) -> str:
        """Raises Failure (401)."""
        if token not in self._identities:
            raise Failure(401, "Unauthorized", "Unauthorized")
        return str(self._identities[token]["user"])

    def is_allowed(self, token: str, request: Attributes) -> bool:
        rules = self._identities[token].get("rules")
        return rules is None or any(_allows(rule, request) for rule in rules)

    def check(self, token: str, request: Attributes) -> None:
        """Raises Failure (403)."""
        if self.is_allowed(token, request):
            return
        scope = f'in the namespace "{request.namespace}"' if request.namespace else "at the cluster scope"
        plural = request.resource.partition("/")[0]
        qualified = f"{plural}.{request.group}" if request.group else plural
        name = f'"{request.name}" ' if request.name else ""
        raise Failure(
            403,
            "Forbidden",
            f'{qualified} {name}is forbidden: User "{self.user(token)}" cannot {request.verb} resource '
            f'"{request.resource}" in API group "{request.group}" {scope}',
            name=request.name,
            group=request.group,
            kind=plural,
        )


def _allows(rule: Rule, request: Attributes) -> bool:
    names = rule.get("resourceNames")
    return (
        rule.get("namespace", "") in ("", request.namespace)
        and any(group in ("*", request.group) for group in rule["apiGroups"])
        and any(resource in ("*", request.resource) for resource in rule["resources"])
        and any(verb in ("*", request.verb) for verb in rule["verbs"])
        and (not names or request.name in names)
    )
