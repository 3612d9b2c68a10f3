"""A router's command line: all that the system decides is said, and the rest is left to it."""

import sys
from pathlib import Path

from millpond.cli.context import Context
from millpond.cli.router import router, router_settings
from millpond.launch.front import FrontOptions, FrontSpec, front_argv

REPLICAS = {"a": "http://127.0.0.1:1", "b": "http://127.0.0.1:2"}


def spec(**changes: object) -> FrontSpec:
    fields: dict[str, object] = {"policy": "alternate", "admin_socket": Path("/s/r.sock")}
    return FrontSpec(
        options=FrontOptions(**{**fields, **changes}),  # pyright: ignore[reportArgumentType]
        port=9000,
        replicas=REPLICAS,
        pool_socket=Path("/s/p.sock"),
        run_dir=Path("/logs"),
        environ={},
    )


def test_the_command_means_what_the_system_decides() -> None:
    argv = front_argv(spec(host="::", stop_grace_s=2.5))
    assert argv[:4] == (sys.executable, "-m", "millpond.cli", "router")
    flags = router.make_context("router", list(argv[4:]), resilient_parsing=False).params
    given = {name: value for name, value in flags.items() if value not in {None, ()}}
    # What stands in a file or the environment as well is not in effect.
    environ = {"MILLPOND_ROUTER_REPLICAS": "x=http://x:1", "MILLPOND_ROUTER_PORT": "1"}
    environ |= {"MILLPOND_ROUTER_POOL_TOKENS": "77"}
    config = router_settings(Context(environ, argv), given).router()
    assert config.replicas == REPLICAS
    assert (config.policy, config.host, config.port) == ("alternate", "::", 9000)
    assert (config.pool_socket, config.admin_socket) == (Path("/s/p.sock"), Path("/s/r.sock"))
    assert (config.access_log, config.stop_grace_s) == (Path("/logs/router.jsonl"), 2.5)
    assert config.pool_tokens == 77, "what the system does not decide is the router's to read"


def test_an_access_log_may_be_elsewhere() -> None:
    argv = front_argv(spec(access_log=Path("/var/log/requests")))
    assert argv[argv.index("--access-log") + 1] == "/var/log/requests"
