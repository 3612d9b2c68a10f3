"""A pool, its replicas and their router as one system: started together, stopped together.

    with System(options) as system:
        print(system.replica("a").url)

All processes are started at once: an engine loads its model while the pool touches its
memory, and finds the pool when both are there; the router looks at the replicas until they
answer. Whatever fails, everything is stopped.
"""

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import ascii_lowercase
from typing import Final, Literal, Self

from millpond.config import PoolConfig
from millpond.launch.front import Front, FrontOptions, FrontSpec, start_front
from millpond.launch.process import GuardedProcess, ProcessSpec
from millpond.launch.replica import Replica, ReplicaSpec, engine_argv, engine_environ
from millpond.launch.resources import pick_ports, share_cores, share_gpus, visible_gpus
from millpond.launch.rivals import LMCACHE, Lmcache, Rival, RivalOptions, make_rival
from millpond.model.errors import ExpectedError, SetupError
from millpond.service.client import AdminClient

_POLL_S: Final = 0.1
_CONNECT_TIMEOUT_S: Final = 1.0
_TAIL_LINES: Final = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemOptions:
    """What to start: a pool and ``num_replicas`` engines, or one of the two alone.

    ``pool`` None starts engines without one; ``rival`` is another cache in its place, to be
    measured. ``front`` puts a router before pool and engines.
    ``engine_args`` go to every replica, before what ``replica_args`` holds under its name.
    ``environ`` is the environment of all processes. ``python`` runs the replicas: another than
    this process's has another vLLM, and Millpond installed beside it. ``port`` is the first
    replica's; None picks free ones. ``run_dir`` gets one log a process and is left there; None
    uses a temporary folder, which is removed unless something failed. A pool is ready when it
    serves, or, if ``needs_whole_pool``, when it has all of its memory.
    """

    model: str
    num_replicas: int
    device: Literal["cpu", "cuda"]
    environ: Mapping[str, str]
    pool: PoolConfig | None
    needs_whole_pool: bool = False
    rival: RivalOptions | None = None
    front: FrontOptions | None = None
    engine_args: Sequence[str] = ()
    replica_args: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    connector: Mapping[str, object] = field(default_factory=dict[str, object])
    python: Path = Path(sys.executable)
    port: int | None = None
    run_dir: Path | None = None
    start_timeout_s: float = 600.0
    stop_grace_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What start-up shows of one process."""

    name: str
    seconds: float
    log_file: Path
    is_ready: bool


Progress = Callable[[Sequence[ProcessState]], None]


class System:
    """See the module. ``on_progress`` is called some times a second while things start.

    Start it in the main thread or not at all from a thread that ends: nothing depends on the
    thread, but only one thread may use a System.
    """

    def __init__(self, options: SystemOptions, *, on_progress: Progress | None = None) -> None:
        if options.front is not None and (options.pool is None or options.num_replicas == 0):
            raise ValueError("a router stands before a pool and replicas")
        if options.rival is not None and (options.pool is not None or options.num_replicas == 0):
            raise ValueError("another cache is for replicas, in place of a pool")
        self.options = options
        self._on_progress = on_progress
        front = options.front
        self._front_port = None if front is None else pick_ports(1, front.port)[0]
        specs = replica_specs(options, front_port=self._front_port)
        self._rival: Rival | None = None
        if options.rival is not None:
            taken = [spec.port for spec in specs]
            self._rival = make_rival(options.rival, options.num_replicas, without=taken)
        self._specs = [_joined(spec, self._rival) for spec in specs]
        self._owns_run_dir = options.run_dir is None
        self.run_dir = options.run_dir or Path(tempfile.mkdtemp(prefix="millpond-logs-"))
        self._pool: GuardedProcess | None = None
        self._rival_server: GuardedProcess | None = None
        self._replicas: dict[str, Replica] = {}
        self._front: Front | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        try:
            self.stop()
        finally:
            self._leave_run_dir(exc_type)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The replicas that were started, in the order of their names."""
        return tuple(self._replicas[spec.name] for spec in self._specs)

    def replica(self, name: str) -> Replica:
        """Return the replica of that name: ``a``, ``b`` and so on."""
        return self._replicas[name]

    @property
    def socket(self) -> Path:
        """Where the pool's daemon listens; ``ValueError`` for a system without a pool."""
        if self.options.pool is None:
            raise ValueError("this system has no pool")
        return self.options.pool.socket

    @property
    def rival(self) -> Rival | None:
        """The other cache that its replicas share, where it has one."""
        return self._rival

    @property
    def front(self) -> Front:
        """The router; ``ValueError`` for a system without one."""
        if self._front is None:
            raise ValueError("this system has no running router")
        return self._front

    @property
    def pool_process(self) -> GuardedProcess:
        """The daemon's process; ``ValueError`` for a system without a pool."""
        if self._pool is None:
            raise ValueError("this system has no running pool")
        return self._pool

    # -------------------------------------------------------------- all of it

    def start(self) -> None:
        """Start everything and wait until it serves.

        Raises ``SetupError`` with the end of the log when a process ends or is not ready in
        time; everything is stopped then.
        """
        self.run_dir.mkdir(parents=True, exist_ok=True)
        try:
            if self.options.pool is not None:
                self._pool = self._start_pool(self.options.pool)
            if isinstance(self._rival, Lmcache):
                self._rival_server = self._start_lmcache(self._rival)
            for spec in self._specs:
                self._replicas[spec.name] = self._start_replica(spec)
            self._front = self._start_front()
            self._wait_ready(list(self._processes()))
        except BaseException as error:
            try:
                self.stop()
            finally:
                self._leave_run_dir(type(error))
            raise

    def stop(self) -> None:
        """End all processes: the router, engines, the pool or another cache's server.

        Waits for at most a grace and a margin each. Whatever is raised meanwhile, as by a second
        Ctrl-C, the rest is stopped.
        """
        with contextlib.ExitStack() as last_first:
            caches = (self._pool, self._rival_server)
            last_first.callback(_stop, [each for each in caches if each is not None])
            last_first.callback(_stop, [replica.process for replica in self._replicas.values()])
            # It lets streams come to their end, for which it needs the engines.
            last_first.callback(_stop, [] if self._front is None else [self._front.process])

    def wait_for_death(self, timeout_s: float) -> str | None:
        """Return the name of a process that has ended, or None when none did in the time."""
        deadline = time.monotonic() + timeout_s
        while True:
            for name, process in self._processes().items():
                if process.status is not None:
                    return name
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_S)

    def obituary(self, name: str) -> str:
        """Return what is known about a process that has ended, for the user."""
        process = self._processes()[name]
        return (
            f"{name} ended with status {process.status}; the end of {process.spec.log_file}:\n"
            f"{process.log_tail(_TAIL_LINES)}"
        )

    # -------------------------------------------------------------- one of them

    def kill_replica(self, name: str) -> None:
        """Kill a replica with all its processes, as a crash would."""
        self._replicas[name].process.kill()

    def restart_replica(self, name: str) -> Replica:
        """Start an ended replica anew on its port and wait until it serves.

        A router takes notice by itself, with its next look at the replica.
        """
        spec = next(spec for spec in self._specs if spec.name == name)
        self._replicas[name] = self._start_replica(spec)
        self._wait_ready([name])
        return self._replicas[name]

    def kill_pool(self) -> None:
        """Kill the daemon, as a crash would."""
        self.pool_process.kill()

    def restart_pool(self) -> None:
        """Start an ended daemon anew at its socket and wait until it serves."""
        if self.options.pool is None:
            raise ValueError("this system has no pool")
        self._pool = self._start_pool(self.options.pool)
        self._wait_ready(["pool"])

    def _leave_run_dir(self, exc_type: type[BaseException] | None) -> None:
        """Remove the temporary folder of logs, unless an error makes them worth reading."""
        failed = exc_type is not None and issubclass(exc_type, Exception)
        if self._owns_run_dir and not failed:
            shutil.rmtree(self.run_dir, ignore_errors=True)

    def _start_pool(self, pool: PoolConfig) -> GuardedProcess:
        return GuardedProcess(
            ProcessSpec(
                name="pool",
                argv=pool_argv(pool),
                environ=self.options.environ,
                log_file=self.run_dir / "pool.log",
                grace_s=self.options.stop_grace_s,
            )
        )

    def _start_lmcache(self, lmcache: Lmcache) -> GuardedProcess:
        return GuardedProcess(
            ProcessSpec(
                name=LMCACHE,
                argv=lmcache.server_argv(self.options.python),
                environ=lmcache.server_environ(self.options.environ),
                log_file=self.run_dir / "lmcache.log",
                grace_s=self.options.stop_grace_s,
                temp_dir=Path(tempfile.mkdtemp(prefix="millpond-lmcache-")),
            )
        )

    def _start_replica(self, spec: ReplicaSpec) -> Replica:
        process = GuardedProcess(
            ProcessSpec(
                name=spec.name,
                argv=engine_argv(spec),
                environ=engine_environ(spec, self.options.environ),
                log_file=self.run_dir / f"replica-{spec.name}.log",
                grace_s=self.options.stop_grace_s,
                temp_dir=Path(tempfile.mkdtemp(prefix=f"millpond-{spec.name}-")),
                leftovers=() if spec.membership is None else spec.membership.leftovers,
                cores=spec.cores,
            )
        )
        return Replica(spec.name, f"http://127.0.0.1:{spec.port}", spec.model, process)

    def _start_front(self) -> Front | None:
        if self.options.front is None or self._front_port is None:
            return None
        return start_front(
            FrontSpec(
                options=self.options.front,
                port=self._front_port,
                replicas={replica.name: replica.url for replica in self.replicas},
                pool_socket=self.socket,
                run_dir=self.run_dir,
                environ=self.options.environ,
            )
        )

    def _processes(self) -> dict[str, GuardedProcess]:
        pool = {} if self._pool is None else {"pool": self._pool}
        rival = {} if self._rival_server is None else {LMCACHE: self._rival_server}
        router = {} if self._front is None else {"router": self._front.process}
        return pool | rival | {name: each.process for name, each in self._replicas.items()} | router

    def _wait_ready(self, names: Sequence[str]) -> None:
        processes = self._processes()
        states = {
            name: ProcessState(name, 0.0, processes[name].spec.log_file, is_ready=False)
            for name in names
        }
        deadline = time.monotonic() + self.options.start_timeout_s
        while True:
            for name, state in states.items():
                process = processes[name]
                if process.status is not None:
                    raise SetupError(f"the system did not start: {self.obituary(name)}")
                if not state.is_ready:
                    seconds = time.monotonic() - process.started_at
                    states[name] = ProcessState(
                        name, seconds, process.spec.log_file, is_ready=self._is_ready(name)
                    )
            if self._on_progress is not None:
                self._on_progress(list(states.values()))
            late = [name for name, state in states.items() if not state.is_ready]
            if not late:
                return
            if time.monotonic() > deadline:
                raise SetupError(
                    f"not ready after {self.options.start_timeout_s:g} s: {', '.join(late)}. "
                    f"Look into {self.run_dir}, or allow more with --start-timeout; the end of "
                    f"{late[0]}'s log:\n{processes[late[0]].log_tail(_TAIL_LINES)}"
                )
            time.sleep(_POLL_S)

    def _is_ready(self, name: str) -> bool:
        if name == "router":
            return self.front.is_ready()
        if name == LMCACHE and isinstance(self._rival, Lmcache):
            return self._rival.is_ready()
        if name != "pool":
            return self._replicas[name].is_healthy()
        try:
            with AdminClient.connect(str(self.socket), timeout_s=_CONNECT_TIMEOUT_S) as admin:
                memory = admin.memory()
        except ExpectedError:
            return False
        if not self.options.needs_whole_pool:
            return True
        if memory.problem is not None:
            raise SetupError(f"the pool did not get all of its memory: {memory.problem}")
        return memory.is_complete


def _stop(processes: Sequence[GuardedProcess]) -> None:
    """Ask all to stop, then wait for each: they end side by side."""
    for process in processes:
        process.ask_to_stop()
    for process in processes:
        process.wait_stopped()


def _joined(spec: ReplicaSpec, rival: Rival | None) -> ReplicaSpec:
    return spec if rival is None else replace(spec, membership=rival.membership(spec.name))


def pool_argv(pool: PoolConfig) -> tuple[str, ...]:
    """Return the command of a pool's daemon."""
    argv = [sys.executable, "-m", "millpond.cli", "pool"]
    argv += ["--socket", str(pool.socket), "--size", str(pool.size_bytes)]
    if pool.extent_bytes is not None:
        argv += ["--extent", str(pool.extent_bytes)]
    retention = pool.retention
    argv += ["--eviction", retention.eviction, "--admission", retention.admission]
    return (*argv, "--state-ratio", str(retention.state_ratio))


def replica_specs(options: SystemOptions, *, front_port: int | None) -> list[ReplicaSpec]:
    """Return what each replica is started with: its share of the machine and a free port.

    Raises ``SetupError`` where ports or GPUs do not suffice.
    """
    num_replicas = options.num_replicas
    if num_replicas == 0:
        return []
    names = [_replica_name(i) for i in range(num_replicas)]
    without = () if front_port is None else (front_port,)
    ports = pick_ports(num_replicas, options.port, without=without)
    if options.device == "cuda":
        gpus: Sequence[tuple[str, ...] | None] = share_gpus(
            visible_gpus(options.environ), num_replicas
        )
        cores: Sequence[tuple[int, ...] | None] = [None] * num_replicas
    else:
        gpus, cores = [None] * num_replicas, share_cores(num_replicas)
    return [
        ReplicaSpec(
            name=name,
            model=options.model,
            port=ports[i],
            engine_args=(*options.engine_args, *options.replica_args.get(name, ())),
            gpus=gpus[i],
            cores=cores[i],
            socket=None if options.pool is None else options.pool.socket,
            connector=options.connector,
            python=options.python,
        )
        for i, name in enumerate(names)
    ]


def _replica_name(index: int) -> str:
    return ascii_lowercase[index] if index < len(ascii_lowercase) else f"r{index + 1}"
