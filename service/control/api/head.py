"""HEAD for every GET route: the same headers, without the body."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Head:
    """ASGI middleware; the app sees a GET. A stream ends once its headers are sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                # HEAD is answered; whoever still writes the body sees a disconnected client.
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        # Changed in place: outer middleware reads the route from this scope.
        scope["method"] = "GET"
        await self._app(scope, receive, send_headers)
