"""HEAD wherever GET is: the same headers, without the body."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Head:
    """ASGI middleware; what follows it sees a GET. A stream ends once its headers are out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                # HEAD is answered; whatever still writes the body is told that the client has disconnected.
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        # Changed where it lies, for those before this read the route from it.
        scope["method"] = "GET"
        await self._app(scope, receive, send_headers)
