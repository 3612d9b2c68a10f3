"""The contract of placement policies, which each one's tests inherit, and what each promises."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.router.placement import alternate
from millpond.router.placement.base import Asked, Placement, ReplicaLoad, within_bound
from millpond.router.placement.chosen import Policy, make_placement
from millpond.router.placement.cost import Cost, work_of
from millpond.router.placement.estimates import Constants, Estimates, Work
from millpond.router.placement.pinned import Pinned
from millpond.router.placement.prefix_affinity import LOAD_BOUND_RATIO, PrefixAffinity
from tests.meta.checks import python_files, third_party_imports

NAMES = "abcde"

loads = st.builds(
    ReplicaLoad,
    name=st.sampled_from(NAMES),
    is_available=st.booleans(),
    num_running=st.integers(0, 20),
    queued_tokens=st.integers(0, 100_000),
)
fleets = st.lists(loads, max_size=5, unique_by=lambda each: each.name)
names_of_conversations = st.none() | st.sampled_from(["one", "two", "three"])
askings = st.builds(
    Asked,
    num_tokens=st.integers(0, 50_000),
    conversation=names_of_conversations,
    opening=names_of_conversations,
    local_tokens=st.dictionaries(st.sampled_from(NAMES + "z"), st.integers(0, 60_000)),
    pooled_tokens=st.integers(0, 60_000),
)
calls = st.lists(st.tuples(askings, fleets), max_size=5)


def fleet(*names: str, **running: int) -> list[ReplicaLoad]:
    """Return available replicas; ``running`` says how many requests each has."""
    return [
        ReplicaLoad(name, is_available=True, num_running=running.get(name, 0)) for name in names
    ]


def choices(policy: Placement, asked: Sequence[Asked], replicas: list[ReplicaLoad]) -> str:
    """Return the names that were chosen one after the other."""
    return "".join(policy.choose(each, replicas) or "-" for each in asked)


def make(policy: Policy) -> Placement:
    return make_placement(policy, Estimates())


# ---------------------------------------------------------------- the contract of all

every_policy = pytest.mark.parametrize("policy", Policy)
"""What the router relies on, whatever a policy prefers; a new policy takes part by its name."""


@every_policy
@given(made=calls)
def test_only_available_replicas_are_chosen_and_one_if_there_is_any(
    policy: Policy, made: list[tuple[Asked, list[ReplicaLoad]]]
) -> None:
    placement = make(policy)
    for asked, replicas in made:
        available = {each.name for each in replicas if each.is_available}
        chosen = placement.choose(asked, replicas)
        assert chosen in available if available else chosen is None


@every_policy
@given(made=calls, chance=st.randoms())
def test_the_same_calls_make_the_same_choices_in_any_order_of_replicas(
    policy: Policy, made: list[tuple[Asked, list[ReplicaLoad]]], chance: Random
) -> None:
    one, other = make(policy), make(policy)
    for asked, replicas in made:
        shuffled = list(replicas)
        chance.shuffle(shuffled)
        assert one.choose(asked, replicas) == other.choose(asked, shuffled)


@every_policy
def test_a_replica_that_comes_back_is_chosen_again(policy: Policy) -> None:
    placement = make(policy)
    away = [ReplicaLoad("a", is_available=False)]
    assert placement.choose(Asked(10, "x", "y"), away) is None
    assert placement.choose(Asked(10, "x", "y"), fleet("a")) == "a"


# ---------------------------------------------------------------- each by itself


class TestRoundRobin:
    def make(self) -> Placement:
        return make(Policy.ROUND_ROBIN)

    def test_each_gets_its_turn(self) -> None:
        assert choices(self.make(), [Asked(1)] * 7, fleet("c", "a", "b")) == "abcabca"

    def test_who_leaves_is_passed_over(self) -> None:
        policy = self.make()
        assert choices(policy, [Asked(1)] * 2, fleet("a", "b", "c")) == "ab"
        assert choices(policy, [Asked(1)] * 2, fleet("a", "b")) == "ab"


class TestAlternate:
    def make(self) -> Placement:
        return make(Policy.ALTERNATE)

    @given(st.lists(st.sampled_from(["x", "y", "z"]), max_size=30), st.integers(2, 5))
    def test_no_conversation_stays_where_it_was(self, order: list[str], num: int) -> None:
        policy, turns = self.make(), dict.fromkeys("xyz", "")
        for name in order:
            turns[name] += policy.choose(Asked(1, conversation=name), fleet(*NAMES[:num])) or ""
        for chosen in turns.values():
            assert all(one != other for one, other in pairwise(chosen))

    def test_conversations_begin_in_turn(self) -> None:
        asked = [Asked(1, conversation=name) for name in "xyzx"]
        assert choices(self.make(), asked, fleet("a", "b", "c")) == "abcb"

    def test_without_a_name_the_opening_tells_them_apart(self) -> None:
        asked = [Asked(1, opening=name) for name in "xyxy"]
        assert choices(self.make(), asked, fleet("a", "b")) == "abba"

    def test_only_so_many_conversations_are_remembered(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(alternate, "CONVERSATIONS_MAX", 2)
        asked = [Asked(1, conversation=name) for name in ("x", "y", "z", "x")]
        # x is new again: its next turn is the fourth beginning, not the turn after "a".
        assert choices(self.make(), asked, fleet("a", "b", "c")) == "abca"


class TestPinned:
    def make(self) -> Placement:
        return make(Policy.PINNED)

    @given(st.text(), st.sets(st.sampled_from(NAMES), min_size=2))
    def test_only_conversations_of_who_leaves_move(self, name: str, there: set[str]) -> None:
        policy, asked = Pinned(), Asked(1, conversation=name)
        before = policy.choose(asked, fleet(*there))
        for gone in there:
            after = policy.choose(asked, fleet(*there - {gone}))
            assert before in (after, gone)

    def test_conversations_spread(self) -> None:
        policy = Pinned()
        asked = [Asked(1, conversation=str(i)) for i in range(300)]
        counts = Counter(choices(policy, asked, fleet("a", "b", "c")))
        assert min(counts[name] for name in "abc") > 70

    def test_without_a_name_the_least_loaded_is_taken(self) -> None:
        assert Pinned().choose(Asked(1, opening="x"), fleet("a", "b", a=2, b=1)) == "b"


class TestLeastLoaded:
    def make(self) -> Placement:
        return make(Policy.LEAST_LOADED)

    def test_requests_count_before_tokens(self) -> None:
        replicas = [
            ReplicaLoad("a", is_available=True, num_running=2, queued_tokens=0),
            ReplicaLoad("b", is_available=True, num_running=1, queued_tokens=90),
            ReplicaLoad("c", is_available=True, num_running=1, queued_tokens=80),
        ]
        assert self.make().choose(Asked(1), replicas) == "c"


class TestPrefixAffinity:
    def make(self) -> Placement:
        return make(Policy.PREFIX_AFFINITY)

    def test_the_longest_prefix_wins(self) -> None:
        asked = Asked(1000, local_tokens={"a": 100, "b": 900})
        assert self.make().choose(asked, fleet("a", "b", "c", b=0)) == "b"

    @given(askings, fleets)
    def test_nobody_is_chosen_beyond_the_load_bound(
        self, asked: Asked, replicas: list[ReplicaLoad]
    ) -> None:
        available = [each for each in replicas if each.is_available]
        chosen = self.make().choose(asked, replicas)
        if chosen is not None:
            num_after = 1 + sum(each.num_running for each in available)
            running = next(each.num_running for each in available if each.name == chosen)
            limit = math.ceil(LOAD_BOUND_RATIO * num_after / len(available))
            assert running + 1 <= limit

    def test_a_popular_prefix_does_not_draw_everything_to_one(self) -> None:
        policy, running = self.make(), Counter[str]()
        asked = Asked(1000, local_tokens={"a": 1000})
        for _ in range(100):
            running[policy.choose(asked, fleet("a", "b", "c", "d", **running)) or "-"] += 1
        assert running["a"] == max(running.values()) <= math.ceil(1.25 * 100 / 4)
        assert len(running) == 4

    def test_a_bound_below_the_mean_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"0\.5"):
            PrefixAffinity(0.5)


@given(fleets.filter(bool), st.floats(1, 4))
def test_somebody_is_always_within_the_bound(replicas: list[ReplicaLoad], ratio: float) -> None:
    least = min(each.num_running for each in replicas)
    assert any(each.num_running == least for each in within_bound(replicas, ratio))


class TestCost:
    def make(self) -> Placement:
        return make(Policy.COST)

    constants = Constants(base_s=0.01, prefill_s_per_token=1e-3, load_s_per_token=1e-5)

    def choose(self, asked: Asked, *replicas: ReplicaLoad) -> str | None:
        return Cost(Estimates(self.constants)).choose(asked, replicas)

    def test_a_local_prefix_is_worth_a_short_queue(self) -> None:
        asked = Asked(1000, local_tokens={"b": 900})
        free = ReplicaLoad("a", is_available=True)
        busy = ReplicaLoad("b", is_available=True, num_running=3, queued_tokens=800)
        assert self.choose(asked, free, busy) == "b"

    def test_and_no_long_one(self) -> None:
        asked = Asked(1000, local_tokens={"b": 900})
        free = ReplicaLoad("a", is_available=True)
        busy = ReplicaLoad("b", is_available=True, num_running=3, queued_tokens=1000)
        assert self.choose(asked, free, busy) == "a"

    def test_with_the_pool_a_free_replica_is_nearly_as_good(self) -> None:
        asked = Asked(1000, local_tokens={"b": 900}, pooled_tokens=900)
        free = ReplicaLoad("a", is_available=True)
        busy = ReplicaLoad("b", is_available=True, num_running=3, queued_tokens=100)
        assert self.choose(asked, free, busy) == "a"
        assert self.choose(asked, free, ReplicaLoad("b", is_available=True)) == "b"

    def test_of_equals_the_one_with_fewer_requests(self) -> None:
        assert self.choose(Asked(10), *fleet("a", "b", a=1)) == "b"

    @given(askings, loads)
    def test_the_cheapest_way_is_planned(self, asked: Asked, load: ReplicaLoad) -> None:
        estimates = Estimates(self.constants)
        work = work_of(asked, load, estimates)
        local = min(asked.num_tokens, asked.local_tokens.get(load.name, 0))
        assert work.computed + work.loaded <= asked.num_tokens - local
        everything = Work(load.queued_tokens, asked.num_tokens - local, 0)
        assert estimates.predict_s(work) <= estimates.predict_s(everything)


# ---------------------------------------------------------------- what is learnt


@given(st.floats(0.001, 0.1), st.floats(1e-5, 1e-2), st.floats(1e-7, 1e-6))
def test_constants_are_found_from_what_was_measured(
    base_s: float, prefill: float, load: float
) -> None:
    true = Estimates(Constants(base_s, prefill, load))
    learnt = Estimates()
    for _ in range(600):
        for work in (Work(0, 1, 0), Work(500, 20_000, 0), Work(0, 1, 10_000_000)):
            learnt.learn(work, true.predict_s(work))
    for work in (Work(0, 10, 0), Work(1000, 30_000, 0), Work(0, 10, 20_000_000)):
        assert learnt.predict_s(work) == pytest.approx(true.predict_s(work), rel=0.1)


def test_one_odd_measurement_moves_a_constant_by_a_tenth() -> None:
    estimates = Estimates(Constants(0.0, 1e-3, 1e-5))
    estimates.learn(Work(0, 1000, 0), 11.0)
    assert estimates.constants.prefill_s_per_token == pytest.approx(2e-3)


@given(st.builds(Work, *[st.integers(0, 10**6)] * 3), st.floats(0, 1e4))
def test_constants_stay_positive(work: Work, ttft_s: float) -> None:
    estimates = Estimates()
    for _ in range(5):
        estimates.learn(work, ttft_s)
    constants = estimates.constants
    assert min(constants.base_s, constants.prefill_s_per_token, constants.load_s_per_token) > 0


# ---------------------------------------------------------------- purity

IMPURE = {"asyncio", "logging", "random", "secrets", "selectors", "socket", "threading", "time"}


def test_policies_have_no_clock_socket_thread_chance_or_log() -> None:
    places = ("src/millpond/router/placement",)
    found = {where: third_party_imports(text) & IMPURE for where, text in python_files(*places)}
    assert len(found) > len(Policy)
    assert {where: names for where, names in found.items() if names} == {}
