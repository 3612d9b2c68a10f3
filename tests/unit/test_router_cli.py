"""The command line of the router: what it refuses, and what it makes of its flags."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from millpond.cli import run
from millpond.cli.context import Context
from millpond.cli.exits import Exit
from millpond.cli.router import router, router_settings, serve_options
from millpond.config import ROUTER_IDENTITIES, ROUTER_POLICIES, parse_replica
from millpond.model.errors import ConfigError
from millpond.router import server
from millpond.router.options import Identity, RouterOptions, ServeOptions
from millpond.router.placement.chosen import Policy
from millpond.router.replicas import Address, Replicas, State


def options(*argv: str, environ: dict[str, str] | None = None) -> ServeOptions:
    """Return what a command line means."""
    flags = router.make_context("router", list(argv), resilient_parsing=False).params
    flags["replicas"] = flags["replicas"] or None
    settings = router_settings(Context(environ=environ or {}, argv=()), flags)
    return serve_options(settings.router(), source="somewhere")


A = ("--replica", "a=http://127.0.0.1:8001")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["--replica"]),
        (["--replica", "http://127.0.0.1:1"], ["a=http://127.0.0.1:8001"]),
        (["--replica", "=http://127.0.0.1:1"], ["=http://127.0.0.1:1"]),
        ([*A, *A], ["same name"]),
        ([*A, "--policy", "dice"], ["dice", "round-robin", "cost"]),
        ([*A, "--identity", "hope"], ["hope", "text, tokens, auto"]),
        ([*A, "--port", "70000"], ["router.port", "'70000'", "command line"]),
        ([*A, "--body-max", "much"], ["router.body_max", "'much'", "command line"]),
        ([*A, "--api-key-file", "/no/such"], ["/no/such"]),
        ([*A, "--first-byte-timeout", "0"], ["router.first_byte_timeout_s", "'0'"]),
        ([*A, "drain", "a"], ["options go after"]),
        (["drain"], ["NAME"]),
        (["add", "a"], ["'a'"]),
    ],
)
def test_wrong_usage_ends_with_2_and_names_what_is_wrong(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["router", *argv], {}) == Exit.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    for word in words:
        assert word in captured.err


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://x", "127.0.0.1:8001", "http://", "http://x?y", "http://x:0x", "http://a..b"),
        *("http://x,ipc:///run/a", "http://x,events=", "http://x,events=tcp://*:5557"),
        *("http://x,events=tcp://a", "http://x,replay=ipc:///run/a", "http://x,other=ipc:///run/a"),
    ],
)
def test_bad_addresses_end_with_2(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "some.toml"
    path.write_text(f'[router]\nreplicas = ["b=http://x", "a={url}"]\nport = 0\n')
    argv = ["router", "--admin-socket", str(tmp_path / "a.sock")]
    assert run(["--config", str(path), *argv], {}) == Exit.USAGE
    assert f"router.replicas = 'a={url}' ({path}): " in capsys.readouterr().err


@pytest.mark.parametrize("words", [["replicas"], ["drain", "a"], ["add", "a=http://x"]])
def test_without_a_router_commands_end_with_4_and_name_the_socket(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "none.sock")
    assert run(["router", *words, "--admin-socket", path], {}) == Exit.AWAY
    assert path in capsys.readouterr().err


def test_flags_become_options(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    found = options(
        *A,
        *("--replica", "b=http://[::1]:8002/", "--policy", "pinned", "--port", "0"),
        *("--api-key-file", str(key), "--body-max", "1MiB", "--next-byte-timeout", "7"),
        *("--affinity-header", "x-me", "--access-log", "log"),
        *("--local-tokens", "5", "--pool-tokens", "6", "--identity", "tokens"),
        environ={"MILLPOND_SOCKET": "/run/me/pool.sock"},
    )
    assert found.replicas == {"a": "http://127.0.0.1:8001", "b": "http://[::1]:8002/"}
    assert found.admin_socket == Path("/run/me/router.sock")
    assert found.pool_socket == Path("/run/me/pool.sock")
    assert found.access_log == Path("log")
    assert found.router.policy is Policy.PINNED
    assert found.router.identity is Identity.TOKENS
    assert found.router.api_key == "secret"
    assert found.router.affinity.header == "x-me"
    assert found.router.limits.body_bytes_max == 2**20
    assert found.router.limits.next_byte_s == 7
    assert (found.router.local_tokens, found.router.pool_tokens) == (5, 6)


def test_defaults_are_those_of_the_router_itself() -> None:
    found = options(*A, environ={"MILLPOND_SOCKET": "/run/me/pool.sock"})
    assert found == ServeOptions(
        host="127.0.0.1",
        port=8000,
        replicas={"a": "http://127.0.0.1:8001"},
        admin_socket=Path("/run/me/router.sock"),
        pool_socket=Path("/run/me/pool.sock"),
    )
    assert found.router == RouterOptions()
    assert tuple(Policy) == ROUTER_POLICIES
    assert tuple(Identity) == ROUTER_IDENTITIES


def test_what_is_in_effect_is_printed_with_its_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[ServeOptions] = []

    def serve(options: ServeOptions, *, on_ready: object) -> None:
        served.append(options)

    monkeypatch.setattr(server, "serve", serve)
    (tmp_path / "key").write_text("secret")
    path = tmp_path / "some.toml"
    path.write_text(
        '[router]\nreplicas = ["a=http://127.0.0.1:8001", "b=http://127.0.0.1:8002"]\n'
        f'policy = "pinned"\nport = 9000\nbody_max = "1MiB"\napi_key_file = "{tmp_path}/key"\n'
    )
    environ = {"MILLPOND_ROUTER_PORT": "9001", "MILLPOND_ROUTER_NEXT_BYTE_TIMEOUT_S": "7"}
    argv = ["--config", str(path), "router", "--next-byte-timeout", "8", "--pool-socket", "/p"]
    assert run(argv, environ) == Exit.OK

    (found,) = served
    assert (found.router.policy, found.port) == (Policy.PINNED, 9001)
    assert found.router.limits.next_byte_s == 8
    captured = capsys.readouterr()
    printed = " ".join(captured.err.split())
    for words in (
        "router by pinned at 127.0.0.1:9001",
        "pool at /p, access log off, key that in",
        "next within 8 s, bodies of at most 1MiB",
        "replica b at http://127.0.0.1:8002",
        f"router.policy from {path}",
        "router.port from MILLPOND_ROUTER_PORT",
        "router.next_byte_timeout_s from command line",
    ):
        assert words in printed
    assert "secret" not in printed


def test_replicas_of_the_command_line_replace_those_of_the_environment() -> None:
    environ = {"MILLPOND_ROUTER_REPLICAS": "b=http://127.0.0.1:1, c=http://127.0.0.1:2"}
    assert list(options(environ=environ).replicas) == ["b", "c"]
    assert list(options(*A, environ=environ).replicas) == ["a"]


def test_a_replica_of_the_environment_may_publish_events() -> None:
    one, other = "b=http://127.0.0.1:1,events=ipc:///e,replay=ipc:///r", "c=http://127.0.0.1:2"
    found = options(environ={"MILLPOND_ROUTER_REPLICAS": f"{one}, {other}"}).replicas
    assert found == {"b": one.removeprefix("b="), "c": other.removeprefix("c=")}
    replicas = Replicas()
    assert replicas.add("b", found["b"]).address == Address(
        "http://127.0.0.1:1", "ipc:///e", "ipc:///r"
    )
    assert replicas.add("c", found["c"]).address == Address("http://127.0.0.1:2")
    replicas.drain("c")
    moved = replicas.add("c", f"{found['c']},events=tcp://127.0.0.1:5557")
    assert moved.address.events == "tcp://127.0.0.1:5557"


def test_commands_find_the_router_where_it_is_configured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"MILLPOND_ROUTER_ADMIN_SOCKET": str(tmp_path / "configured.sock")}
    assert run(["router", "replicas"], environ) == Exit.AWAY
    assert environ["MILLPOND_ROUTER_ADMIN_SOCKET"] in capsys.readouterr().err


def test_an_empty_key_is_no_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("\n")
    with pytest.raises(ConfigError, match="no key"):
        options(*A, "--api-key-file", str(tmp_path / "key"))


def test_a_replica_is_a_name_and_an_address() -> None:
    assert parse_replica("a=http://x/?a=b") == ("a", "http://x/?a=b")


# ---------------------------------------------------------------- who is there


def names_available(replicas: Replicas) -> list[str]:
    return [load.name for load in replicas.loads() if load.is_available]


def test_a_replica_gets_requests_once_it_is_ready_and_until_it_is_drained() -> None:
    replicas = Replicas()
    for name in "ab":
        replicas.add(name, f"http://{name}:1/")
    assert names_available(replicas) == []
    for each in replicas:
        each.state = State.READY
    assert names_available(replicas) == ["a", "b"]
    assert [x.name for x in replicas.loads(without=["a"]) if x.is_available] == ["b"]
    replicas.drain("a")
    assert names_available(replicas) == ["b"]
    replicas.add("a", "http://a:1")
    assert names_available(replicas) == ["a", "b"]
    with pytest.raises(ValueError, match="there already"):
        replicas.add("a", "http://elsewhere:1")
    with pytest.raises(ValueError, match="'z'"):
        replicas.drain("z")


def test_a_drained_replica_moves_to_another_address_once_it_is_idle() -> None:
    replicas = Replicas()
    replicas.add("a", "http://a:1").num_running = 1
    replicas.drain("a")
    with pytest.raises(ValueError, match="1 requests"):
        replicas.add("a", "http://b:1")
    replicas["a"].num_running = 0
    assert replicas.add("a", "http://b:1").state is State.STARTING
    assert [each.url for each in replicas] == ["http://b:1"]


def test_an_address_with_a_password_is_refused_and_not_shown() -> None:
    for url in ("http://user:secret@a:1", "http://user@a:1"):
        with pytest.raises(ValueError, match="no user or password") as caught:
            Replicas().add("a", url)
        assert "secret" not in str(caught.value)


def test_replicas_are_shown_with_what_is_known_of_their_caches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = Replicas()
    for name in "ab":
        known.add(name, f"http://{name}:1,events=ipc:///run/{name}")
    known["a"].is_cache_known = True
    known.drain("b")

    @contextmanager
    def client(_: Path) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(replicas=lambda: [each.statistics() for each in known])

    monkeypatch.setattr("millpond.cli.router.RouterClient", client)
    assert run(["router", "replicas"], {}) == Exit.OK
    printed = " ".join(capsys.readouterr().out.split())
    assert "starting, cache known" in printed
    assert "starting, draining" in printed
    assert "ipc://" not in printed
