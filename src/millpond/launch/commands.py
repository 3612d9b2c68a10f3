"""The commands that start a system, as text: to be read, or run by hand."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millpond.launch.front import FrontSpec, front_argv
from millpond.launch.replica import engine_argv, engine_environ
from millpond.launch.resources import pick_ports
from millpond.launch.system import SystemOptions, pool_argv, replica_specs


@dataclass(frozen=True, slots=True)
class Command:
    """One process. ``environ`` is what it has beyond the environment of its starter."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    cores: tuple[int, ...] | None = None

    @property
    def line(self) -> str:
        """The command for a shell, with its variables before it."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        if self.cores is not None:
            words += ["taskset", "-c", ",".join(map(str, self.cores))]
        return " ".join([*words, shlex.join(self.argv)])


def system_commands(options: SystemOptions, *, environ: Mapping[str, str]) -> tuple[Command, ...]:
    """Return what a ``System`` would start now, on ports that are free now; starts nothing.

    ``environ`` is what the commands will be run in. Without a run folder the router would log
    in the working folder. Raises ``SetupError`` as a system does.
    """

    def command(
        name: str,
        argv: tuple[str, ...],
        own: Mapping[str, str] = options.environ,
        cores: tuple[int, ...] | None = None,
    ) -> Command:
        added = {key: value for key, value in own.items() if environ.get(key) != value}
        return Command(name, argv, added, cores)

    front = options.front
    front_port = None if front is None else pick_ports(1, front.port)[0]
    specs = replica_specs(options, front_port=front_port)
    found = [] if options.pool is None else [command("pool", pool_argv(options.pool))]
    found += [
        command(
            f"replica {spec.name}",
            engine_argv(spec),
            engine_environ(spec, options.environ),
            spec.cores,
        )
        for spec in specs
    ]
    if front is not None and front_port is not None and options.pool is not None:
        whole = FrontSpec(
            options=front,
            port=front_port,
            replicas={spec.name: f"http://127.0.0.1:{spec.port}" for spec in specs},
            pool_socket=options.pool.socket,
            run_dir=options.run_dir or Path(),
            environ=options.environ,
        )
        found.append(command("router", front_argv(whole)))
    return tuple(found)
