"""Refuses bodies that are too large, before they are in memory."""

from __future__ import annotations

import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, max_body: int) -> None:
        """``max_body``: bytes."""
        self._app, self._max = app, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if its declared size is allowed, and cut it off when it turns out larger."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self._max:
            await self._refuse(send)
            return
        received, refused = 0, False

        async def counted() -> Message:
            nonlocal received, refused
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max:
                refused = True
                raise _TooLarge
            return message

        async def unless_refused(message: Message) -> None:
            if not refused:
                await send(message)

        with contextlib.suppress(_TooLarge):
            await self._app(scope, counted, unless_refused)
        if refused:
            await self._refuse(send)

    async def _refuse(self, send: Send) -> None:
        text = f'{{"error": "The body is larger than {self._max} bytes (server.max_request_mb).", "category": "user"}}'.encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": text})


class _TooLarge(Exception):
    pass
