"""Traces of real traffic: their lengths, their shared prefixes and their times.

The tokens of a prompt are made from its prefix ids: equal ids give equal tokens. What a trace
knows nothing about is left out: who was asked, and what the words were.
"""

import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from millpond.bench.scenario import Replay
from millpond.bench.workloads.requests import Piece, Request
from millpond.model.errors import ConfigError

MOONCAKE_BLOCK_TOKENS: Final = 512
"""Tokens that one of its hash_ids stands for; the last one may stand for fewer."""
_MS_PER_S: Final = 1000


@dataclass(frozen=True, slots=True)
class _Traced:
    """One request of a trace in its own tokens, before any scaling."""

    unit: str
    turn: int
    scope: str
    hash_ids: Sequence[int]
    block_tokens: int
    input_tokens: int
    output_tokens: int
    at_s: float
    think_s: float


def replay(workload: Replay, *, seed: str, num_replicas: int) -> list[Request]:
    """Return the first requests of a trace; raises ``ConfigError`` for one that can't be read.

    Requests of a session follow the one before after its think time. All others come at their
    own time, whatever becomes of those before.
    """
    path = _path(workload)
    read = _read_mooncake if workload.format == "mooncake" else _read_sessions
    requests: list[Request] = []
    last_of: dict[str, Request] = {}
    try:
        for traced in read(path):
            if traced.turn >= workload.turns_max:
                continue
            before = last_of.get(traced.unit)
            if before is not None and workload.placement == "fixed":
                replica = before.replica
            else:
                replica = _next_replica(workload, len(requests), len(last_of)) % num_replicas
            request = _request(workload, traced, seed, before=before, replica=replica)
            requests.append(request)
            last_of[traced.unit] = request
            if len(requests) == workload.requests:
                break
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(f"workload.trace = {str(path)!r} can't be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"workload.trace = {str(path)!r} is no trace of format {workload.format!r}: "
            f"{error!r} after {len(requests)} requests; give another format or trace"
        ) from error
    if not requests:
        raise ConfigError(f"workload.trace = {str(path)!r} has no requests; give another one")
    return requests


def _path(workload: Replay) -> Path:
    if workload.trace is None:
        raise ConfigError(
            f"workload {workload.name!r} has no trace: give its path with --trace, or as "
            "`trace` in the scenario"
        )
    return Path(workload.trace).expanduser()


def _next_replica(workload: Replay, num_requests: int, num_units: int) -> int:
    return num_requests if workload.placement == "round-robin" else num_units


def _request(
    workload: Replay, traced: _Traced, seed: str, *, before: Request | None, replica: int
) -> Request:
    return Request(
        key=f"{workload.name}/{traced.unit}/{traced.turn}",
        group=workload.name,
        role="any",
        unit=f"{workload.name}/{traced.unit}",
        pieces=tuple(_pieces(workload, traced, seed)),
        output_tokens=_scaled(
            traced.output_tokens, workload.token_scale, workload.output_tokens_max
        ),
        replica=replica,
        turn=traced.turn,
        after=None if before is None else before.key,
        wait_s=0.0 if before is None else traced.think_s / workload.time_scale,
        arrival_s=traced.at_s / workload.time_scale if before is None else None,
    )


def _pieces(workload: Replay, traced: _Traced, seed: str) -> Iterator[Piece]:
    left = _scaled(traced.input_tokens, workload.token_scale, workload.prompt_tokens_max)
    block_tokens = _scaled(traced.block_tokens, workload.token_scale, traced.block_tokens)
    for hash_id in traced.hash_ids:
        if left == 0:
            return
        num_tokens = min(block_tokens, left)
        yield Piece(f"{seed}/{traced.scope}/{hash_id}", num_tokens)
        left -= num_tokens
    if left:
        # What the trace has no id for is nobody else's.
        yield Piece(f"{seed}/{traced.unit}/{traced.turn}/rest", left)


def _scaled(num_tokens: int, scale: float, num_max: int) -> int:
    return min(max(1, round(num_tokens * scale)), num_max)


def _read_mooncake(path: Path) -> Iterator[_Traced]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            row = cast("Mapping[str, object]", json.loads(line))
            yield _Traced(
                unit=str(number),
                turn=0,
                scope="trace",
                hash_ids=cast("Sequence[int]", row["hash_ids"]),
                block_tokens=MOONCAKE_BLOCK_TOKENS,
                input_tokens=int(cast("int", row["input_length"])),
                output_tokens=int(cast("int", row["output_length"])),
                at_s=float(cast("float", row["timestamp"])) / _MS_PER_S,
                think_s=0.0,
            )


def _read_sessions(path: Path) -> Iterator[_Traced]:
    seen: set[str] = set()
    for document in _session_documents(path):
        name = str(document["id"])
        if name in seen:
            raise ValueError(f"two sessions have the id {name!r}")
        seen.add(name)
        scope = f"session/{name}" if document.get("hash_id_scope", "local") == "local" else "trace"
        rows = cast("Sequence[Mapping[str, object]]", document["requests"])
        # What a session's agents of its own asked has no prefix in common with it, and no ids.
        asked = [row for row in rows if "hash_ids" in row]
        for turn, row in enumerate(asked):
            yield _Traced(
                unit=name,
                turn=turn,
                scope=scope,
                hash_ids=cast("Sequence[int]", row["hash_ids"]),
                block_tokens=int(cast("int", document["block_size"])),
                input_tokens=int(cast("int", row["in"])),
                output_tokens=int(cast("int", row["out"])),
                # Sessions of this format begin at 0 each: they run side by side.
                at_s=float(cast("float", row["t"])),
                think_s=float(cast("float", row.get("think_time", 0.0))),
            )


def _session_documents(path: Path) -> Iterator[Mapping[str, object]]:
    if path.is_dir():
        for file in sorted(path.glob("*.json")):
            yield json.loads(file.read_bytes())
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.name.endswith(".json") else None
                if file is not None:
                    yield json.load(io.TextIOWrapper(file, encoding="utf-8"))
    else:
        yield json.loads(path.read_bytes())
