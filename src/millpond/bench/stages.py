"""Where a period takes place: replicas with one cache or the other.

LiveStage       replicas that run anyway; a pool that is switched on and off
RestartStage    a system of its own for each period, started with that period's cache, whichever
LaunchedStage   one system for all periods, with a pool that is switched
"""

import contextlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol, Self

import httpx

from millpond.bench.books import Books
from millpond.bench.client import Target
from millpond.bench.forgetting import Forgets, flush_engine, memory_of
from millpond.bench.records import OFF
from millpond.bench.routing import RouterLog
from millpond.launch.rivals import RIVALS, RivalOptions
from millpond.launch.system import Progress, System, SystemOptions
from millpond.model.errors import ConfigError, SetupError

MILLPOND: Final = "millpond"
LIVE_CACHES: Final = (OFF, MILLPOND)
"""What can be switched while replicas run: the engine's own prefix cache alone, and the pool."""
CACHES: Final = (*LIVE_CACHES, *RIVALS)
"""What can be compared."""

_ANSWER_S_MAX: Final = 60.0


@dataclass(frozen=True, slots=True)
class Scene:
    """One period's replicas. ``targets`` are asked, ``replicas`` flushed, ``books`` read.

    The two differ where a router stands before the replicas, whose ``router_log`` is read if
    there is one; ``books`` is None without a pool.
    ``rival`` is another cache in the pool's place.
    """

    targets: Sequence[Target]
    replicas: Sequence[Target]
    books: Books | None
    rival: Forgets | None = None
    router_log: RouterLog | None = None

    def flush(self) -> None:
        """Have engines and pool, or the other cache, forget every prefix.

        Raises ``ExpectedError`` where one can't be told to, ``httpx.HTTPError`` where an engine
        is away.
        """
        if self.books is not None:
            self.books.wait_written()
        for replica in self.replicas:
            flush_engine(replica.url)
        for cache in (self.books, self.rival):
            if cache is not None:
                cache.flush()


class Stage(Protocol):
    """Makes each period's scene; used as a context around all periods."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def scene(self, cache: str, number: int) -> AbstractContextManager[Scene]:
        """Return period ``number``'s scene, with nothing cached in it."""
        ...


class LiveStage:
    """Replicas that run already. ``socket`` None: there is no pool, so only ``off`` is there."""

    def __init__(
        self,
        replicas: Sequence[Target],
        *,
        socket: Path | None,
        router: Target | None = None,
        access_log: Path | None = None,
    ) -> None:
        self._replicas = tuple(replicas)
        self._targets = self._replicas if router is None else (router,)
        self._socket = socket
        self._router_log = None if access_log is None else RouterLog(access_log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Leave the pool switched on, as it was found."""
        if self._socket is not None:
            with Books(str(self._socket)) as books:
                books.switch(enabled=True)

    @contextlib.contextmanager
    def scene(self, cache: str, number: int) -> Generator[Scene]:  # noqa: ARG002 - a Stage's
        """Switch the pool and flush everything."""
        with contextlib.ExitStack() as stack:
            books = None
            if self._socket is not None:
                books = stack.enter_context(Books(str(self._socket)))
                books.switch(enabled=cache == MILLPOND)
            elif cache != OFF:
                raise ConfigError(f"cache {cache!r} needs a pool: give its --socket")
            scene = Scene(self._targets, self._replicas, books, router_log=self._router_log)
            scene.flush()
            yield scene


class RestartStage:
    """Starts ``options`` anew for each period: with its pool, one of ``rivals``, or neither."""

    def __init__(
        self,
        options: SystemOptions,
        *,
        on_progress: Progress,
        rivals: Mapping[str, RivalOptions] | None = None,
    ) -> None:
        self._options = options
        self._on_progress = on_progress
        self._rivals = rivals or {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None: ...

    @contextlib.contextmanager
    def scene(self, cache: str, number: int) -> Generator[Scene]:
        """Start replicas, and stop them at the end."""
        options = self.options_of(cache, number)
        with System(options, on_progress=self._on_progress) as system, _joined(system) as books:
            targets = targets_of(system)
            rival = None
            if system.rival is not None:
                rival = memory_of(system.rival, [target.url for target in targets])
            yield Scene(targets, targets, books, rival)

    def options_of(self, cache: str, number: int) -> SystemOptions:
        """Return what is started for period ``number``."""
        return replace(
            self._options,
            pool=self._options.pool if cache == MILLPOND else None,
            rival=self._rivals.get(cache),
            run_dir=_log_folder(self._options, f"period-{number:03}"),
        )


class LaunchedStage:
    """Starts ``options`` once, and switches its pool from period to period.

    Where it has a router, that one is asked.
    """

    def __init__(self, options: SystemOptions, *, on_progress: Progress) -> None:
        self._options = options
        self._on_progress = on_progress
        self._stack = contextlib.ExitStack()
        self._live: LiveStage | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            options = replace(self._options, run_dir=_log_folder(self._options, "all-periods"))
            system = stack.enter_context(System(options, on_progress=self._on_progress))
            with _joined(system):
                pass
            socket = None if options.pool is None else options.pool.socket
            router = access_log = None
            if options.front is not None:
                router = Target("router", system.front.url, options.model)
                access_log = system.front.access_log
            live = LiveStage(
                targets_of(system), socket=socket, router=router, access_log=access_log
            )
            self._live = stack.enter_context(live)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def scene(self, cache: str, number: int) -> AbstractContextManager[Scene]:
        """Switch the pool and flush everything."""
        if self._live is None:
            raise ValueError("scene() outside of the stage's context")
        return self._live.scene(cache, number)


def targets_of(system: System) -> tuple[Target, ...]:
    """Return a system's replicas as targets."""
    return tuple(Target(each.name, each.url, each.model) for each in system.replicas)


def live_targets(urls: Mapping[str, str], *, model: str | None) -> tuple[Target, ...]:
    """Return targets for addresses by name; raises ``SetupError`` where none answers.

    Without ``model`` each is asked what it serves.
    """
    return tuple(
        Target(name, url.rstrip("/"), model or served_model(url.rstrip("/")))
        for name, url in urls.items()
    )


def served_model(url: str) -> str:
    """Return the first model that an endpoint serves; raises ``SetupError``."""
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=_ANSWER_S_MAX, trust_env=False)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise SetupError(
            f"{url} does not say which model it serves ({error!r}): check the address, or give "
            "--model"
        ) from error


def _log_folder(options: SystemOptions, name: str) -> Path | None:
    return None if options.run_dir is None else options.run_dir / name


@contextlib.contextmanager
def _joined(system: System) -> Generator[Books | None]:
    if system.options.pool is None:
        yield None
        return
    with Books(str(system.socket)) as books:
        books.wait_joined(replica.name for replica in system.replicas)
        yield books
