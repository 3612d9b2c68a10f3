"""Runs a router in the foreground: its port, its admin socket, its signals."""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final

import uvicorn
from aiohttp import web

from millpond.model.errors import ConfigError, SetupError
from millpond.router.admin import admin_app
from millpond.router.app import Router
from millpond.router.attribution import PoolReports
from millpond.router.http_protocol import BoundedHttp
from millpond.router.options import Limits, ServeOptions, Serving
from millpond.router.records import AccessLog
from millpond.router.replicas import Replicas
from millpond.service.socket_path import claim

_log = logging.getLogger(__name__)

_BACKLOG: Final = 2048
_DESCRIPTORS_WANTED: Final = 65_536
_KEEPALIVE_S: Final = 75
"""Clients keep connections for a minute, usually; longer than they do is safe."""


def serve(options: ServeOptions, *, on_ready: Callable[[Serving], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then end streams and return; a second signal cuts them off.

    Must run in the main thread. Raises ``SetupError`` before anything is served.
    """
    with contextlib.ExitStack() as held:
        replicas = Replicas()
        for name, url in options.replicas.items():
            try:
                replicas.add(name, url)
            except ValueError as error:
                raise ConfigError(f"replica {name}: {error}") from None
        place = claim(str(options.admin_socket))
        held.callback(place.release)
        _raise_descriptor_limit()
        public = held.enter_context(listen(options.host, options.port))
        admin = held.enter_context(place.listen())
        pool = None if options.pool_socket is None else PoolReports(options.pool_socket)
        router = Router(replicas, options.router, pool, _open_log(options.access_log))
        asyncio.run(_serve(options, router, (public, admin), on_ready))


async def _serve(
    options: ServeOptions,
    router: Router,
    sockets: tuple[socket.socket, socket.socket],
    on_ready: Callable[[Serving], None] | None,
) -> None:
    public, admin = sockets
    await router.start()
    runner = web.AppRunner(admin_app(router), access_log=None)
    try:
        await runner.setup()
        await web.SockSite(runner, admin).start()
        host, port = public.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        _log.info("router ready url=%s admin=%s", url, options.admin_socket)
        if on_ready is not None:
            on_ready(Serving(url, options.admin_socket))
        server = http_server(router, options.router.limits, stop_grace_s=options.stop_grace_s)
        await _serve_public(server, router, public)
        _log.info("router stopped url=%s", url)
    finally:
        await runner.cleanup()
        await router.stop()


async def _serve_public(server: uvicorn.Server, router: Router, public: socket.socket) -> None:
    def on_signal() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    serving = asyncio.create_task(server.serve(sockets=[public]))
    broken = asyncio.create_task(router.wait_broken())
    try:
        await asyncio.wait({serving, broken}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.should_exit = True
        await serving
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        broken.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await broken


def http_server(router: Router, limits: Limits, *, stop_grace_s: float) -> uvicorn.Server:
    """Return a server for the app; set its ``should_exit`` to end it."""
    return _Server(
        uvicorn.Config(
            router,
            http=type("Http", (BoundedHttp,), {"head_bytes_max": limits.head_bytes_max}),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.CRITICAL,  # the access log and our own lines say it all
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEPALIVE_S,
            timeout_graceful_shutdown=max(1, round(stop_grace_s)),
        )
    )


class _Server(uvicorn.Server):
    """uvicorn's server without its way with signals, which raises them again at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket whose connections send at once; raises ``SetupError``."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise SetupError(
            f"cannot listen at {host}:{port} ({error.strerror or error}): choose another --port"
        ) from error
    # Connections inherit it; asyncio sets it only where the protocol is named. Without it the
    # first event of a stream waits 40 ms for the acknowledgement of the head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _open_log(path: Path | None) -> AccessLog:
    try:
        return AccessLog(path)
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror}") from error


def _raise_descriptor_limit() -> None:
    """Each stream takes two descriptors; the usual soft limit of 1024 is too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = (
        _DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS_WANTED)
    )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
