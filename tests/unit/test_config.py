"""File below environment below flags; nothing unknown, nothing unparsable gets through."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from millpond.config import (
    ConnectorConfig,
    PoolConfig,
    RouterConfig,
    Settings,
    connector_config,
    default_socket_path,
    find_config_file,
    format_size,
    load_settings,
    parse_size,
)
from millpond.model.errors import ConfigError
from millpond.model.limits import GIB, MIB
from millpond.model.names import Admission, Eviction
from millpond.model.retention import Retention

UP = {"up.model": "m", "pool.size": "16MiB"}


def settings(
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    config_file: Path | None = None,
) -> Settings:
    return load_settings(environ or {}, config_file=config_file, flags=flags or {})


def config_file(folder: Path, text: str) -> Path:
    path = folder / "millpond.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("256MiB", 256 * MIB),
        ("1.5GiB", 3 * GIB // 2),
        (" 2 GiB ", 2 * GIB),
        ("1TiB", 1024 * GIB),
        ("4096", 4096),
        ("4096B", 4096),
        (4096, 4096),
    ],
)
def test_sizes_are_read(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "MiB", "256MB", "256M", "-1GiB", "1e9", "0.3B", True, 1.5, None]
)
def test_other_sizes_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"size|bytes"):
        parse_size(text)


@pytest.mark.parametrize("size", [0, 1, 4096, 256 * MIB, 3 * GIB // 2, 1024 * GIB])
def test_formatted_sizes_are_read_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_flags_stand_above_the_environment_and_that_above_the_file(tmp_path: Path) -> None:
    path = config_file(tmp_path, 'socket = "/f"\n[pool]\nsize = "16MiB"\nextent = "4MiB"\n')
    environ = {"MILLPOND_SOCKET": "/e", "MILLPOND_POOL_SIZE": "32MiB"}

    assert settings({}, {}, path).pool() == PoolConfig(Path("/f"), 16 * MIB, 4 * MIB)
    assert settings(environ, {}, path).pool() == PoolConfig(Path("/e"), 32 * MIB, 4 * MIB)
    both = settings(environ, {"socket": "/c", "pool.size": None}, path)
    assert both.pool() == PoolConfig(Path("/c"), 32 * MIB, 4 * MIB)
    assert both.sources() == {
        "pool.extent": str(path),
        "pool.size": "MILLPOND_POOL_SIZE",
        "socket": "command line",
    }


def test_what_the_pool_keeps_is_read_from_all_sources(tmp_path: Path) -> None:
    path = config_file(tmp_path, '[pool]\nsize = "16MiB"\neviction = "arc"\nstate_ratio = 0.25\n')
    environ = {"MILLPOND_POOL_ADMISSION": "second-touch"}
    assert settings({}, {"pool.size": "16MiB"}).pool().retention == Retention()
    assert settings(environ, {"pool.state_ratio": "1"}, path).pool().retention == Retention(
        Eviction.ARC, Admission.SECOND_TOUCH, state_ratio=1
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("sokcet = 1", "'sokcet'"),
        ("[pool]\nsiez = 1", "'pool.siez'"),
        ("[lake]\nsize = 1", "'lake.size'"),
        ("pool = 3", "'pool'"),
        ("[router]\nreplica = 1", "'router.replica'"),
    ],
)
def test_unknown_keys_of_the_file_are_refused_by_name(
    tmp_path: Path, text: str, named: str
) -> None:
    path = config_file(tmp_path, text)
    with pytest.raises(ConfigError, match=named) as caught:
        settings(config_file=path)
    assert str(path) in str(caught.value)
    assert "pool.size" in str(caught.value), "it says which keys are known"


def test_unknown_variables_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"MILLPOND_POOL_SIEZ.*MILLPOND_POOL_SIZE"):
        settings({"MILLPOND_POOL_SIEZ": "1GiB"})


def test_variables_of_others_are_left_alone() -> None:
    settings({"MILLPOND_PYTHON": "python3", "MILLPOND_CONFIG": "/x", "PATH": "/bin"})


@pytest.mark.parametrize(
    ("environ", "flags", "words"),
    [
        ({"MILLPOND_POOL_SIZE": "big"}, {}, ["pool.size", "'big'", "MILLPOND_POOL_SIZE"]),
        ({}, {"pool.size": "1KiB"}, ["pool.size", "'1KiB'", "command line", "16MiB"]),
        ({}, {}, ["pool.size", "--size", "MILLPOND_POOL_SIZE", "millpond.toml"]),
    ],
)
def test_a_bad_value_is_named_with_its_key_and_source(
    environ: Mapping[str, str], flags: Mapping[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(environ, flags).pool()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("up.replicas", "0"),
        ("up.replicas", "65"),
        ("up.replicas", True),
        ("up.replicas", "two"),
        ("up.device", "tpu"),
        ("up.port", "70000"),
        ("up.router", "perhaps"),
        ("up.start_timeout_s", "soon"),
        ("up.start_timeout_s", "nan"),
        ("up.stop_grace_s", "-1"),
        ("up.model", ""),
        ("pool.eviction", "fifo"),
        ("pool.admission", "never"),
        ("pool.state_ratio", "0"),
        ("pool.state_ratio", "1.1"),
    ],
)
def test_values_out_of_range_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        settings({}, UP | {key: value}).up()


def test_up_has_defaults_for_all_but_model_and_pool() -> None:
    config = settings({}, UP).up()
    assert (config.num_replicas, config.device, config.replica_port) == (2, "auto", None)
    assert config.router is not None
    assert (config.router.policy, config.router.port, config.router.replicas) == ("cost", 8000, {})


def test_the_router_gets_the_first_port_of_up_and_replicas_those_behind_it() -> None:
    def ports(**changes: object) -> tuple[int | None, int | None]:
        found = settings({}, {**UP, **{key.replace("_", "."): v for key, v in changes.items()}})
        config = found.up()
        return None if config.router is None else config.router.port, config.replica_port

    assert ports(up_port="9000") == (9000, 9001)
    assert ports(router_port="0") == (0, None)
    assert ports(up_port="9000", router_port="7000") == (9000, 9001), "up's own word"
    assert ports(up_port="9000", up_router="no") == (None, 9000)


def test_up_takes_the_settings_of_the_router_that_make_sense_there(tmp_path: Path) -> None:
    path = config_file(
        tmp_path,
        "[router]\npolicy = 'pinned'\naccess_log = '/log'\napi_key_file = '/k'\nhost = '::'\n",
    )
    router = settings({}, {**UP, "up.stop_grace_s": "3"}, path).up().router
    assert router is not None
    assert (router.policy, router.host) == ("pinned", "::")
    assert (router.access_log, router.api_key_file) == (Path("/log"), Path("/k"))
    assert router.stop_grace_s == 3, "that of the system, unless it has one of its own"
    router = settings({}, {**UP, "up.stop_grace_s": "3", "router.stop_grace_s": "9"}).up().router
    assert router is not None
    assert router.stop_grace_s == 9


@pytest.mark.parametrize("key", ["router.replicas", "router.pool_socket"])
def test_up_refuses_what_contradicts_the_system_that_it_starts(key: str) -> None:
    written = {"MILLPOND_" + key.replace(".", "_").upper(): "a=http://x:1"}
    with pytest.raises(ConfigError, match=rf"{key} \(MILLPOND_ROUTER_.*--no-router"):
        settings(written, UP).up()
    assert settings(written, {**UP, "up.router": False}).up().router is None
    assert settings({**written, "MILLPOND_UP_ROUTER": "off"}, UP).up().router is None


def test_a_router_is_read_from_all_sources(tmp_path: Path) -> None:
    path = config_file(
        tmp_path,
        'socket = "/s/pool.sock"\n[router]\nreplicas = ["a=http://x:1", "b=http://y:2"]\n'
        'policy = "pinned"\nhost = "::"\nport = 9000\naccess_log = "~/log"\n'
        'api_key_file = "/k"\naffinity_header = "x-me"\nlocal_tokens = 5\n'
        "first_byte_timeout_s = 30\nstop_grace_s = 0\n",
    )
    environ = {
        "MILLPOND_ROUTER_PORT": "0",
        "MILLPOND_ROUTER_POOL_SOCKET": "/p/pool.sock",
        "MILLPOND_ROUTER_AFFINITY_COOKIE": "me",
        "MILLPOND_ROUTER_NEXT_BYTE_TIMEOUT_S": "2.5",
        "MILLPOND_ROUTER_BODY_MAX": "1MiB",
        "MILLPOND_ROUTER_POOL_TOKENS": "6",
        "MILLPOND_ROUTER_IDENTITY": "tokens",
    }
    found = settings(environ, {"router.policy": "cost"}, path).router()
    assert found == RouterConfig(
        replicas={"a": "http://x:1", "b": "http://y:2"},
        policy="cost",
        identity="tokens",
        host="::",
        port=0,
        pool_socket=Path("/p/pool.sock"),
        admin_socket=Path("/s/router.sock"),
        access_log=Path("~/log").expanduser(),
        api_key_file=Path("/k"),
        affinity_header="x-me",
        affinity_cookie="me",
        local_tokens=5,
        pool_tokens=6,
        first_byte_timeout_s=30,
        next_byte_timeout_s=2.5,
        body_bytes_max=MIB,
        stop_grace_s=0,
    )


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ("a=http://x", {"a": "http://x"}),
        ("a=http://x, b=http://y/?a=b", {"a": "http://x", "b": "http://y/?a=b"}),
        (["a,b=http://x"], {"a,b": "http://x"}),
        (("b=http://y", "a=http://x"), {"b": "http://y", "a": "http://x"}),
    ],
)
def test_replicas_are_a_list_or_a_text(written: object, named: Mapping[str, str]) -> None:
    found = settings({}, {"router.replicas": written}).router().replicas
    assert list(found.items()) == list(named.items())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("router.replicas", ""),
        ("router.replicas", []),
        ("router.replicas", 3),
        ("router.replicas", {"a": "http://x"}),
        ("router.replicas", "http://x"),
        ("router.replicas", "a="),
        ("router.replicas", " =http://x"),
        ("router.replicas", "a=http://x,"),
        ("router.replicas", ["a=http://x", "a=http://y"]),
        ("router.replicas", ["x" * 200 + "=http://x"]),
        ("router.policy", "dice"),
        ("router.host", ""),
        ("router.port", "-1"),
        ("router.port", "65536"),
        ("router.access_log", ""),
        ("router.first_byte_timeout_s", "0"),
        ("router.next_byte_timeout_s", "soon"),
        ("router.body_max", "64MB"),
        ("router.local_tokens", "0"),
        ("router.pool_tokens", 1.5),
        ("router.stop_grace_s", "nan"),
    ],
)
def test_values_that_a_router_cannot_have_are_refused_by_key_value_and_source(
    key: str, value: object
) -> None:
    flags = {"router.replicas": "a=http://x"} | {key: value}
    with pytest.raises(ConfigError) as caught:
        settings({}, flags).router()
    assert str(caught.value).startswith(f"{key} = {value!r} (command line): ")


def test_a_router_has_replicas() -> None:
    with pytest.raises(ConfigError, match=r"router\.replicas is not set.*MILLPOND_ROUTER_REPLICAS"):
        settings().router()


def test_a_file_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not TOML"):
        settings(config_file=config_file(tmp_path, "size: 3"))


def test_a_file_that_was_named_must_exist(tmp_path: Path) -> None:
    given = find_config_file({}, given=tmp_path / "no.toml", folder=None)
    with pytest.raises(ConfigError, match=r"no\.toml"):
        settings(config_file=given)


def test_the_file_is_the_one_given_else_the_variables_else_the_folders(tmp_path: Path) -> None:
    own = config_file(tmp_path, "")
    environ = {"MILLPOND_CONFIG": "/variable"}
    assert find_config_file(environ, given=Path("/given"), folder=tmp_path) == Path("/given")
    assert find_config_file(environ, given=None, folder=tmp_path) == Path("/variable")
    assert find_config_file({}, given=None, folder=tmp_path) == own
    own.unlink()
    assert find_config_file({}, given=None, folder=tmp_path) is None


def test_the_default_socket_is_in_a_folder_of_the_user() -> None:
    login = default_socket_path({"XDG_RUNTIME_DIR": "/run/user/7"})
    assert login == Path("/run/user/7/millpond/pool.sock")
    for environ in ({}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "relative"}):
        path = default_socket_path(environ)
        assert path.parent.parent == Path("/tmp")
        assert path.name == "pool.sock"
    assert settings({"XDG_RUNTIME_DIR": "/r"}).socket() == Path("/r/millpond/pool.sock")


def test_a_connector_takes_its_extra_config_above_all() -> None:
    environ = {"MILLPOND_SOCKET": "/e", "MILLPOND_CONNECTOR_STORE": "false"}
    extra = {"replica": "a", "socket": "/x", "load": False}
    assert connector_config(extra, environ) == ConnectorConfig(
        socket=Path("/x"),
        replica="a",
        store=False,
        load=False,
        copy_delay_s=0.0,
        pending_wait_s=60.0,
        check_ratio=0.0,
        early_loads=True,
    )
    assert connector_config({}, {"XDG_RUNTIME_DIR": "/r"}) == ConnectorConfig(
        socket=Path("/r/millpond/pool.sock"),
        replica=None,
        store=True,
        load=True,
        copy_delay_s=0.0,
        pending_wait_s=60.0,
        check_ratio=0.0,
        early_loads=True,
    )


def test_a_connector_reads_a_file_only_if_the_environment_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config_file(tmp_path, "[connector]\nstore = false\n")
    monkeypatch.chdir(tmp_path)
    assert connector_config({}, {}).store
    assert not connector_config({}, {"MILLPOND_CONFIG": str(path)}).store


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"replcia": "a"}, ["'replcia'", "kv_connector_extra_config", "replica"]),
        ({"pool.size": "1GiB"}, ["'pool.size'"]),
        ({"store": "maybe"}, ["connector.store", "'maybe'", "kv_connector_extra_config"]),
        ({"replica": "x" * 200}, ["connector.replica"]),
        ({"copy_delay_s": -1}, ["connector.copy_delay_s"]),
        ({"check_ratio": 1.5}, ["connector.check_ratio", "from 0 to 1"]),
        ({"early_loads": 7}, ["connector.early_loads"]),
    ],
)
def test_a_connector_refuses_bad_extra_config(
    extra: Mapping[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        connector_config(extra, {})
    for word in words:
        assert word in str(caught.value)
