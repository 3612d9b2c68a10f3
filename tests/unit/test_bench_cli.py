"""`millpond bench`: what is refused before anything starts, and what is printed."""

import json
from pathlib import Path

import pytest

from millpond.bench.periods import Runner, plan_periods
from millpond.bench.records import Record, write_json
from millpond.bench.scenario import Design, Moved, Scenario, scenario_files
from millpond.cli import bench_place, run
from millpond.cli.exits import Exit
from millpond.launch import prepare as prepare_module
from tests.unit.bench_values import noisy, periods

SCENARIO = Scenario(name="s", description="d", workload=(Moved(name="g", lengths=(1,), prompts=1),))
URLS = ("--url", "a=http://127.0.0.1:1", "--model", "m")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nonsense"], ["no scenario 'nonsense'", "moved-cpu"]),
        (["moved-cpu", "--caches", "off,redis"], ["--caches off,redis", "millpond"]),
        (["moved-cpu", "--caches", "off,off"], ["at most once"]),
        (["moved-cpu", "--rounds", "0", "--aa-rounds", "0"], ["nothing to run"]),
        (["moved-cpu", *URLS, "--switch", "restart"], ["--url", "started anew"]),
        (["moved-cpu", *URLS], ["--socket", "--caches off"]),
        (["moved-cpu", "--url", "a"], ["'a' is no replica", "a=http://"]),
        (["moved-cpu", "--router", "http://127.0.0.1:1"], ["--url"]),
        (["moved-cpu", *URLS, "--caches", "off", "--access-log", "x"], ["--router"]),
        (["moved-cpu", *URLS, "--policy", "cost"], ["--policy", "--router"]),
        (["moved-cpu", "--policy", "cost"], ["--policy", "--switch live"]),
        (["moved-cpu", "--policy", "best", "--switch", "live"], ["router.policy", "'best'"]),
        (["moved-cpu", "--pool", "big"], ["pool.size", "'big'"]),
        (["moved-cpu", "--launch", "0"], ["up.replicas", "'0'"]),
        (["replay-cpu", *URLS, "--caches", "off"], ["no trace", "--trace"]),
        (
            ["moved-cpu", *URLS, "--caches", "off,lmcache"],
            ["lmcache can't be switched", "--switch restart", "--url"],
        ),
        (
            ["moved-cpu", "--caches", "off,lmcache,vllm-fs", "--switch", "live"],
            ["lmcache and vllm-fs can't be switched", "--switch restart"],
        ),
        (["moved-cpu", "--files-in", "x"], ["--files-in", "--caches"]),
    ],
)
def test_what_cannot_be_run_is_refused_with_its_remedy(
    argv: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if argv[1:3] == ["--url", "a"]:
        argv = [*argv, "--caches", "off"]
    assert run(["bench", "run", *argv], {}) == Exit.USAGE
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize("cache", ["lmcache", "vllm-fs"])
def test_a_cache_that_needs_a_gpu_is_refused_before_anything_starts(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["bench", "run", "moved-cpu", "--tiny", "attention", "--device", "cpu"]
    assert run([*argv, "--caches", f"off,millpond,{cache}"], {}) == Exit.SETUP
    assert f"cache {cache} needs a GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize("cache", ["lmcache", "vllm-fs"])
def test_with_a_hybrid_other_caches_have_to_know_its_block(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare_module, "pick_device", lambda _wanted, _environ: "cuda")
    monkeypatch.setattr(bench_place, "check_rival", lambda _options, _device: None)
    argv = ["bench", "run", "moved-cpu", "--tiny", "hybrid", "--caches", f"off,{cache}"]
    assert run(argv, {"CUDA_VISIBLE_DEVICES": "0,1"}) == Exit.USAGE
    said = capsys.readouterr().err
    assert f"the small hybrid has recurrent layers, and {cache} has to know" in said
    assert "--hybrid-block" in said


def test_a_folder_with_another_run_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text('{"scenario": "another"}')
    argv = ["bench", "run", "moved-cpu", *URLS, "--caches", "off", "--out", str(tmp_path)]
    assert run(argv, {}) == Exit.USAGE
    assert "--resume" in capsys.readouterr().err
    assert run([*argv, "--resume"], {}) == Exit.USAGE
    assert "another --out" in capsys.readouterr().err
    assert (tmp_path / "run.json").read_text() == '{"scenario": "another"}'


def test_a_run_that_is_done_is_reported_where_it_could_not_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", "run", "moved-cpu", "--tiny", "attention", "--device", "cpu"]
    argv += ["--caches", "off,vllm-fs", "--aa-rounds", "0", "--out", str(tmp_path), "--resume"]
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(bench_place, "check_rival", lambda _options, _device: None)
        elsewhere.setattr(Runner, "run", lambda *_: None)
        assert run(argv, {}) == Exit.OK
    assert run(argv, {}) == Exit.SETUP, "periods are waiting"
    for made in periods(
        plan_periods(Design(rounds=1, aa_rounds=0), ["off", "vllm-fs"]), lambda *_: 5.0
    ):
        write_json(tmp_path / "periods" / f"period-{made.plan.number:03}.json", made)
    capsys.readouterr()
    assert run([*argv, "--json"], {}) == Exit.OK
    assert json.loads(capsys.readouterr().out)["data"]["headlines"]


def test_a_run_that_read_a_routers_log_is_not_gone_on_with_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Runner, "run", lambda *_: None)
    log = tmp_path / "access.log"
    log.touch()
    argv = ["bench", "run", "moved-cpu", *URLS, "--caches", "off", "--out", str(tmp_path / "out")]
    argv += ["--router", "http://127.0.0.1:1"]
    assert run([*argv, "--access-log", str(log)], {}) == Exit.OK
    assert run([*argv, "--resume"], {}) == Exit.USAGE
    assert "other options" in capsys.readouterr().err
    assert run([*argv, "--access-log", str(log), "--resume"], {}) == Exit.OK


def test_the_list_has_all_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "list", "--json"], {}) == Exit.OK
    listed = json.loads(capsys.readouterr().out)["data"]["scenarios"]
    assert {each["name"] for each in listed} == set(scenario_files())
    assert run(["bench", "list"], {}) == Exit.OK
    assert "moved-cpu" in capsys.readouterr().out


def saved(path: Path, speed: float) -> str:
    plans = plan_periods(Design(rounds=1, aa_rounds=1), ["off", "millpond"])
    made = periods(
        plans,
        noisy(
            lambda plan, i: (100.0 + i) / (speed if plan.cache == "millpond" else 1.0),
            share=0.02,
            seed=1,
        ),
    )
    record = Record(scenario=SCENARIO, options={}, facts={}, periods=made)
    record.save(path)
    return str(path)


def test_two_records_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = saved(tmp_path / "a.json", 2.0), saved(tmp_path / "b.json", 3.0)
    assert run(["bench", "compare", a, b, "--json"], {}) == Exit.OK
    differences = json.loads(capsys.readouterr().out)["data"]["differences"]
    (found,) = [
        each for each in differences if (each["cache"], each["metric"]) == ("millpond", "ttft_ms")
    ]
    assert found["ratio"]["value"] == pytest.approx(1.5)
    assert found["verdict"] == "faster"
    assert run(["bench", "compare", a, b], {}) == Exit.OK
    shown = capsys.readouterr().out
    assert "g moved, TTFT" in shown
    assert "1.50" in shown


def test_a_file_that_is_no_record_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text("{}")
    a = saved(tmp_path / "a.json", 2.0)
    assert run(["bench", "compare", a, str(tmp_path / "x.json")], {}) == Exit.USAGE
    assert "no record" in capsys.readouterr().err
    assert run(["bench", "compare", str(tmp_path / "gone.json"), a], {}) == Exit.USAGE
