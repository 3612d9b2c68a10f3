"""Changing a running router: a small HTTP interface at a Unix socket that only its user opens."""

from __future__ import annotations

import msgspec
from aiohttp import web

from millpond.router.app import Router


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class _Placed(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    url: str


def admin_app(router: Router) -> web.Application:
    """Return the interface: ``GET /replicas``, ``POST /drain``, ``POST /add``.

    A request that makes no sense is answered 400 and ``{"error": ...}``.
    """

    async def show(_request: web.Request) -> web.Response:
        return _json({"replicas": [each.statistics() for each in router.replicas]})

    async def drain(request: web.Request) -> web.Response:
        try:
            asked = msgspec.json.decode(await request.read(), type=_Named)
            return _json(router.replicas.drain(asked.name).statistics())
        except (ValueError, msgspec.DecodeError) as error:
            return _json({"error": str(error)}, status=400)

    async def add(request: web.Request) -> web.Response:
        try:
            asked = msgspec.json.decode(await request.read(), type=_Placed)
            return _json(router.add(asked.name, asked.url).statistics())
        except (ValueError, msgspec.DecodeError) as error:
            return _json({"error": str(error)}, status=400)

    app = web.Application()
    app.add_routes([web.get("/replicas", show), web.post("/drain", drain), web.post("/add", add)])
    return app


def _json(document: object, *, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(document), status=status, content_type="application/json"
    )
