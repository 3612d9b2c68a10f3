"""The contract of eviction policies, which each one's tests inherit, and what each promises."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.pool.policies.admission import AlwaysAdmit, SecondTouch
from millpond.pool.policies.arc import ArcPolicy
from millpond.pool.policies.base import EvictionPolicy, PolicyFactory
from millpond.pool.policies.ghosts import Ghosts, short_key
from millpond.pool.policies.lru import LruPolicy
from millpond.pool.policies.order import Order

slots = st.integers(1, 12)
times = st.integers(0, 5)
STEPS = ("add", "add", "discard", "touch", "hand up", "evict", "leave", "clear")
steps = st.lists(st.tuples(st.sampled_from(STEPS), slots, slots, times), max_size=80)
Step = tuple[str, int, int, int]


def key_of(slot: int, life: int) -> bytes:
    """Return the key that ``slot`` holds; few, so that keys come back to other slots."""
    return hashlib.sha256(bytes([(slot + life) % 20])).digest()


@dataclass
class Told:
    """What a policy was told: the last use of each evictable slot, and who is resident."""

    evictable: dict[int, int] = field(default_factory=dict)
    residents: dict[int, bytes] = field(default_factory=dict)
    lives: Counter[int] = field(default_factory=Counter)

    def take(self, policy: EvictionPolicy, step: Step) -> None:
        """Do one step to the policy, as the pool would, and note it."""
        verb, slot, other, at = step
        if verb == "add":
            if slot not in self.residents:
                self.lives[slot] += 1
                self.residents[slot] = key_of(slot, self.lives[slot])
                policy.enter(slot, self.residents[slot])
            policy.add(slot, at)
            self.evictable[slot] = at
        elif verb == "touch":
            policy.touch(iter((slot, other)), at)
            if slot in self.evictable:
                self.evictable[slot] = at
        elif verb == "discard":
            policy.discard(slot)
            self.evictable.pop(slot, None)
        elif verb == "hand up" and other not in self.evictable:
            policy.hand_up(slot, other)
        elif verb == "clear" and at == 0:
            policy.clear()
            self.evictable.clear()
            self.residents.clear()
        elif verb == "leave":
            policy.leave(slot, None)
            self._note_left(slot)
        elif verb == "evict" and (victim := policy.victim()) is not None:
            policy.leave(victim, self.residents[victim])
            self._note_left(victim)

    def _note_left(self, slot: int) -> None:
        self.evictable.pop(slot, None)
        self.residents.pop(slot, None)


class PolicyContract:
    """What the pool relies on, whatever a policy prefers."""

    make: ClassVar[PolicyFactory]

    def test_knows_just_what_it_was_told(self) -> None:
        @given(steps=steps)
        def check(steps: list[Step]) -> None:
            policy, told = self.make(), Told()
            for step in steps:
                told.take(policy, step)
                assert sorted(policy) == sorted(told.evictable)
                assert len(policy) == len(told.evictable)
                assert {slot for slot in range(14) if slot in policy} == set(told.evictable)

        check()

    def test_victim_is_evictable_and_there_is_one_while_anything_is(self) -> None:
        @given(steps=steps)
        def check(steps: list[Step]) -> None:
            policy, told = self.make(), Told()
            for step in steps:
                told.take(policy, step)
                victim = policy.victim()
                assert victim in told.evictable if told.evictable else victim is None
                assert policy.victim() == victim, "asking changes nothing"

        check()

    def test_evicting_gives_up_each_slot_once(self) -> None:
        @given(steps=steps)
        def check(steps: list[Step]) -> None:
            policy, told = self.make(), Told()
            for step in steps:
                told.take(policy, step)
            victims: list[int] = []
            while (victim := policy.victim()) is not None:
                victims.append(victim)
                policy.leave(victim, told.residents[victim])
            assert sorted(victims) == sorted(told.evictable)

        check()

    def test_of_slots_used_alike_the_oldest_goes(self) -> None:
        policy = self.make()
        for slot in range(1, 6):
            policy.enter(slot, key_of(slot, 0))
            policy.add(slot, 10 - slot)
        assert policy.victim() == 5
        policy.touch(iter((5,)), 11)
        assert policy.victim() == 4

    def test_end_of_a_prefix_is_touched_whoever_asks_for_more(self) -> None:
        policy = self.make()
        asked: list[int] = []

        def slots_up() -> Iterable[int]:
            for slot in (3, 2, 1):
                asked.append(slot)
                yield slot

        for slot in (1, 2, 3):
            policy.enter(slot, key_of(slot, 0))
        policy.add(3, 0)
        policy.touch(slots_up(), 1)
        assert asked[0] == 3
        assert list(policy) == [3], "a use makes nothing evictable"


class TestLru(PolicyContract):
    make = LruPolicy

    @given(steps=steps)
    def test_victim_was_used_the_longest_ago(self, steps: list[Step]) -> None:
        policy, told = LruPolicy(), Told()
        for step in steps:
            told.take(policy, step)
            oldest = min(((at, slot) for slot, at in told.evictable.items()), default=None)
            assert policy.victim() == (None if oldest is None else oldest[1])


class TestArc(PolicyContract):
    make = ArcPolicy

    @staticmethod
    def filled(num_slots: int) -> ArcPolicy:
        policy = ArcPolicy()
        for slot in range(1, num_slots + 1):
            policy.enter(slot, key_of(slot, 0))
            policy.add(slot, slot)
        return policy

    def test_slot_that_was_used_again_outlives_younger_ones(self) -> None:
        policy = self.filled(10)
        policy.touch(iter((1,)), 1)
        victims: list[int] = []
        while len(victims) < 5:
            victim = policy.victim()
            assert victim is not None
            victims.append(victim)
            policy.leave(victim, None)
        assert victims == [2, 3, 4, 5, 6]

    def test_use_of_an_end_counts_for_all_before_it(self) -> None:
        policy = ArcPolicy()
        for slot in (1, 2, 3):
            policy.enter(slot, key_of(slot, 0))
        policy.add(3, 0)
        policy.touch(iter((3, 2, 1)), 1)
        assert policy.statistics()["num_frequent"] == 3

    def test_frequency_is_handed_up(self) -> None:
        policy = ArcPolicy()
        for slot in (1, 2):
            policy.enter(slot, key_of(slot, 0))
        policy.touch(iter((2,)), 1)
        policy.hand_up(2, 1)
        assert policy.statistics()["num_frequent"] == 2

    def test_key_that_comes_back_is_frequent_and_gives_its_list_a_larger_share(self) -> None:
        policy = self.filled(10)
        before = policy.statistics()["recent_permille"]
        policy.leave(1, key_of(1, 0))
        policy.enter(1, key_of(1, 0))
        now = policy.statistics()
        assert (now["num_frequent"], now["num_ghost_hits"], now["num_ghosts"]) == (1, 1, 0)
        assert now["recent_permille"] > before
        policy.add(1, 11)
        policy.leave(1, key_of(1, 0))
        policy.enter(1, key_of(1, 0))
        assert policy.statistics()["recent_permille"] == before

    def test_key_that_left_for_another_reason_is_no_ghost(self) -> None:
        policy = self.filled(3)
        policy.leave(1, None)
        policy.enter(1, key_of(1, 0))
        assert policy.statistics()["num_ghost_hits"] == 0

    def test_ghosts_are_at_most_as_many_as_slots(self) -> None:
        policy = self.filled(50)
        for number in range(1000):
            victim = policy.victim()
            assert victim is not None
            policy.leave(victim, hashlib.sha256(b"old %d" % number).digest())
            policy.enter(victim, hashlib.sha256(b"new %d" % number).digest())
            policy.add(victim, 100 + number)
            if number % 3 == 0:
                policy.touch(iter((victim,)), 100 + number)
            assert policy.statistics()["num_ghosts"] <= 51

    def test_slot_that_never_entered_cannot_be_added(self) -> None:
        with pytest.raises(ValueError, match="slot 1"):
            ArcPolicy().add(1, 0)


@pytest.mark.parametrize("verb", ["move", "take out and in"])
def test_garbage_of_an_order_is_bounded(verb: str) -> None:
    order = Order()
    for slot in range(1, 101):
        order.add(slot, 0)
    for at in range(1, 20_000):
        slot = 1 + at % 100
        if verb != "move":
            order.discard(slot)
        order.add(slot, at)
    assert len(order._heap) <= 2 * len(order) + 1024 + 1


# ---------------------------------------------------------------- keys that are remembered


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "put", "take", "trim", "room"]), st.integers(1, 40)),
        max_size=60,
    )
)
def test_ghosts_are_the_youngest_keys_and_each_is_taken_once(steps: list[tuple[str, int]]) -> None:
    ghosts, model = Ghosts(), list[int]()
    for verb, number in steps:
        if verb == "put" and number not in model:
            ghosts.put(number)  # so few share no cell
            model.append(number)
        elif verb == "take":
            assert ghosts.take(number) == (number in model)
            model = [each for each in model if each != number]
        elif verb == "trim":
            ghosts.trim(number)
            model = model[-number:]
        elif verb == "room":
            ghosts.make_room(number * 100)
        assert len(ghosts) == len(model)


def test_ghosts_forget_the_oldest_when_full() -> None:
    ghosts = Ghosts()
    for number in range(1, 2000):
        ghosts.put(number)
    assert len(ghosts) == 1024
    assert [ghosts.take(number) for number in (1, 1999 - 1024, 1999 - 1023, 1999)] == [
        False,
        False,
        True,
        True,
    ]


def test_ghosts_remember_through_growth() -> None:
    ghosts = Ghosts()
    for number in range(1, 1001):
        ghosts.put(number)
    ghosts.make_room(5000)
    for number in range(1001, 5001):
        ghosts.put(number)
    assert all(ghosts.take(number) for number in range(1, 5001))


def test_no_key_stands_for_none() -> None:
    assert short_key(bytes(32)) != 0


# ---------------------------------------------------------------- admission


def test_always_admits_all() -> None:
    assert AlwaysAdmit().admit(array("Q", [1, 2, 3]), 7) == 3


def test_second_touch_admits_what_another_request_had_offered() -> None:
    policy = SecondTouch(num_keys=1000)
    keys = array("Q", range(10, 20))
    assert policy.admit(keys[:4], 1) == 0
    assert policy.admit(keys, 1) == 0, "a request that goes on is no second one"
    assert policy.admit(keys[:6], 2) == 6
    assert policy.admit(keys, 2) == 10
    assert policy.admit(keys, 1) == 0


def test_second_touch_admits_no_block_after_one_that_it_does_not() -> None:
    policy = SecondTouch(num_keys=1000)
    policy.admit(array("Q", [1, 2, 4]), 1)
    assert policy.admit(array("Q", [1, 2, 3, 4]), 2) == 2


def test_second_touch_remembers_all_of_a_prefix_that_fits() -> None:
    policy = SecondTouch(num_keys=1000)
    keys = array("Q", (short_key(hashlib.sha256(b"%d" % n).digest()) for n in range(1000)))
    assert policy.admit(keys, 1) == 0
    assert policy.admit(keys, 2) == 1000


def test_second_touch_forgets_what_was_asked_for_long_ago() -> None:
    policy = SecondTouch(num_keys=10)
    policy.admit(array("Q", [1, 2]), 1)
    policy.admit(array("Q", range(100, 108)), 1)
    assert policy.admit(array("Q", [1]), 2) == 1, "in the old generation, and young again"
    policy.admit(array("Q", range(200, 209)), 1)
    assert policy.admit(array("Q", [1]), 2) == 1
    assert policy.admit(array("Q", [2]), 2) == 0
    for start in range(1000, 2000, 10):
        policy.admit(array("Q", range(start, start + 10)), 1)
    assert policy.admit(array("Q", [1]), 2) == 0
    assert policy.statistics()["num_remembered"] <= 20


def test_second_touch_forgets_what_is_cleared() -> None:
    policy = SecondTouch()
    policy.admit(array("Q", [2]), 1)
    policy.clear()
    assert policy.admit(array("Q", [2]), 3) == 0
