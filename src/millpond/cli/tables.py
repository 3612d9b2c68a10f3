"""The daemon's statistics as tables, and as one line."""

from collections.abc import Iterator, Sequence
from typing import Final, cast

from rich.table import Table

from millpond.cli.figures import Tree, count, number, tree

_LINK_RATIO_MIN: Final = 0.8
_MATRIX_MAX: Final = 8
"""Replicas a side of the matrix: what 80 columns hold."""

_REASONS: Final = {
    ("pin", "miss"): "fewer blocks were usable than the replica had itself",
    ("pin", "off"): "the pool is switched off",
    ("pin", "limit"): "the replica holds as many leases as one may",
    ("reserve", "present"): "the pool has, or is getting, all of these blocks",
    ("reserve", "hole"): "a block before them is not in the pool",
    ("reserve", "full"): "every slot is in use by a lease",
    ("reserve", "not-admitted"): "the admission policy keeps none of these blocks yet",
    ("reserve", "off"): "the pool is switched off",
    ("reserve", "limit"): "the replica holds as many leases as one may",
    ("write lease", "aborted"): "the replica's copy failed, or it died",
    ("write lease", "expired"): "not finished in time; its slots are kept apart until it is",
    ("handshake", "refused"): "the replica's log has the reason",
    ("connection", "bad frame"): "it did not speak the protocol, and was closed",
    ("connection", "slow"): "it did not read its replies, and was closed",
    ("report", "bad"): "its tokens did not add up",
    ("finish", "unknown lease"): "the lease had ended already",
    ("load", "damaged"): "a checksum differed; the slot is out of use until the daemon ends",
}
_GRANTED: Final = "granted"

_REFUSED_BLOCKS: Final = {
    "num_blocks_not_admitted": ("blocks", "the admission policy does not keep them yet"),
    "num_blocks_without_room": ("blocks", "no slot was free, and none could be evicted"),
    "num_blocks_beyond_limit": (
        "blocks",
        "more than one reserve may take; the rest of the prefix comes later",
    ),
    "num_tails_without_room": ("states", "no slot was free, and none could be evicted"),
}
"""Of reserves, whether these were granted something else or nothing."""


def status_tables(statistics: Tree) -> list[Table]:
    """Return the daemon's statistics as tables for people."""
    return [
        _memory(statistics),
        *_links(tree(statistics, "service")),
        _tokens(tree(statistics, "tokens")),
        _matrix(statistics),
        _refusals(statistics),
    ]


def status_line(statistics: Tree) -> str:
    """Return the daemon's statistics as one line of key=value."""
    pool = tree(statistics, "pool")
    tokens = [cast("Tree", totals) for totals in tree(statistics, "tokens").values()]
    num_bytes = tree(pool, "bytes")
    figures = {
        "pool": "on" if pool["enabled"] else "off",
        "blocks": pool["num_blocks"],
        "committed_mib": f"{number(num_bytes.get('committed', 0)) / 2**20:.1f}",
        "leases": pool["num_leases"],
        "evictions": pool["num_evictions"],
    }
    memory = tree(tree(statistics, "service"), "memory")
    if memory["usable_bytes"] != memory["size_bytes"]:
        figures["usable_mib"] = f"{number(memory['usable_bytes']) / 2**20:.1f}"
        figures["size_mib"] = f"{number(memory['size_bytes']) / 2**20:.1f}"
        figures["memory"] = "coming" if memory["problem"] is None else "ran-out"
    for source in ("prompt", "computed", "local", "loaded"):
        figures[f"{source}_tokens"] = sum(int(number(each[f"{source}_tokens"])) for each in tokens)
    figures["refused"] = sum(num for *_, num in _refused(statistics))
    return " ".join(f"{name}={value}" for name, value in figures.items())


def _memory(statistics: Tree) -> Table:
    pool, service = tree(statistics, "pool"), tree(statistics, "service")
    state = "on" if pool["enabled"] else "off"
    table = Table("memory", title=f"Pool is {state}")
    table.add_column("MiB", justify="right")
    table.add_column("slots", justify="right")
    slots = tree(pool, "num_slots")
    for name, num_bytes in tree(pool, "bytes").items():
        table.add_row(name, f"{number(num_bytes) / 2**20:,.1f}", count(slots.get(name)))
    table.caption = (
        f"{count(pool['num_blocks'])} blocks, {count(pool['num_evictions'])} evictions, "
        f"{count(pool['num_leases'])} leases, up {number(service['uptime_s']):,.0f} s"
    )
    if news := _memory_news(tree(service, "memory")):
        table.caption += f"\n{news}"
    return table


def _memory_news(memory: Tree) -> str:
    """Return what is to be said of memory that the pool was to have and has not, "" of none."""
    usable_bytes, size_bytes = number(memory["usable_bytes"]), number(memory["size_bytes"])
    if usable_bytes == size_bytes:
        return ""
    has = f"has {usable_bytes / 2**20:,.1f} of {size_bytes / 2**20:,.1f} MiB"
    if memory["problem"] is None:
        return f"The pool {has}, and serves while it takes the rest."
    return f"MEMORY RAN OUT: the pool {has}, and serves with that. {memory['problem']}"


def _links(service: Tree) -> list[Table]:
    """Return a table of the ranks that have told of their way to the arena, if there are any."""
    table = Table("replica", title="Links between host and GPU, in GB/s")
    for column in ("rank", "to the GPU", "from the GPU", "allowed"):
        table.add_column(column, justify="right")
    table.add_column("")
    for each in cast("list[Tree]", service["clients"]):
        link = cast("Tree | None", each.get("link"))
        if link is None:
            continue
        speeds = [link["h2d_gb_s"], link["d2h_gb_s"], link["allowed_gb_s"]]
        shown = ["" if speed is None else f"{number(speed):.1f}" for speed in speeds]
        table.add_row(str(each["replica"]), count(each["rank"]), *shown, _link_warning(link))
    return [table] if table.row_count else []


def _link_warning(link: Tree) -> str:
    """Return what is wrong with a link, "" if nothing is."""
    if link["problem"]:
        return str(link["problem"])
    if link["h2d_gb_s"] is None or link["d2h_gb_s"] is None or link["allowed_gb_s"] is None:
        return ""
    slower = min(number(link["h2d_gb_s"]), number(link["d2h_gb_s"]))
    share = slower / number(link["allowed_gb_s"])
    if share >= _LINK_RATIO_MIN:
        return ""
    return f"slow: {100 * share:.0f} % of what the link allows"


def _tokens(replicas: Tree) -> Table:
    table = Table("replica", title="Tokens of finished requests, by replica and source")
    for column in ("requests", "prompt", "computed", "local", "loaded", "not computed"):
        table.add_column(column, justify="right")
    for name, totals in replicas.items():
        counts = cast("Tree", totals)
        prompt, computed = number(counts["prompt_tokens"]), number(counts["computed_tokens"])
        columns = ("num_requests", "prompt_tokens", "computed_tokens", "local_tokens")
        table.add_row(
            name,
            *(count(counts[column]) for column in (*columns, "loaded_tokens")),
            f"{100 * (1 - computed / prompt):.0f} %" if prompt else "",
        )
    return table


def _matrix(statistics: Tree) -> Table:
    """Return loaded tokens with a row for each writer and a column for each reader."""
    loaded = {
        reader: tree(cast("Tree", totals), "loaded_tokens_by_writer")
        for reader, totals in tree(statistics, "tokens").items()
    }
    readers = _largest({reader: _total(by_writer) for reader, by_writer in loaded.items()})
    by_writer: dict[str, float] = {}
    for reader in loaded.values():
        for writer, tokens in reader.items():
            by_writer[writer] = by_writer.get(writer, 0) + number(tokens)
    table = Table("writer \\ reader", title="Hits: tokens loaded, by writing and reading replica")
    for reader in readers:
        table.add_column(reader, justify="right")
    for writer in _largest(by_writer):
        table.add_row(writer, *(count(loaded[reader].get(writer, 0)) for reader in readers))
    num_left_out = max(len(loaded), len(by_writer)) - _MATRIX_MAX
    read = tree(tree(statistics, "pool"), "blocks_by_writer_reader").values()
    table.caption = f"{count(sum(_total(cast('Tree', each)) for each in read))} blocks handed out"
    if num_left_out > 0:
        table.caption += f"; {num_left_out} replicas more in --json"
    return table


def _largest(totals: dict[str, float]) -> list[str]:
    """Return the names to show: those with the most, in the order of their names."""
    return sorted(sorted(totals, key=lambda name: -totals[name])[:_MATRIX_MAX])


def _total(counts: Tree) -> float:
    return sum(map(number, counts.values()))


def _refusals(statistics: Tree) -> Table:
    table = Table("refused", "because", title="What was refused, and why")
    table.add_column("times", justify="right")
    for what, why, times in _refused(statistics):
        reason = _REASONS.get((what, why))
        table.add_row(what, why if reason is None else f"{why}: {reason}", count(times))
    # Not requests but what they asked for: these are not summed up with the others.
    for name, number_refused in tree(tree(statistics, "pool"), "refused").items():
        if number(number_refused):
            what, reason = _REFUSED_BLOCKS.get(name, ("blocks", name))
            table.add_row(what, reason, count(number_refused))
    if not table.row_count:
        table.caption = "nothing"
    return table


def _refused(statistics: Tree) -> Iterator[tuple[str, str, int]]:
    """Yield (what, why, times) of all requests and peers that got nothing, none with zero."""
    pool, service = tree(statistics, "pool"), tree(statistics, "service")
    replicas = [cast("Tree", each) for each in tree(pool, "replicas").values()]
    found: list[tuple[str, str, object]] = [
        (what, why, times)
        for what, counts in (("pin", tree(pool, "pins")), ("reserve", tree(pool, "reserves")))
        for why, times in counts.items()
        if why != _GRANTED
    ]
    found += [
        ("write lease", "aborted", _sum(replicas, "num_write_leases_aborted")),
        ("write lease", "expired", pool["num_write_leases_expired"]),
        ("handshake", "refused", service["refused"]),
        ("connection", "bad frame", service["bad_frames"]),
        ("connection", "slow", service["slow_peers_dropped"]),
        ("report", "bad", service["bad_reports"]),
        ("finish", "unknown lease", service["unknown_leases"]),
        ("load", "damaged", tree(pool, "checks")["num_slots_damaged"]),
    ]
    for what, why, times in found:
        if number(times):
            yield what, why, int(number(times))


def _sum(counts: Sequence[Tree], key: str) -> float:
    return sum(number(each[key]) for each in counts)
