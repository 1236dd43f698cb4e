"""The server's HTTP: REST paths to the registry's verbs, watches, and control by the test."""

import asyncio
import base64
import json
import os
import signal
from typing import Any

import yaml
from aiohttp import web

from tests.kubernetes.apiserver.access import Access, Attributes
from tests.kubernetes.apiserver.definitions import Definition
from tests.kubernetes.apiserver.discovery import document
from tests.kubernetes.apiserver.failure import EXPIRED, Failure, expired
from tests.kubernetes.apiserver.faults import Denial, Fault
from tests.kubernetes.apiserver.registry import Registry
from tests.kubernetes.apiserver.store import Key
from tests.kubernetes.apiserver.target import Target, selects
from tests.kubernetes.apiserver.watches import Watches, drop

Object = dict[str, Any]

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class App:
    """Request handlers of one server."""

    def __init__(self, registry: Registry, access: Access, *, bookmark_s: float) -> None:
        self._registry, self._access = registry, access
        self._store = registry.store
        self._faults: list[Fault] = []
        self._requests: list[Object] = []
        self._watches = Watches(registry.store, bookmark_s=bookmark_s)
        self._listed: tuple[Any, list[Object]] | None = None
        """The last selection and its objects, of which a client reads page after page."""

    def application(self) -> web.Application:
        application = web.Application(client_max_size=64 * 1024**2)
        application.router.add_route("*", "/testing/{action}", self._control)
        application.router.add_route("*", "/{path:.*}", self._handle)
        return application

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path in ("/healthz", "/livez", "/readyz"):
            return web.Response(text="ok")
        try:
            token = request.headers.get("Authorization", "").removeprefix("Bearer ").removeprefix("bearer ").strip()
            user = self._access.user(token)
            if request.path == REVIEWS:
                return self._review(token, await _body(request))
            discovery = document(request.path, list(self._registry.definitions.values()))
            if discovery is not None:
                return web.json_response(discovery)
            target = self._target(request.path)
            if target is None:
                return web.Response(status=404, text="404 page not found\n")
            return await self._serve(request, target, token, user)
        except Failure as failure:
            return web.json_response(failure.status(), status=failure.code)

    def _target(self, path: str) -> Target | None:
        parts = [part for part in path.split("/") if part]
        if parts[:2] == ["api", "v1"]:
            group, version, rest = "", "v1", parts[2:]
        elif parts[:1] == ["apis"] and len(parts) > 3:
            group, version, rest = parts[1], parts[2], parts[3:]
        else:
            return None
        namespace = ""
        if rest[:1] == ["namespaces"] and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        definition = self._registry.definitions.get((group, version, rest[0]))
        if definition is None or len(rest) > 3:
            return None
        return Target(definition, namespace, rest[1] if len(rest) > 1 else "", rest[2] if len(rest) > 2 else "")

    async def _serve(self, request: web.Request, target: Target, token: str, user: str) -> web.StreamResponse:
        definition, query = target.definition, request.query
        verb = _VERBS[request.method]
        if verb == "get" and not target.name:
            verb = "watch" if query.get("watch") in ("true", "1") else "list"
        if verb == "delete" and not target.name:
            verb = "deletecollection"
        resource = f"{definition.plural}/{target.subresource}" if target.subresource else definition.plural
        entry: Object = {"user": user, "verb": verb, "group": definition.group, "resource": resource}
        entry |= {"namespace": target.namespace, "name": target.name, "query": dict(query), "code": 0}
        self._requests.append(entry)
        try:
            attributes = Attributes(verb, definition.group, resource, target.namespace, target.name)
            fault = self._fault(verb, resource, user)
            if fault is not None and fault.kind == "delay":
                await asyncio.sleep(fault.seconds)
            if fault is not None and fault.kind == "drop":
                return drop(request)
            if fault is not None and fault.kind == "status":
                return _faulty(fault, entry)
            self._access.check(token, attributes)
            if verb == "watch":
                entry["code"] = 200
                return await self._watches.answer(request, target, fault, entry)
            value = await self._answer(request, target, verb, query.get("fieldManager") or _agent(request))
        except Failure as failure:
            entry["code"] = failure.code
            raise
        if fault is not None and fault.kind == "drop_response":
            return drop(request)
        entry["code"] = 201 if verb == "create" else 200
        return web.json_response(value, status=entry["code"])

    async def _answer(self, request: web.Request, target: Target, verb: str, manager: str) -> Object:
        definition, namespace, name, subresource = target
        query, registry = request.query, self._registry
        dry, strict = query.get("dryRun") == "All", query.get("fieldValidation") == "Strict"
        if subresource and not (subresource == "status" and definition.has_status):
            raise Failure(404, "NotFound", "the server could not find the requested resource")
        if verb == "get":
            return registry.get(definition, namespace, name)
        if verb == "list":
            return self._list(target, query)
        if verb == "deletecollection":
            raise Failure(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
        body = await _body(request)
        if verb == "create":
            return registry.create(definition, namespace, body, manager=manager, strict=strict, dry=dry)
        if verb == "update":
            return registry.update(
                definition, namespace, name, body, subresource=subresource, manager=manager, strict=strict, dry=dry
            )
        if verb == "patch":
            is_new = registry.store.get(Key(definition.name, namespace, name)) is None
            if is_new and request.content_type == "application/apply-patch+yaml":
                manager = query.get("fieldManager", "")
            value = registry.patch(
                definition,
                namespace,
                name,
                body,
                request.content_type,
                subresource=subresource,
                manager=query.get("fieldManager", "") if "apply" in request.content_type else manager,
                strict=strict,
                force=query.get("force") == "true",
                dry=dry,
            )
            self._collect_soon()
            return value
        options = {**{k: query[k] for k in ("propagationPolicy",) if k in query}, **(body or {})}
        deleted = registry.delete(definition, namespace, name, options, dry=dry)
        self._collect_soon()
        if self._store.get(Key(definition.name, namespace, name)) is not None:
            return deleted
        details = {
            "name": name,
            "group": definition.group,
            "kind": definition.plural,
            "uid": deleted["metadata"]["uid"],
        }
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}

    def _collect_soon(self) -> None:
        def collect() -> None:
            while self._registry.collect_garbage():
                pass

        asyncio.get_running_loop().call_later(0.01, collect)

    def _list(self, target: Target, query: Any) -> Object:
        definition = target.definition
        version, start = self._store.version, 0
        if query.get("continue"):
            version, start = json.loads(base64.b64decode(query["continue"]))
            if version < self._store.compacted:
                raise expired(EXPIRED)
        selection = (definition, target.namespace, version, query.get("labelSelector"), query.get("fieldSelector"))
        if self._listed is None or self._listed[0] != selection:
            values = self._store.collection(definition.name, target.namespace, version)
            self._listed = selection, [value for value in values if selects(target, query, value)]
        values = self._listed[1]
        limit = int(query.get("limit") or 0)
        metadata: Object = {"resourceVersion": str(version)}
        page = values[start:]
        if limit and len(page) > limit:
            page = page[:limit]
            metadata["continue"] = base64.b64encode(json.dumps([version, start + limit]).encode()).decode()
            metadata["remainingItemCount"] = len(values) - start - limit
        kind = f"{definition.kind}List"
        items = [{k: v for k, v in item.items() if k not in ("kind", "apiVersion")} for item in page]
        if definition.is_custom:
            items = page  # custom resources name their kind in lists, core ones do not
        return {"kind": kind, "apiVersion": definition.api_version, "metadata": metadata, "items": items}

    def _fault(self, verb: str, resource: str, user: str) -> Fault | None:
        for fault in self._faults:
            if fault.matches(verb=verb, resource=resource, user=user):
                if fault.kind in ("break_watch", "expire_watch") and verb != "watch":
                    continue
                fault.count -= 1
                return fault
        return None

    def _review(self, token: str, body: Object) -> web.Response:
        wanted = body["spec"].get("resourceAttributes") or {}
        resource = wanted.get("resource", "") + (f"/{wanted['subresource']}" if wanted.get("subresource") else "")
        attributes = Attributes(
            wanted.get("verb", ""),
            wanted.get("group", ""),
            resource,
            wanted.get("namespace", ""),
            wanted.get("name", ""),
        )
        status = {"allowed": self._access.is_allowed(token, attributes)}
        entry: Object = {
            "user": self._access.user(token),
            "verb": "create",
            "group": "authorization.k8s.io",
            "namespace": "",
        }
        entry |= {"resource": "selfsubjectaccessreviews", "name": "", "query": {}, "code": 201}
        self._requests.append(entry)
        return web.json_response({**body, "metadata": {}, "status": status}, status=201)

    async def _control(self, request: web.Request) -> web.StreamResponse:
        """What the test asks for, without credentials: the server listens on loopback."""
        action, body = request.match_info["action"], await _body(request)
        if action == "requests":
            entries = list(self._requests)
            if request.method == "DELETE":
                self._requests.clear()
            return web.json_response(entries)
        if action == "fault":
            fault = Fault(**body)
            if fault.kind in ("break_watch", "expire_watch"):
                self._watches.end(fault)
            else:
                self._faults.append(fault)
        elif action == "heal":
            self._faults.clear()
        elif action == "deny":
            self._registry.denials = [Denial(**denial) for denial in body]
        elif action == "compact":
            self._store.compact(body.get("version"))
        elif action == "identities":
            self._access = Access(body)
        elif action == "load":
            for entry in body:
                definition = self._registry.definition(*entry["resource"])
                self._load(definition, entry["object"])
        elif action == "crash":
            return await self._crash(request)
        elif action != "state":
            return web.Response(status=404)
        return web.json_response(
            {
                "version": self._store.version,
                "num_watches": len(self._watches),
                "told_version": self._watches.told_version,
            }
        )

    async def _crash(self, request: web.Request) -> web.StreamResponse:
        """Answer with the requests, then die: none comes between."""
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(json.dumps(self._requests).encode())
        await response.write_eof()
        os.kill(os.getpid(), signal.SIGKILL)
        return response

    def _load(self, definition: Definition, value: Object) -> None:
        """Store an object as it is, with its status: tens of thousands by requests would take minutes."""
        metadata = value["metadata"]
        key = Key(definition.name, metadata.get("namespace", "") if definition.namespaced else "", metadata["name"])
        self._store.write("MODIFIED" if self._store.get(key) else "ADDED", key, value)


async def _body(request: web.Request) -> Any:
    content = await request.read()
    if not content:
        return {}
    if "protobuf" in request.content_type:
        raise Failure(415, "UnsupportedMediaType", f"unsupported media type {request.content_type}")
    try:
        if "yaml" in request.content_type:
            return yaml.load(content, Loader=yaml.CSafeLoader)  # JSON is YAML
        return json.loads(content)
    except (ValueError, yaml.YAMLError) as error:
        raise Failure(400, "BadRequest", f"error decoding patch: {error}") from error


def _agent(request: web.Request) -> str:
    return request.headers.get("User-Agent", "unknown").partition("/")[0]


def _faulty(fault: Fault, entry: Object) -> web.Response:
    entry["code"] = fault.code
    headers = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
    status = Failure(fault.code, fault.reason, fault.message).status()
    return web.json_response(status, status=fault.code, headers=headers)
