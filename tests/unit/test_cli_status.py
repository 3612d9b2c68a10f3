"""`millpond status`: its tables, its lines, and a watch that outlives the daemon."""

from typing import Any

import pytest

from millpond.cli.output import stdout
from millpond.cli.status import Watch, lines
from millpond.cli.tables import status_line, status_tables
from millpond.model.errors import DaemonGone


def totals(loaded: dict[str, int]) -> dict[str, object]:
    return {
        "num_requests": 2,
        "prompt_tokens": 1000,
        "computed_tokens": 1000 - sum(loaded.values()),
        "local_tokens": 0,
        "loaded_tokens": sum(loaded.values()),
        "loaded_tokens_by_writer": loaded,
    }


def statistics(*, epoch: int = 1) -> dict[str, Any]:
    return {
        "service": {
            "epoch": epoch,
            "uptime_s": 61.0,
            "memory": {"size_bytes": 2**30, "usable_bytes": 2**30, "problem": None},
            "refused": 0,
            "bad_frames": 0,
            "slow_peers_dropped": 0,
            "bad_reports": 0,
            "unknown_leases": 0,
            "clients": [{"replica": "a", "rank": None, "link": None}],
        },
        "pool": {
            "enabled": False,
            "bytes": {"free": 2**20, "committed": 3 * 2**20, "unassigned": 2**22},
            "num_slots": {"free": 3, "committed": 9},
            "num_blocks": 1234,
            "num_evictions": 5,
            "num_leases": 0,
            "num_write_leases_expired": 0,
            "checks": {"num_slots_checked": 3, "num_slots_damaged": 0},
            "pins": {"granted": 7, "miss": 0},
            "reserves": {"granted": 8, "full": 0},
            "refused": {"num_blocks_without_room": 0},
            "replicas": {"a": {"num_write_leases_aborted": 0}},
            "blocks_by_writer_reader": {"a": {"a": 1, "b": 2}},
        },
        "tokens": {"a": totals({"a": 40, "b": 5}), "b": totals({"a": 500})},
    }


def shown(capsys: pytest.CaptureFixture[str], figures: dict[str, Any]) -> str:
    for table in status_tables(figures):
        stdout.print(table)
    return capsys.readouterr().out


def cells(text: str, first: str) -> list[list[str]]:
    rows = [line.strip("│ ").split("│") for line in text.splitlines() if line.startswith("│")]
    stripped = [[cell.strip() for cell in row] for row in rows]
    return [row for row in stripped if row[0] == first]


def test_memory_tokens_and_the_matrix_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, statistics())
    for expected in ("Pool is off", "1,234 blocks", "3 blocks handed out"):
        assert expected in text
    assert cells(text, "committed") == [["committed", "3.0", "9"]]
    assert cells(text, "a") == [
        ["a", "2", "1,000", "955", "0", "45", "5 %"],
        ["a", "40", "500"],  # written by a: read by a, read by b
    ]
    assert cells(text, "b") == [["b", "2", "1,000", "500", "0", "500", "50 %"], ["b", "5", "0"]]


def test_a_large_matrix_is_cut_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    figures = statistics()
    names = [f"r{i:02}" for i in range(12)]
    figures["tokens"] = {
        reader: totals(dict.fromkeys(names, i + 1)) for i, reader in enumerate(names)
    }
    text = shown(capsys, figures)
    assert "4 replicas more in --json" in text
    rows = [row for row in map(str.split, text.splitlines()) if "reader" in row]
    assert [name for name in rows[0] if name.startswith("r") and name != "reader"] == names[4:]


REFUSALS = [
    (("pool", "pins", "limit"), "pin", "limit: "),
    (("pool", "reserves", "full"), "reserve", "full: "),
    (("pool", "reserves", "some-new-reason"), "reserve", "some-new-reason"),
    (("pool", "num_write_leases_expired"), "write lease", "expired: "),
    (("pool", "replicas", "a", "num_write_leases_aborted"), "write lease", "aborted: "),
    (("service", "refused"), "handshake", "refused: "),
    (("service", "bad_frames"), "connection", "bad frame: "),
    (("service", "slow_peers_dropped"), "connection", "slow: "),
    (("service", "bad_reports"), "report", "bad: "),
    (("service", "unknown_leases"), "finish", "unknown lease: "),
    (("pool", "checks", "num_slots_damaged"), "load", "damaged: "),
]


@pytest.mark.parametrize(("path", "what", "why"), REFUSALS, ids=str)
def test_each_refusal_is_shown_with_its_reason(
    path: tuple[str, ...], what: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = statistics()
    node = figures
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = 4321
    ((_, because, times),) = cells(shown(capsys, figures), what)
    assert because.startswith(why)
    assert times == "4,321"
    assert status_line(figures).endswith("refused=4321")


def test_refused_blocks_are_shown_apart_from_requests(capsys: pytest.CaptureFixture[str]) -> None:
    figures = statistics()
    figures["pool"]["refused"] = {"num_blocks_without_room": 70, "num_something_new": 8}
    assert [row[-1] for row in cells(shown(capsys, figures), "blocks")] == ["70", "8"]
    assert status_line(figures).endswith("refused=0")


def test_what_was_granted_is_not_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing" in shown(capsys, statistics())
    assert status_line(statistics()) == (
        "pool=off blocks=1234 committed_mib=3.0 leases=0 evictions=5 prompt_tokens=2000 "
        "computed_tokens=1455 local_tokens=0 loaded_tokens=545 refused=0"
    )


class Daemon:
    """A daemon that can be away; each connection serves until it went."""

    def __init__(self) -> None:
        self.now = 0.0
        self.epoch = 1
        self.is_up = True
        self.num_open = 0

    def connect(self) -> "Connection":
        if not self.is_up:
            raise DaemonGone("no daemon at here.sock")
        self.num_open += 1
        return Connection(self)


class Connection:
    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._epoch = daemon.epoch

    def status(self) -> dict[str, object]:
        if not self._daemon.is_up or self._daemon.epoch != self._epoch:
            raise DaemonGone("the connection broke")
        return statistics(epoch=self._epoch)

    def close(self) -> None:
        self._daemon.num_open -= 1


def watched() -> tuple[Daemon, Watch]:
    daemon = Daemon()
    return daemon, Watch(daemon.connect, now=lambda: daemon.now)


def test_a_watch_needs_a_daemon_to_begin_with() -> None:
    daemon, watch = watched()
    daemon.is_up = False
    with pytest.raises(DaemonGone, match=r"here\.sock"):
        watch.ask()


def test_a_watch_goes_on_without_the_daemon_and_says_so() -> None:
    daemon, watch = watched()
    first = watch.ask()
    assert (first.is_away, first.news) == (False, "")
    daemon.is_up = False
    assert watch.ask().news == "away for 0 s: the connection broke"
    daemon.now = 7.0
    away = watch.ask()
    assert away.is_away
    assert away.news == "away for 7 s: no daemon at here.sock"
    assert away.statistics == first.statistics
    assert lines(away) == ["daemon is away for 7 s: no daemon at here.sock"]
    daemon.is_up, daemon.now, daemon.epoch = True, 9.0, 2
    back = watch.ask()
    assert not back.is_away
    assert back.news == "back after 9 s: a new daemon, which holds nothing of before"
    assert [line.partition(" ")[0] for line in lines(back)] == ["daemon", "pool=off"]
    assert lines(watch.ask()) == [status_line(statistics())]
    watch.close()
    assert daemon.num_open == 0


def test_the_same_daemon_that_is_back_is_told_from_a_new_one() -> None:
    daemon, watch = watched()
    watch.ask()
    daemon.is_up = False
    watch.ask()
    daemon.is_up = True
    assert watch.ask().news == "back after 0 s: the same daemon"


def linked(**link: object) -> dict[str, Any]:
    figures = statistics()
    usual = {"h2d_gb_s": 55.1, "d2h_gb_s": 54.2, "allowed_gb_s": 57.6, "problem": ""}
    figures["service"]["clients"] = [{"replica": "a", "rank": 0, "link": usual | link}]
    return figures


def test_links_are_shown_once_somebody_has_told_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Links" not in shown(capsys, statistics())
    text = shown(capsys, linked())
    assert "55.1" in text
    assert "57.6" in text
    assert "slow" not in text


def test_a_slow_link_and_a_problem_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "slow: 59 %" in shown(capsys, linked(h2d_gb_s=34.0))
    assert "slow" not in shown(capsys, linked(h2d_gb_s=34.0, allowed_gb_s=None))
    problem = linked(h2d_gb_s=None, d2h_gb_s=None, allowed_gb_s=None, problem="ulimit -l")
    assert "ulimit -l" in shown(capsys, problem)


def test_memory_that_is_still_coming_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    figures = statistics()
    assert "MiB" not in status_line(figures)
    figures["service"]["memory"]["usable_bytes"] = 2**28
    assert "has 256.0 of 1,024.0 MiB, and serves" in " ".join(shown(capsys, figures).split())
    assert status_line(figures).count("usable_mib=256.0 size_mib=1024.0 memory=coming") == 1


def test_memory_that_ran_out_is_shouted(capsys: pytest.CaptureFixture[str]) -> None:
    figures = statistics()
    figures["service"]["memory"] |= {"usable_bytes": 2**28, "problem": "the kernel has no more"}
    text = " ".join(shown(capsys, figures).split())
    assert "MEMORY RAN OUT" in text
    assert "256.0 of 1,024.0 MiB" in text
    assert "the kernel has no more" in text
    assert "memory=ran-out" in status_line(figures)
