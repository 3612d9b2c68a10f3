"""Reports: found by the client's name, bounded, and totalled by replica."""

import pytest

from millpond.model.limits import NAME_LENGTH_MAX, REPLICAS_SHOWN_MAX, REPORTS_KEPT_MAX
from millpond.service.protocol import Report
from millpond.service.reports import REPORTS_REPLIED_MAX, Reports


def report(request_id: str, computed: int = 1, local: int = 0, **writers: int) -> Report:
    loaded = sum(writers.values())
    return Report(
        request_id=request_id,
        prompt_tokens=computed + local + loaded,
        computed_tokens=computed,
        local_tokens=local,
        loaded_tokens=loaded,
        writers=writers,
    )


def test_found_by_what_the_client_said() -> None:
    reports = Reports()
    mine = report("chatcmpl-mine-0a1b2c3d", b=5)
    reports.add("a", report("chatcmpl-other-0a1b2c3d"))
    reports.add("a", mine)
    assert reports.named("mine") == (("a", mine),)
    assert reports.named("min") == ()


def test_latest_are_oldest_first() -> None:
    reports = Reports()
    for i in range(5):
        reports.add("a", report(f"r{i}"))
    assert [r.request_id for _, r in reports.latest(2)] == ["r3", "r4"]
    assert len(reports.latest(100)) == 5
    assert reports.latest(0) == reports.latest(-1) == ()


def test_the_oldest_are_forgotten() -> None:
    reports = Reports()
    for i in range(REPORTS_KEPT_MAX + 3):
        reports.add("a", report(f"r{i}"))
    assert reports.named("r2") == ()
    assert len(reports.named("r3")) == 1
    assert len(reports.latest(REPORTS_KEPT_MAX)) == REPORTS_REPLIED_MAX
    assert len(reports._by_name) == len(reports._kept) == REPORTS_KEPT_MAX


def test_a_name_used_often_is_answered_with_the_latest() -> None:
    reports = Reports()
    for i in range(REPORTS_REPLIED_MAX + 1):
        reports.add("a", report("same", computed=i))
    found = reports.named("same")
    assert [r.computed_tokens for _, r in found] == list(range(1, REPORTS_REPLIED_MAX + 1))


def test_totals_by_replica_and_writer() -> None:
    reports = Reports()
    reports.add("a", report("1", computed=10, local=20, b=3, c=4))
    reports.add("a", report("2", computed=1, b=2))
    reports.add("b", report("3", computed=7))
    assert reports.statistics() == {
        "a": {
            "num_requests": 2,
            "prompt_tokens": 40,
            "computed_tokens": 11,
            "local_tokens": 20,
            "loaded_tokens": 9,
            "loaded_tokens_by_writer": {"c": 4, "b": 5},
        },
        "b": {
            "num_requests": 1,
            "prompt_tokens": 7,
            "computed_tokens": 7,
            "local_tokens": 0,
            "loaded_tokens": 0,
            "loaded_tokens_by_writer": {},
        },
    }


def test_totals_are_kept_for_a_bounded_number_of_names() -> None:
    reports = Reports()
    for i in range(1100):
        reports.add(f"replica-{i}", report("r", **{f"w{i}": 1}))
        reports.add("steady", report("r", **{f"w{i}": 1}))
    totals = reports.statistics()
    assert len(totals) == REPLICAS_SHOWN_MAX
    assert totals["steady"]["num_requests"] == 1100  # type: ignore[index]
    written = totals["steady"]["loaded_tokens_by_writer"]  # type: ignore[index]
    assert len(written) == REPLICAS_SHOWN_MAX


@pytest.mark.parametrize(
    "wrong",
    [
        Report(
            request_id="r",
            prompt_tokens=5,
            computed_tokens=1,
            local_tokens=1,
            loaded_tokens=1,
            writers={"a": 1},
        ),
        Report(
            request_id="r",
            prompt_tokens=3,
            computed_tokens=1,
            local_tokens=1,
            loaded_tokens=1,
            writers={},
        ),
        report("r", computed=-1, a=1),
        report("r", a=-1, b=2),
        report("r" * (NAME_LENGTH_MAX + 1)),
        report(""),
        report("r", **{"w" * (NAME_LENGTH_MAX + 1): 1}),
    ],
)
def test_what_does_not_add_up_is_refused(wrong: Report) -> None:
    reports = Reports()
    with pytest.raises(ValueError, match=r"sum|characters|long"):
        reports.add("a", wrong)
    assert reports.latest(1) == ()
    assert reports.statistics() == {}
