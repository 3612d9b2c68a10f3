"""The arithmetic of the benchmarks and the merge of their results, on planted samples."""

import pytest

from benchmarks import figures
from scripts import bench


def test_a_paired_ratio_is_the_median_of_ratios_and_not_the_ratio_of_medians() -> None:
    off, on = [1.0, 2.0, 10.0], [1.1, 2.0, 30.0]
    found = figures.paired_ratio("x", on, off)
    assert found["x"] == 1.1
    assert sorted(on)[1] / sorted(off)[1] == 1.0


def test_an_interval_holds_the_ratio_and_narrows_with_the_spread() -> None:
    off = [1.0] * 20
    wide = figures.paired_ratio("x", [1.0 + 0.02 * i for i in range(20)], off)
    narrow = figures.paired_ratio("x", [1.0 + 0.0002 * i for i in range(20)], off)
    same = figures.paired_ratio("x", [1.02] * 20, off)
    assert wide["x_low"] < wide["x"] < wide["x_high"]
    assert wide["x_high"] - wide["x_low"] > 10 * (narrow["x_high"] - narrow["x_low"]) > 0
    assert same == {"x": 1.02, "x_low": 1.02, "x_high": 1.02}
    assert wide["x_low"] > 1.0, "the median of 20 is known better than its range"
    assert wide["x_high"] < 1.38


@pytest.mark.parametrize(("on", "off"), [([], []), ([1.0, 2.0], [1.0, 2.0, 3.0])])
def test_pairs_that_are_none_are_refused(on: list[float], off: list[float]) -> None:
    with pytest.raises(ValueError, match=r"no pairs|broadcast"):
        figures.paired_ratio("x", on, off)


def test_rates_are_compared_with_the_echo_of_their_own_round() -> None:
    found = figures.rates({"echo": [100.0, 1000.0, 10.0], "pin": [50.0, 100.0, 9.0]}, "2_clients")
    assert found == {
        "echo_per_s_2_clients": 100.0,
        "pin_per_s_2_clients": 50.0,
        "pin_vs_echo_ratio_2_clients": 0.5,  # of 0.5, 0.1 and 0.9; of the medians it is 0.5 too
    }
    found = figures.rates({"echo": [100.0, 1.0, 2.0], "pin": [100.0, 4.0, 2.0]}, "x")
    assert found["pin_vs_echo_ratio_x"] == 1.0  # of the medians it would be 2


def test_the_copy_ratio_is_the_worst_from_one_mib_on() -> None:
    found = figures.copy_ratios(
        {
            ("store", 64 * 1024): [(1.0, 10.0)],
            ("store", 2**20): [(0.9, 1.0), (0.8, 1.0), (5.0, 1.0)],
            ("load", 2**22): [(1.0, 1.0)],
        }
    )
    assert found == {
        "copy_vs_memcpy_ratio": 0.9,
        "copy_store_64_kib_vs_memcpy_ratio": 0.1,
        "copy_store_1024_kib_vs_memcpy_ratio": 0.9,
        "copy_load_4096_kib_vs_memcpy_ratio": 1.0,
    }


def test_percentiles_are_in_microseconds() -> None:
    found = figures.percentiles([1000 * i for i in range(1, 1000)])
    assert found == {"p50_us": 500.0, "p99_us": 990.0}


@pytest.mark.parametrize("num_keys", [1_000_000, 500_000])
def test_only_what_keys_need_is_scaled_to_a_million(num_keys: int) -> None:
    full_bytes = 20_000_000 + 300 * num_keys
    assert bench.index_mb_per_million(20_000_000, full_bytes, num_keys) == 320.0


def lookup(p50_us: float) -> dict[str, object]:
    percentiles = {"p50_us": p50_us, "p99_us": 2 * p50_us}
    return {
        "hit": percentiles,
        "half": percentiles,
        "miss": percentiles,
        "echo": {"p50_us": 1.0, "p99_us": 2.0},
        "hit_to_echo_ratio": p50_us,
        "num_lookups_each": 10,
        "num_keys": 1_000_000,
        "daemon_empty_rss_bytes": 20_000_000,
        "daemon_rss_bytes": 300_000_000,
    }


def test_results_are_merged_under_flat_names() -> None:
    data = bench.merge(
        {
            "replicas": {"moved_vs_cold_ratio": 30.0},
            "lookup_1": lookup(80.0),
            "lookup_8": lookup(400.0),
        }
    )
    assert data["lookup_1024_keys_p50_us"] == 80.0
    assert data["lookup_1024_keys_8_clients_p99_us"] == 800.0
    assert data["index_mb_per_million_blocks"] == 300.0
    assert data["moved_vs_cold_ratio"] == 30.0
    assert all(isinstance(value, int | float) for value in data.values())
    assert next(iter(dict(bench.ordered(data)))) == "moved_vs_cold_ratio"


def test_what_was_not_measured_is_missing_and_nothing_is_measured_twice() -> None:
    assert bench.merge({"copies": {"copy_vs_memcpy_ratio": 1.0}}) == {"copy_vs_memcpy_ratio": 1.0}
    with pytest.raises(ValueError, match=r"replicas: \['x'\] was measured twice"):
        bench.merge({"copies": {"x": 1}, "replicas": {"x": 2}})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("moved_vs_cold_ratio", 20.0, ">= 20 met"),
        ("moved_vs_cold_ratio", 19.9, ">= 20 MISSED"),
        ("cold_on_vs_off_ratio", 1.03, "<= 1.03 met"),
        ("cold_on_vs_off_ratio", 1.04, "<= 1.03 MISSED"),
        ("lookup_num_keys", 5, ""),
    ],
)
def test_a_target_is_met_or_missed(name: str, value: float, expected: str) -> None:
    assert bench.verdict(name, value) == expected
