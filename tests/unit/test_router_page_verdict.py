"""The live page's verdict: what counts, what it says when it cannot know, and what it measures."""

import pytest

from millpond.router.metrics import main_source
from millpond.router.page.verdict import Finding, Verdict, judge
from millpond.router.page.window import Sample
from millpond.router.records import Attribution

BASE_S, S_PER_TOKEN, LOADED_S = 0.1, 1e-4, 0.3


def sample(
    computed: int, local: int = 0, ttft_s: float | None = None, moved: bool = False, **writers: int
) -> Sample:
    """Return a request that ``b`` served and reported."""
    loaded = sum(writers.values())
    tokens = Attribution(
        source="pool",
        reader="b",
        prompt_tokens=computed + local + loaded,
        computed_tokens=computed,
        local_tokens=local,
        loaded_tokens=loaded,
        writers=writers,
        num_reports=1,
    )
    source = main_source(tokens)
    return Sample(arrived_at=0.0, tokens=tokens, source=source, is_moved=moved, ttft_s=ttft_s)


def computed(*sizes: int, slower_s: float = 0.0) -> list[Sample]:
    """Return requests that computed everything, in the time that it takes."""
    return [sample(size, ttft_s=BASE_S + S_PER_TOKEN * size + slower_s) for size in sizes]


def loaded(num_requests: int, ttft_s: float | None = LOADED_S) -> list[Sample]:
    """Return requests of 10,000 tokens that another replica had computed, and 1,000 new ones."""
    return [sample(1000, ttft_s=ttft_s, moved=True, a=10_000) for _ in range(num_requests)]


def verdict(*samples: Sample, has_pool: bool = True, num_unreported: int = 0) -> Verdict:
    return judge(samples, has_pool=has_pool, num_unreported=num_unreported)


SIZES = tuple(range(1000, 21_000, 1000))


def test_a_few_requests_are_no_verdict() -> None:
    found = verdict(*loaded(19), num_unreported=1234)
    assert found.finding is Finding.TOO_FEW
    assert "19 of the 20" in found.sentence
    assert "not counted: 1,234" in found.counted
    assert verdict(*loaded(20)).finding is not Finding.TOO_FEW


def test_without_a_pool_nobody_knows() -> None:
    found = verdict(has_pool=False, num_unreported=7)
    assert found.finding is Finding.NO_POOL
    assert "guess" in found.sentence


def test_what_was_reported_before_the_pool_went_still_counts_and_says_so() -> None:
    found = verdict(*computed(*SIZES), *loaded(10), has_pool=False)
    assert found.finding is Finding.PAYS
    assert "The pool is away" in found.counted
    assert "away" not in verdict(*computed(*SIZES), *loaded(10)).counted


def test_nothing_is_shared_where_no_prompt_was_held() -> None:
    assert verdict(*computed(*SIZES)).finding is Finding.NOTHING_HELD


def test_nothing_is_to_do_where_requests_stay_with_their_prefix() -> None:
    own = [sample(10, 500, b=200) for _ in range(30)]
    found = verdict(*own)
    assert found.finding is Finding.NOTHING_MOVED
    assert "0 needed elsewhere" in found.counted


@pytest.mark.parametrize(
    ("num_moved", "finding"), [(0, "nothing-held"), (1, "nothing-held"), (10, "not-loaded")]
)
def test_requests_that_move_and_load_nothing_point_at_the_pool(
    num_moved: int, finding: str
) -> None:
    samples = [sample(1000, moved=i < num_moved) for i in range(40)]
    found = verdict(*samples)
    assert found.finding == finding
    assert ("25 % of requests went" in found.sentence) == (finding == "not-loaded")


def test_what_sharing_saves_is_the_time_that_computing_takes_less_the_time_it_took() -> None:
    found = verdict(*computed(*SIZES), *loaded(10))
    assert found.finding is Finding.PAYS
    assert found.saved_s == pytest.approx(BASE_S + 11_000 * S_PER_TOKEN - LOADED_S)
    assert found.sentence == (
        "100 % of prefix tokens were needed on another replica than the one that computed them; "
        "sharing saves a request that needs them about 900 ms."
    )
    assert "30 requests" in found.counted
    assert "100,000 needed elsewhere" in found.counted


def test_the_share_is_of_what_was_held_and_not_rounded_up() -> None:
    local = [sample(10, 199_800) for _ in range(10)]
    found = verdict(*computed(*SIZES), *local, *loaded(10), sample(1, 0, b=100_000))
    assert found.sentence.startswith("4 % of prefix tokens"), "100,000 of 2,198,000"
    local += [sample(10, 10**6) for _ in range(10)]
    found = verdict(*computed(*SIZES), *local, *loaded(10))
    assert found.sentence.startswith("Less than 1 % of prefix tokens")


def test_sharing_that_does_not_pay_is_said_to() -> None:
    found = verdict(*computed(*SIZES), *loaded(10, ttft_s=2.7))
    assert found.finding is Finding.COSTS
    assert found.saved_s == pytest.approx(-1.5)
    assert "waits about 1.5 s longer" in found.sentence


def test_a_difference_of_nothing_is_none() -> None:
    found = verdict(*computed(*SIZES), *loaded(10, ttft_s=1.17))
    assert found.finding is Finding.NO_DIFFERENCE


@pytest.mark.parametrize(
    ("without", "needing", "words"),
    [
        (computed(*SIZES), loaded(10, ttft_s=None), "there are 0) and 5"),
        (computed(*SIZES), loaded(4), "there are 4) and 5"),
        (computed(1000, 20_000), loaded(20), "of any size 2"),
        (computed(*[1000] * 20), loaded(10), "of any size 20"),
        (computed(*[50_000] * 20), loaded(10), "of any size 20"),
        (computed(*range(100, 2000, 100)), loaded(10), "of any size 19"),
    ],
    ids=["no streams", "few streams", "few without", "all short", "all long", "much shorter"],
)
def test_times_that_cannot_be_compared_are_not(
    without: list[Sample], needing: list[Sample], words: str
) -> None:
    found = verdict(*without, *needing)
    assert found.finding is Finding.UNTIMED
    assert found.saved_s is None
    assert "not known yet" in found.sentence
    assert words in found.counted


def test_prompts_of_one_size_are_compared_with_each_other() -> None:
    found = verdict(*computed(*[11_000] * 20), *loaded(10))
    assert found.saved_s == pytest.approx(0.9)


def test_many_short_requests_do_not_hide_what_long_ones_take() -> None:
    short = [sample(20 + i % 7, 5000, ttft_s=BASE_S + 0.005 * (i % 7)) for i in range(200)]
    found = verdict(*short, *computed(8000, 9000, 10_000, 11_000, 12_000), *loaded(10))
    assert found.saved_s == pytest.approx(0.9, rel=0.1)


def test_a_few_that_sat_in_a_queue_do_not_bend_the_line() -> None:
    queued = computed(2000, 7000, slower_s=60.0)
    found = verdict(*computed(*SIZES), *queued, *loaded(10))
    assert found.saved_s == pytest.approx(0.9, rel=0.1)
    found = verdict(*computed(*SIZES), *loaded(10), *loaded(2, ttft_s=60.0))
    assert found.saved_s == pytest.approx(0.9)


def test_what_a_replica_had_written_itself_was_not_needed_elsewhere() -> None:
    own = [sample(1000, ttft_s=0.2, b=10_000) for _ in range(10)]
    found = verdict(*computed(*SIZES), *own)
    assert found.finding is Finding.NOTHING_MOVED
    # Nor do its loads say what computing takes.
    found = verdict(*computed(1000, 20_000), *own, *loaded(10))
    assert found.finding is Finding.UNTIMED


@pytest.mark.parametrize(
    ("ttft_s", "words"),
    [(1.1, "about 100 ms"), (0.2, "about 1.0 s"), (0.21, "about 990 ms")],
)
def test_times_have_the_unit_that_suits(ttft_s: float, words: str) -> None:
    assert words in verdict(*computed(*SIZES), *loaded(10, ttft_s=ttft_s)).sentence


def test_long_times_have_no_digits_that_nobody_knows() -> None:
    slow = [sample(size, ttft_s=size / 500) for size in SIZES]
    assert "about 22 s." in verdict(*slow, *loaded(10)).sentence
