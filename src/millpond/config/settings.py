"""Configuration: a TOML file, below ``MILLPOND_*`` variables, below flags.

Nothing here looks at the process: the environment, the working folder and the flags come in
as arguments, and frozen values go out. An option that nobody set has its default; a key that
does not exist and a value that cannot be parsed are ``ConfigError``.

    key in millpond.toml     variable                     flag
    socket                   MILLPOND_SOCKET              --socket
    pool.size                MILLPOND_POOL_SIZE           --size, --pool
    connector.store          MILLPOND_CONNECTOR_STORE     (kv_connector_extra_config: store)
    router.policy            MILLPOND_ROUTER_POLICY       --policy
"""

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar, cast

from millpond.config import values
from millpond.config.processes import ConnectorConfig, PoolConfig, RouterConfig, UpConfig
from millpond.model.errors import ConfigError
from millpond.model.limits import MIB
from millpond.model.names import Admission, Eviction
from millpond.model.retention import DEFAULT_RETENTION, STATE_RATIO_MIN, Retention

CONFIG_FILE: Final = "millpond.toml"
CONFIG_VARIABLE: Final = "MILLPOND_CONFIG"
REPLICAS_MAX: Final = 64
ROUTER_POLICIES: Final = (
    "round-robin",
    "alternate",
    "pinned",
    "least-loaded",
    "prefix-affinity",
    "cost",
)
"""The names of `router.placement`'s policies, which no room below the router can see."""
ROUTER_IDENTITIES: Final = ("text", "tokens", "auto")
"""What the router may know prefixes by: `router.options.Identity`."""
ROUTER_SOCKET: Final = "router.sock"

_TOKENS_MAX: Final = 10**12
_PREFIX: Final = "MILLPOND_"
_NOT_OPTIONS: Final = frozenset({CONFIG_VARIABLE, "MILLPOND_PYTHON"})
"""Variables that share the prefix and are no options: scripts/setup reads the second."""

T = TypeVar("T")


# ---------------------------------------------------------------- options


class _Option(NamedTuple, Generic[T]):
    """One key of the file. ``default`` None means that it has to be set, or may stay unset."""

    key: str
    parse: Callable[[object], T]
    default: T | None = None

    @property
    def variable(self) -> str:
        return _PREFIX + self.key.replace(".", "_").upper()


_SOCKET: Final = _Option("socket", values.path)
_POOL_SIZE: Final = _Option("pool.size", values.pool_size)
_POOL_EXTENT: Final = _Option("pool.extent", values.parse_size)
_POOL_EVICTION: Final = _Option(
    "pool.eviction", values.choice(*Eviction), DEFAULT_RETENTION.eviction.value
)
_POOL_ADMISSION: Final = _Option(
    "pool.admission", values.choice(*Admission), DEFAULT_RETENTION.admission.value
)
_POOL_STATE_RATIO: Final = _Option(
    "pool.state_ratio", values.ratio(STATE_RATIO_MIN), DEFAULT_RETENTION.state_ratio
)
_UP_MODEL: Final = _Option("up.model", values.text)
_UP_REPLICAS: Final = _Option("up.replicas", values.integer(1, REPLICAS_MAX), 2)
_UP_DEVICE: Final = _Option("up.device", values.choice("auto", "cpu", "cuda"), "auto")
_UP_PORT: Final = _Option("up.port", values.integer(1, 65_535))
_UP_ROUTER: Final = _Option("up.router", values.boolean, default=True)
_UP_RUN_DIR: Final = _Option("up.run_dir", values.path)
_UP_START_TIMEOUT: Final = _Option("up.start_timeout_s", values.seconds(1, 86_400), 600.0)
_UP_STOP_GRACE: Final = _Option("up.stop_grace_s", values.seconds(0, 600), 10.0)
_ROUTER_REPLICAS: Final = _Option("router.replicas", values.replicas)
_ROUTER_POLICY: Final = _Option("router.policy", values.choice(*ROUTER_POLICIES), "cost")
_ROUTER_IDENTITY: Final = _Option("router.identity", values.choice(*ROUTER_IDENTITIES), "auto")
_ROUTER_HOST: Final = _Option("router.host", values.text, "127.0.0.1")
_ROUTER_PORT: Final = _Option("router.port", values.integer(0, 65_535), 8000)
_ROUTER_POOL_SOCKET: Final = _Option("router.pool_socket", values.path)
_ROUTER_ADMIN_SOCKET: Final = _Option("router.admin_socket", values.path)
_ROUTER_ACCESS_LOG: Final = _Option("router.access_log", values.path)
_ROUTER_API_KEY_FILE: Final = _Option("router.api_key_file", values.path)
_ROUTER_AFFINITY_HEADER: Final = _Option("router.affinity_header", values.text, "x-session-id")
_ROUTER_AFFINITY_COOKIE: Final = _Option("router.affinity_cookie", values.text, "session_id")
_ROUTER_LOCAL_TOKENS: Final = _Option(
    "router.local_tokens", values.integer(1, _TOKENS_MAX), 1_000_000
)
_ROUTER_POOL_TOKENS: Final = _Option(
    "router.pool_tokens", values.integer(1, _TOKENS_MAX), 16_000_000
)
_ROUTER_FIRST_BYTE: Final = _Option(
    "router.first_byte_timeout_s", values.seconds(0.1, 86_400), 600.0
)
_ROUTER_NEXT_BYTE: Final = _Option("router.next_byte_timeout_s", values.seconds(0.1, 86_400), 300.0)
_ROUTER_BODY_MAX: Final = _Option("router.body_max", values.parse_size, 64 * MIB)
_ROUTER_STOP_GRACE: Final = _Option("router.stop_grace_s", values.seconds(0, 600), 10.0)
_CONNECTOR_REPLICA: Final = _Option("connector.replica", values.name)
_CONNECTOR_STORE: Final = _Option("connector.store", values.boolean, default=True)
_CONNECTOR_LOAD: Final = _Option("connector.load", values.boolean, default=True)
_CONNECTOR_COPY_DELAY: Final = _Option("connector.copy_delay_s", values.seconds(0, 60), 0.0)
_CONNECTOR_PENDING_WAIT: Final = _Option("connector.pending_wait_s", values.seconds(0, 600), 60.0)
_CONNECTOR_CHECK_RATIO: Final = _Option("connector.check_ratio", values.ratio(0), 0.0)
_CONNECTOR_EARLY_LOADS: Final = _Option("connector.early_loads", values.boolean, default=True)

_ALL_OPTIONS: Final[tuple[_Option[object], ...]] = cast(
    "tuple[_Option[object], ...]",
    (
        _SOCKET,
        _POOL_SIZE,
        _POOL_EXTENT,
        _POOL_EVICTION,
        _POOL_ADMISSION,
        _POOL_STATE_RATIO,
        _UP_MODEL,
        _UP_REPLICAS,
        _UP_DEVICE,
        _UP_PORT,
        _UP_ROUTER,
        _UP_RUN_DIR,
        _UP_START_TIMEOUT,
        _UP_STOP_GRACE,
        _ROUTER_REPLICAS,
        _ROUTER_POLICY,
        _ROUTER_IDENTITY,
        _ROUTER_HOST,
        _ROUTER_PORT,
        _ROUTER_POOL_SOCKET,
        _ROUTER_ADMIN_SOCKET,
        _ROUTER_ACCESS_LOG,
        _ROUTER_API_KEY_FILE,
        _ROUTER_AFFINITY_HEADER,
        _ROUTER_AFFINITY_COOKIE,
        _ROUTER_LOCAL_TOKENS,
        _ROUTER_POOL_TOKENS,
        _ROUTER_FIRST_BYTE,
        _ROUTER_NEXT_BYTE,
        _ROUTER_BODY_MAX,
        _ROUTER_STOP_GRACE,
        _CONNECTOR_REPLICA,
        _CONNECTOR_STORE,
        _CONNECTOR_LOAD,
        _CONNECTOR_COPY_DELAY,
        _CONNECTOR_PENDING_WAIT,
        _CONNECTOR_CHECK_RATIO,
        _CONNECTOR_EARLY_LOADS,
    ),
)
_OPTIONS: Final = {option.key: option for option in _ALL_OPTIONS}
_VARIABLES: Final = {option.variable: option.key for option in _ALL_OPTIONS}


class Setting(NamedTuple):
    """A value as it was written, and where: a file, a variable or a flag by name."""

    value: object
    source: str


class Settings:
    """What was set, from all sources, by key; the highest source has won."""

    def __init__(self, environ: Mapping[str, str], chosen: Mapping[str, Setting]) -> None:
        self._environ = environ
        self._chosen = chosen

    def pool(self) -> PoolConfig:
        """Return the daemon's configuration; raises ``ConfigError``, also where size is unset."""
        return self._pool("--size")

    def up(self) -> UpConfig:
        """Return the configuration of a whole system; raises ``ConfigError``."""
        router = self._router_of_up() if self._required(_UP_ROUTER, "--no-router") else None
        port = self._get(_UP_PORT)
        return UpConfig(
            model=self._required(_UP_MODEL, "--model"),
            num_replicas=self._required(_UP_REPLICAS, "--replicas"),
            device=self._required(_UP_DEVICE, "--device"),
            replica_port=port if port is None or router is None else port + 1,
            run_dir=self._get(_UP_RUN_DIR),
            start_timeout_s=self._required(_UP_START_TIMEOUT, "--start-timeout"),
            stop_grace_s=self._required(_UP_STOP_GRACE, "--stop-grace"),
            pool=self._pool("--pool"),
            router=router,
        )

    def _router_of_up(self) -> RouterConfig:
        """Return a router's configuration without replicas; the first port of ``up`` is its."""
        for option in (_ROUTER_REPLICAS, _ROUTER_POOL_SOCKET):
            if option.key in self._chosen:
                raise ConfigError(
                    f"{option.key} ({self._chosen[option.key].source}) is not for `millpond up`, "
                    "whose router serves the replicas and the pool that it starts: take it away, "
                    "or give --no-router"
                )
        router = self._router({})
        port = self._get(_UP_PORT)
        stop_grace = _ROUTER_STOP_GRACE if self.is_set(_ROUTER_STOP_GRACE.key) else _UP_STOP_GRACE
        return replace(
            router,
            port=router.port if port is None else port,
            stop_grace_s=self._required(stop_grace, "--stop-grace"),
        )

    def _pool(self, size_flag: str) -> PoolConfig:
        return PoolConfig(
            socket=self.socket(),
            size_bytes=self._required(_POOL_SIZE, size_flag),
            extent_bytes=self._get(_POOL_EXTENT),
            retention=Retention(
                eviction=Eviction(self._required(_POOL_EVICTION, "--eviction")),
                admission=Admission(self._required(_POOL_ADMISSION, "--admission")),
                state_ratio=self._required(_POOL_STATE_RATIO, "--state-ratio"),
            ),
        )

    def connector(self) -> ConnectorConfig:
        """Return a connector's configuration; raises ``ConfigError``."""
        return ConnectorConfig(
            socket=self.socket(),
            replica=self._get(_CONNECTOR_REPLICA),
            store=self._required(_CONNECTOR_STORE, "store"),
            load=self._required(_CONNECTOR_LOAD, "load"),
            copy_delay_s=self._required(_CONNECTOR_COPY_DELAY, "copy_delay_s"),
            pending_wait_s=self._required(_CONNECTOR_PENDING_WAIT, "pending_wait_s"),
            check_ratio=self._required(_CONNECTOR_CHECK_RATIO, "check_ratio"),
            early_loads=self._required(_CONNECTOR_EARLY_LOADS, "early_loads"),
        )

    def router(self) -> RouterConfig:
        """Return a router's configuration; raises ``ConfigError``, also without replicas."""
        return self._router(self._required(_ROUTER_REPLICAS, "--replica"))

    def _router(self, replicas: Mapping[str, str]) -> RouterConfig:
        pool_socket = self._get(_ROUTER_POOL_SOCKET)
        return RouterConfig(
            replicas=replicas,
            policy=self._required(_ROUTER_POLICY, "--policy"),
            identity=self._required(_ROUTER_IDENTITY, "--identity"),
            host=self._required(_ROUTER_HOST, "--host"),
            port=self._required(_ROUTER_PORT, "--port"),
            pool_socket=self.socket() if pool_socket is None else pool_socket,
            admin_socket=self.admin_socket(),
            access_log=self._get(_ROUTER_ACCESS_LOG),
            api_key_file=self._get(_ROUTER_API_KEY_FILE),
            affinity_header=self._required(_ROUTER_AFFINITY_HEADER, "--affinity-header"),
            affinity_cookie=self._required(_ROUTER_AFFINITY_COOKIE, "--affinity-cookie"),
            local_tokens=self._required(_ROUTER_LOCAL_TOKENS, "--local-tokens"),
            pool_tokens=self._required(_ROUTER_POOL_TOKENS, "--pool-tokens"),
            first_byte_timeout_s=self._required(_ROUTER_FIRST_BYTE, "--first-byte-timeout"),
            next_byte_timeout_s=self._required(_ROUTER_NEXT_BYTE, "--next-byte-timeout"),
            body_bytes_max=self._required(_ROUTER_BODY_MAX, "--body-max"),
            stop_grace_s=self._required(_ROUTER_STOP_GRACE, "--stop-grace"),
        )

    def admin_socket(self) -> Path:
        """Return where a router is changed: by default beside the daemon's socket."""
        path = self._get(_ROUTER_ADMIN_SOCKET)
        return path if path is not None else self.socket().with_name(ROUTER_SOCKET)

    def socket(self) -> Path:
        """Return the daemon's socket; see ``default_socket_path`` for where it is by default."""
        path = self._get(_SOCKET)
        return path if path is not None else default_socket_path(self._environ)

    def is_set(self, key: str) -> bool:
        """Return whether any source sets ``key``."""
        return key in self._chosen

    def sources(self) -> dict[str, str]:
        """Return the source of each key that was set, for a report of what is in effect."""
        return {key: setting.source for key, setting in sorted(self._chosen.items())}

    def _get(self, option: _Option[T]) -> T | None:
        setting = self._chosen.get(option.key)
        if setting is None:
            return option.default
        try:
            return option.parse(setting.value)
        except ValueError as error:
            raise ConfigError(
                f"{option.key} = {setting.value!r} ({setting.source}): {error}"
            ) from None

    def _required(self, option: _Option[T], flag: str) -> T:
        value = self._get(option)
        if value is None:
            raise ConfigError(
                f"{option.key} is not set: give {flag}, set {option.variable}, "
                f"or write it into {CONFIG_FILE}"
            )
        return value


# ---------------------------------------------------------------- sources


def load_settings(
    environ: Mapping[str, str],
    *,
    config_file: Path | None,
    flags: Mapping[str, object],
) -> Settings:
    """Return what file, environment and flags set; raises ``ConfigError``.

    ``config_file`` is what ``find_config_file`` returned. ``flags`` maps keys to values; None
    is a flag that was not given.
    """
    chosen = _from_file_and_environment(config_file, environ)
    for key, value in flags.items():
        if key not in _OPTIONS:
            raise ValueError(f"no option {key!r}")
        if value is not None:
            chosen[key] = Setting(value, "command line")
    return Settings(environ, chosen)


def find_config_file(
    environ: Mapping[str, str], *, given: Path | None, folder: Path | None
) -> Path | None:
    """Return the file that ``--config`` or MILLPOND_CONFIG names, else ``folder``'s, if any."""
    if given is not None:
        return given
    variable = environ.get(CONFIG_VARIABLE)
    if variable:
        return Path(variable).expanduser()
    if folder is not None and (folder / CONFIG_FILE).is_file():
        return folder / CONFIG_FILE
    return None


def connector_config(extra: Mapping[str, object], environ: Mapping[str, str]) -> ConnectorConfig:
    """Return a connector's configuration; raises ``ConfigError``.

    ``extra`` is vLLM's ``kv_connector_extra_config``: ``socket``, and the keys of
    ``[connector]``. It stands above the environment. A file is read only if MILLPOND_CONFIG
    names it: the folder an engine happens to start in decides nothing.
    """
    config_file = find_config_file(environ, given=None, folder=None)
    chosen = _from_file_and_environment(config_file, environ)
    source = "kv_connector_extra_config"
    for name, value in extra.items():
        key = name if name == _SOCKET.key else f"connector.{name}"
        if key not in _OPTIONS:
            raise _unknown_key(name, source, [_SOCKET.key, *_section_keys("connector")])
        chosen[key] = Setting(value, source)
    return Settings(environ, chosen).connector()


def default_socket_path(environ: Mapping[str, str]) -> Path:
    """Return where daemon and clients meet unless told otherwise.

    ``$XDG_RUNTIME_DIR/millpond/pool.sock`` where that variable holds an absolute path, as it
    does in a login session; else ``/tmp/millpond-<uid>/pool.sock``. Both folders belong to
    one user: a pool is shared by processes of the same user only.
    """
    runtime_dir = environ.get("XDG_RUNTIME_DIR", "")
    if runtime_dir.startswith("/"):
        return Path(runtime_dir) / "millpond" / "pool.sock"
    return Path("/tmp") / f"millpond-{os.getuid()}" / "pool.sock"  # noqa: S108 - checked by the daemon


def _from_file_and_environment(
    config_file: Path | None, environ: Mapping[str, str]
) -> dict[str, Setting]:
    from_file = {} if config_file is None else _from_file(config_file)
    return from_file | _from_environment(environ)


def _from_file(path: Path) -> dict[str, Setting]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    chosen: dict[str, Setting] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            table = cast("dict[str, object]", value)
            entries = {f"{name}.{inner}": inner_value for inner, inner_value in table.items()}
        else:
            entries = {name: cast("object", value)}
        for key, entry in entries.items():
            if key not in _OPTIONS:
                raise _unknown_key(key, str(path), list(_OPTIONS))
            chosen[key] = Setting(entry, str(path))
    return chosen


def _from_environment(environ: Mapping[str, str]) -> dict[str, Setting]:
    chosen: dict[str, Setting] = {}
    for name, value in environ.items():
        if not name.startswith(_PREFIX) or name in _NOT_OPTIONS:
            continue
        if name not in _VARIABLES:
            raise _unknown_key(name, "environment", sorted(_VARIABLES))
        chosen[_VARIABLES[name]] = Setting(value, name)
    return chosen


def _section_keys(section: str) -> list[str]:
    return [key.removeprefix(f"{section}.") for key in _OPTIONS if key.startswith(f"{section}.")]


def _unknown_key(key: str, source: str, known: list[str]) -> ConfigError:
    return ConfigError(f"unknown key {key!r} ({source}); known are {', '.join(known)}")
