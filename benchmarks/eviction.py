"""Hit ratios of the pool's eviction and admission policies over traces of real traffic.

    python benchmarks/eviction.py TRACE.jsonl... [--tokens 1M,4M,10M,20M] [--json]
    python benchmarks/eviction.py TRACE.jsonl... --hybrid [--sizes 64GiB,256GiB] [--json]
                                  [--ratios 0.5] [--step-tokens 16384] [--inner-pages 8]

Replays each trace through the pool itself, on the trace's own time: no memory is taken and
nothing is copied. A trace has a JSON object a line with ``timestamp`` (ms), ``input_length``
(tokens) and ``hash_ids`` (one for each block of 512 tokens; equal ids mean equal prefixes), as
the traces of Mooncake have (https://github.com/kvcache-ai/Mooncake, FAST25-release), and
benchmarks/samples/turns.jsonl, a small made one. What a request generates is not in them, so
only prompts are stored.

Prints tokens hit in percent of tokens asked for. A request is looked up, and then stored at
once; it can hit what was stored before it, never its own last token. ``--hybrid`` replays a
model with recurrent states (64 KiB of pages a token, 154 MB a state) for several ``state_ratio``.
A state is stored at a prompt's last boundary, and of the ends of steps within it at the first, and
at one more for each --inner-pages times a state's bytes of pages, as the connector does; 0: at all.
"""

import argparse
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from millpond.config import format_size, parse_size
from millpond.model.inner_states import INNER_PAGES, kept_ends
from millpond.model.limits import KIB
from millpond.model.names import Admission, Coverage, Eviction
from millpond.model.namespace import Namespace, PartSpec, aligned_slot_bytes
from millpond.model.retention import Retention
from millpond.pool.pool import Pool, default_extent_bytes

BLOCK_TOKENS = 512
KEY_BYTES = 16
PAGES_BYTES = BLOCK_TOKENS * 64 * KIB
STATE_BYTES = 154_000_000
STATE_RATIOS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)

PAGES = PartSpec("pages", Coverage.EVERY, PAGES_BYTES)
STATE = PartSpec("state", Coverage.LAST, STATE_BYTES)


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace; ``keys`` are those of its full blocks."""

    at_ns: int
    num_tokens: int
    keys: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One replay of one trace."""

    trace: str
    pool_bytes: int
    eviction: str
    admission: str
    state_ratio: float | None
    hit_ratio: float
    num_blocks_written: int
    num_evictions: int
    seconds: float

    @property
    def num_tokens(self) -> int:
        """How many tokens of pages the pool has room for."""
        return self.pool_bytes // PAGES_BYTES * BLOCK_TOKENS


def read_trace(path: Path) -> list[Request]:
    """Return the requests of a trace, in the order of the file."""
    requests: list[Request] = []
    last_ns = 0
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            num_blocks = row["input_length"] // BLOCK_TOKENS
            # Two requests in the same millisecond still come one after the other.
            last_ns = max(last_ns + 1000, row["timestamp"] * 1_000_000)
            keys = b"".join(map(key_of, row["hash_ids"][:num_blocks]))
            requests.append(Request(last_ns, row["input_length"], keys))
    return requests


def key_of(hash_id: int) -> bytes:
    """Return a digest that stands for one block of a trace."""
    return hashlib.blake2b(hash_id.to_bytes(8), digest_size=KEY_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of an engine, and how many blocks make room for one more state within a prompt."""

    num_blocks: int
    inner_blocks: float


class Replay:
    """One pool of ``pool_bytes``, and one replica that looks up and stores in it."""

    def __init__(
        self, pool_bytes: int, retention: Retention, namespace: Namespace, steps: Steps
    ) -> None:
        self.steps = steps
        self.block_tokens = namespace.block_tokens
        slot_bytes = max(aligned_slot_bytes(part.slot_bytes) for part in namespace.parts)
        self.pool = Pool(
            epoch=1,
            arena_bytes=pool_bytes,
            extent_bytes=max(default_extent_bytes(pool_bytes), slot_bytes),
            retention=retention,
        )
        self.has_states = len(namespace.parts) > 1
        self.namespace_id = self.pool.add_namespace(namespace)
        self.session = self.pool.open_session(
            replica="replayed", namespace_id=self.namespace_id, num_ranks=1
        )

    def run(self, requests: Iterable[Request]) -> float:
        """Return tokens hit by tokens asked for."""
        num_hit = num_asked = 0
        for number, request in enumerate(requests):
            # The last token is always computed: its logits are in no cache.
            num_wanted = (request.num_tokens - 1) // self.block_tokens
            num_blocks = self._look_up(request.keys[: num_wanted * KEY_BYTES], request.at_ns)
            num_hit += num_blocks * self.block_tokens
            num_asked += request.num_tokens
            self._store(request, num_blocks, str(number))
        return num_hit / num_asked

    def _look_up(self, keys: bytes, now_ns: int) -> int:
        lease = self.pool.pin(self.session, keys, KEY_BYTES, first_block=0, now_ns=now_ns)
        if lease.lease_id is None:
            return 0
        self.pool.finish(self.session, lease.lease_id, rank=0, ok=True, now_ns=now_ns)
        return lease.num_blocks

    def _store(self, request: Request, num_done: int, request_id: str) -> None:
        num_blocks = len(request.keys) // KEY_BYTES
        if not self.has_states:
            self._write(request, num_blocks, (), request_id)
            return
        last = (request.num_tokens - 1) // self.block_tokens  # where a repeated prompt can resume
        step = self.steps.num_blocks
        inner = range(num_done + step, last, step)
        kept = kept_ends(
            inner, start_blocks=num_done, num_kept=0, blocks_each=self.steps.inner_blocks
        ) | {last, num_blocks}
        for end in sorted({*inner, last, num_blocks}):
            if num_done < end <= num_blocks:
                self._write(request, end, (end - 1,) if end in kept else (), request_id)

    def _write(
        self, request: Request, num_blocks: int, states: Sequence[int], request_id: str
    ) -> None:
        lease = self.pool.reserve(
            self.session,
            request.keys[: num_blocks * KEY_BYTES],
            KEY_BYTES,
            first_block=0,
            parts=((), states) if self.has_states else ((),),
            now_ns=request.at_ns,
            request_id=request_id,
        )
        if lease.lease_id is not None:
            self.pool.finish(self.session, lease.lease_id, rank=0, ok=True, now_ns=request.at_ns)


def namespace(parts: tuple[PartSpec, ...], block_tokens: int = BLOCK_TOKENS) -> Namespace:
    """Return a namespace of blocks with ``parts``."""
    return Namespace(
        model="replayed",
        revision="",
        weights="",
        dtype="bfloat16",
        kv_cache_dtype="auto",
        quantization="",
        block_tokens=block_tokens,
        engine_block_tokens=16,
        tensor_parallel_size=1,
        attention_backend="",
        layout="",
        hash_algorithm="",
        hash_seed="",
        engine="",
        engine_version="",
        parts=parts,
    )


def replay(
    trace: str,
    requests: list[Request],
    pool_bytes: int,
    retention: Retention,
    steps: Steps | None,
) -> Result:
    """Replay one trace through one pool; ``steps`` are those of a hybrid model."""
    began = time.monotonic()
    hybrid = steps is not None
    parts = (PAGES, STATE) if hybrid else (PAGES,)
    run = Replay(pool_bytes, retention, namespace(parts), steps or Steps(1, 0))
    hit_ratio = run.run(requests)
    run.pool.check_invariants()
    statistics = run.pool.statistics()
    replicas, num_evictions = statistics["replicas"], statistics["num_evictions"]
    assert isinstance(replicas, dict)
    assert isinstance(num_evictions, int)
    return Result(
        trace=trace,
        pool_bytes=pool_bytes,
        eviction=retention.eviction.value,
        admission=retention.admission.value,
        state_ratio=retention.state_ratio if hybrid else None,
        hit_ratio=round(hit_ratio, 4),
        num_blocks_written=replicas["replayed"]["num_blocks_written"],
        num_evictions=num_evictions,
        seconds=round(time.monotonic() - began, 2),
    )


def compare(
    path: Path, sizes: Sequence[int], ratios: Sequence[float], steps: Steps | None
) -> Iterable[Result]:
    """Replay one trace with every size, eviction and admission, or every share of states."""
    requests = read_trace(path)
    if steps is not None:
        retentions = [Retention(state_ratio=ratio) for ratio in ratios]
        if len(ratios) > 1:
            retentions.append(Retention(Eviction.ARC))
    else:
        retentions = [
            Retention(eviction=eviction, admission=admission)
            for admission, eviction in itertools.product(Admission, Eviction)
        ]
    for size, retention in itertools.product(sizes, retentions):
        yield replay(path.stem, requests, size, retention, steps)


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table: a row for each trace and pool, a column for each policy."""
    columns = list(dict.fromkeys(map(_column, results)))
    rows = list(dict.fromkeys(map(_row, results)))
    percent = {(_row(each), _column(each)): f"{100 * each.hit_ratio:.2f}" for each in results}
    lines = [["trace", "pool", *columns], ["---"] * (2 + len(columns))]
    lines += [[*row, *(percent.get((row, column), "") for column in columns)] for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _column(result: Result) -> str:
    if result.state_ratio is None:
        return f"{result.eviction}, {result.admission}"
    return f"{result.eviction}, states {result.state_ratio:g}"


def _row(result: Result) -> tuple[str, str]:
    if result.state_ratio is None:
        return result.trace, f"{result.num_tokens / 1e6:.3g} M tokens"
    return result.trace, format_size(result.pool_bytes)


def tokens(written: str) -> int:
    """Return the bytes of a pool for a number of tokens, such as 10M."""
    factor = {"K": 10**3, "M": 10**6}.get(written[-1:], 1)
    number = float(written.rstrip("KM")) * factor
    return int(number) // BLOCK_TOKENS * PAGES_BYTES


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--tokens", default="1M,4M,10M,20M", help="sizes of pools, in tokens")
    parser.add_argument("--sizes", default="64GiB,256GiB,1TiB", help="sizes of hybrid pools")
    parser.add_argument("--hybrid", action="store_true")
    parser.add_argument("--ratios", default=",".join(map(str, STATE_RATIOS)), help="of states")
    parser.add_argument("--step-tokens", type=int, default=16_384, help="of an engine's step")
    parser.add_argument(
        "--inner-pages", type=float, default=INNER_PAGES, help="0: the state of each step"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.hybrid:
        sizes = [parse_size(size) for size in options.sizes.split(",")]
    else:
        sizes = [tokens(size) for size in options.tokens.split(",")]
    ratios = [float(ratio) for ratio in options.ratios.split(",")]
    inner_blocks = options.inner_pages * STATE_BYTES / PAGES_BYTES
    steps = Steps(max(1, options.step_tokens // BLOCK_TOKENS), inner_blocks)
    results: list[Result] = []
    for path in options.traces:
        for result in compare(path, sizes, ratios, steps if options.hybrid else None):
            results.append(result)
            print(f"{result.trace} {_row(result)[1]}: {_column(result)}", file=sys.stderr)
    if options.json:
        rows = [{name: getattr(each, name) for name in Result.__slots__} for each in results]
        print(json.dumps(rows, indent=1))
    else:
        print(table(results))


if __name__ == "__main__":
    main()
