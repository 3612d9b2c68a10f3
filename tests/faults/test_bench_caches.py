"""Several caches in one run, against scripted endpoints: effects of each, and how each forgets."""

import asyncio
import contextlib
import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from millpond.bench import forgetting
from millpond.bench.analysis import analyse
from millpond.bench.forgetting import LmcacheMemory, TieredFiles, flush_engine, memory_of
from millpond.bench.periods import Runner, plan_periods
from millpond.bench.records import Record, load_record
from millpond.bench.scenario import Design, Moved, Scenario
from millpond.bench.stages import CACHES, RestartStage
from millpond.config import PoolConfig
from millpond.launch.rivals import RIVALS, Lmcache, RivalOptions, VllmFs
from millpond.launch.system import SystemOptions
from millpond.model.errors import RequestTimedOut, SetupError
from millpond.model.limits import MIB
from tests.faults.scripted_endpoint import Asked, Endpoint, ScriptedStage, Stream

FIRST_TOKEN_S = {"off": 0.12, "millpond": 0.03, "lmcache": 0.06, "vllm-fs": 0.12}
SCENARIO = Scenario(
    name="s",
    description="d",
    design=Design(rounds=1, aa_rounds=0, warm_up=1),
    workload=(Moved(lengths=(20,), prompts=6, output_tokens=3, gap_s=0.0, concurrency=3),),
)


async def by_cache(endpoint: Endpoint, _asked: Asked, stream: Stream) -> None:
    """Have the first token come after the time of the cache that is on."""
    await asyncio.sleep(FIRST_TOKEN_S[endpoint.cache])
    for _ in range(3):
        await stream.token()
    await stream.done()


def test_the_effects_of_four_caches_are_recovered_in_one_run(tmp_path: Path) -> None:
    plans = plan_periods(SCENARIO.design, CACHES)
    with Endpoint(by_cache) as endpoint:
        runner = Runner(
            scenario=SCENARIO,
            num_replicas=2,
            folder=tmp_path / "periods",
            run_id="x",
            on_progress=lambda _doing: None,
        )
        runner.run(plans, ScriptedStage(endpoint))
    caches = [period.plan.cache for period in runner.periods]
    assert caches == [*CACHES, *reversed(CACHES)]
    Record(scenario=SCENARIO, options={}, facts={}, periods=runner.periods).save(
        tmp_path / "bench.json"
    )
    analysis = analyse(load_record(tmp_path / "bench.json").periods)
    moved = [each for each in analysis.effects if (each.part, each.metric) == ("moved", "ttft_ms")]
    assert [(each.base, each.other) for each in moved] == [("off", each) for each in CACHES[1:]]
    for effect in moved:
        saved_ms = 1000 * (FIRST_TOKEN_S["off"] - FIRST_TOKEN_S[effect.other])
        assert effect.saved_ms.value == pytest.approx(saved_ms, abs=20)
        assert (effect.num_prompts, len(effect.pairs)) == (12, 2)
    assert [each.verdict for each in moved[:2]] == ["faster", "faster"]


# ---------------------------------------------------------------- what a period starts


def test_each_period_starts_its_own_cache_and_no_other(tmp_path: Path) -> None:
    pool = PoolConfig(tmp_path / "p.sock", 16 * MIB, None)
    options = SystemOptions(model="m", num_replicas=2, device="cuda", environ={}, pool=pool)
    rivals = {name: RivalOptions(name=name, size_bytes=pool.size_bytes) for name in RIVALS}
    stage = RestartStage(options, on_progress=lambda _states: None, rivals=rivals)
    started = {cache: stage.options_of(cache, number) for number, cache in enumerate(CACHES)}
    assert {name: each.pool for name, each in started.items() if each.pool} == {"millpond": pool}
    assert {name: each.rival for name, each in started.items() if each.rival} == rivals


# ---------------------------------------------------------------- forgetting

Answer = tuple[int, object]
Answers = Callable[[str, str], Answer]


@contextlib.contextmanager
def serving(answers: Answers) -> Iterator[str]:
    """Serve what ``answers`` says of a method and a path, and yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def _answer(self) -> None:
            status, body = answers(self.command, self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            del format, args

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(10)


def test_an_engine_that_still_holds_blocks_is_asked_again() -> None:
    asked: list[str] = []

    def answers(_method: str, path: str) -> Answer:
        asked.append(path)
        return 200, {"success": len(asked) == 3}

    with serving(answers) as url:
        flush_engine(url)
    assert asked == ["/reset_prefix_cache"] * 3


@pytest.mark.parametrize("said", [{}, "done", [], None])
def test_an_endpoint_that_answers_otherwise_has_forgotten(said: object) -> None:
    asked: list[str] = []

    def answers(_method: str, path: str) -> Answer:
        asked.append(path)
        return 200, said

    with serving(answers) as url:
        flush_engine(url)
    assert len(asked) == 1


def test_an_engine_that_holds_blocks_for_good_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgetting, "_WAIT_S_MAX", 0.1)
    with (
        serving(lambda _method, _path: (200, {"success": False})) as url,
        pytest.raises(RequestTimedOut, match="still holds blocks"),
    ):
        flush_engine(url)


def lmcache_status(num_written: int) -> object:
    return {"storage_manager": {"l1_manager": {"write_locked_count": num_written}}}


def test_lmcache_forgets_when_nothing_is_being_written() -> None:
    asked: list[tuple[str, str]] = []
    num_written = itertools.count(2, -1)

    def answers(method: str, path: str) -> Answer:
        asked.append((method, path))
        return 200, lmcache_status(next(num_written)) if path == "/status" else {"status": "ok"}

    with serving(answers) as url:
        memory_of(
            Lmcache(RivalOptions(name="lmcache", size_bytes=1), 2, 1, port_of(url)), []
        ).flush()
    assert asked == [("GET", "/status")] * 3 + [("POST", "/cache/clear")]


def test_lmcache_that_writes_for_good_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgetting, "_WAIT_S_MAX", 0.1)
    with (
        serving(lambda _method, _path: (200, lmcache_status(1))) as url,
        pytest.raises(RequestTimedOut, match="still writes"),
    ):
        LmcacheMemory(url).flush()


@pytest.mark.parametrize("answer", [(200, {"is_healthy": True}), (404, {}), (200, [])])
def test_what_is_no_lmcache_is_named(answer: Answer) -> None:
    with (
        serving(lambda _method, _path: answer) as url,
        pytest.raises(SetupError, match=f"{url} can't forget its prefixes"),
    ):
        LmcacheMemory(url).flush()


def test_files_go_once_all_replicas_have_ended_their_writes(tmp_path: Path) -> None:
    files = tmp_path / "files"
    block = files / "model_r0" / "abc" / "0.bin"
    block.parent.mkdir(parents=True)
    block.touch()
    asked: list[str] = []

    def answers(_method: str, path: str) -> Answer:
        assert block.exists(), "a write that ends later would bring it back"
        asked.append(path)
        return 200, {"success": True}

    with serving(answers) as url:
        rival = VllmFs(RivalOptions(name="vllm-fs", size_bytes=1), 2, files)
        memory_of(rival, [url, url]).flush()
    assert asked == ["/reset_prefix_cache?reset_external=true"] * 2
    assert list(files.iterdir()) == [], "the folder itself stays: replicas write to it"


def test_files_that_appear_while_they_are_removed_are_removed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = tmp_path / "model" / "block"
    block.parent.mkdir()
    num_left = 2
    remove = shutil.rmtree

    def removing(path: Path, *, ignore_errors: bool) -> None:
        nonlocal num_left
        remove(path, ignore_errors=ignore_errors)
        if num_left:
            num_left -= 1
            block.parent.mkdir()
            block.touch()

    monkeypatch.setattr(forgetting.shutil, "rmtree", removing)
    TieredFiles([], tmp_path).flush()
    assert list(tmp_path.iterdir()) == []
    block.parent.mkdir()
    num_left = 1_000_000
    monkeypatch.setattr(forgetting, "_WAIT_S_MAX", 0.05)
    with pytest.raises(RequestTimedOut, match="can't be removed"):
        TieredFiles([], tmp_path).flush()


def test_files_and_links_beside_the_folders_go_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "_WAIT_S_MAX", 0.5)
    elsewhere, files = tmp_path / "elsewhere", tmp_path / "files"
    for folder in (elsewhere, files):
        folder.mkdir()
        (folder / "block").touch()
    (files / "link").symlink_to(elsewhere)
    TieredFiles([], files).flush()
    assert list(files.iterdir()) == []
    assert list(elsewhere.iterdir()) == [elsewhere / "block"]


def test_a_folder_that_was_never_made_has_nothing_to_forget(tmp_path: Path) -> None:
    TieredFiles([], tmp_path / "nowhere").flush()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])
