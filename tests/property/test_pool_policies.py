"""The contract of eviction policies, which each one's tests inherit, and LRU's own promise."""

from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.pool.policies.base import EvictionPolicy, PolicyFactory
from millpond.pool.policies.lru import LruPolicy

slots = st.integers(1, 12)
times = st.integers(0, 5)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), slots, times),
        st.tuples(st.just("discard"), slots, times),
        st.tuples(st.just("touch"), slots, times),
        st.tuples(st.just("evict"), slots, times),
        st.tuples(st.sampled_from(["clear"] + ["add"] * 9), slots, times),
    ),
    max_size=80,
)


def take(policy: EvictionPolicy, members: dict[int, int], step: tuple[str, int, int]) -> None:
    """Do one step to the policy and to the model: the last use of each member."""
    verb, slot, at = step
    if verb == "add":
        policy.add(slot, at)
        members[slot] = at
    elif verb == "touch":
        policy.touch(slot, at)
        if slot in members:
            members[slot] = at
    elif verb == "discard":
        policy.discard(slot)
        members.pop(slot, None)
    elif verb == "clear":
        policy.clear()
        members.clear()
    else:
        victim = policy.victim()
        if victim is not None:
            policy.discard(victim)
            del members[victim]


class PolicyContract:
    """What the pool relies on, whatever a policy prefers."""

    make: ClassVar[PolicyFactory]

    @given(steps=steps)
    def test_knows_just_what_it_was_told(self, steps: list[tuple[str, int, int]]) -> None:
        policy, members = self.make(), dict[int, int]()
        for step in steps:
            take(policy, members, step)
            assert sorted(policy) == sorted(members)
            assert len(policy) == len(members)
            assert [slot in policy for slot in range(14)] == [s in members for s in range(14)]

    @given(steps=steps)
    def test_victim_is_a_member_and_there_is_one_while_there_are_members(
        self, steps: list[tuple[str, int, int]]
    ) -> None:
        policy, members = self.make(), dict[int, int]()
        for step in steps:
            take(policy, members, step)
            victim = policy.victim()
            assert victim in members if members else victim is None
            assert policy.victim() == victim, "asking changes nothing"

    @given(steps=steps)
    def test_evicting_gives_up_each_member_once(self, steps: list[tuple[str, int, int]]) -> None:
        policy, members = self.make(), dict[int, int]()
        for step in steps:
            take(policy, members, step)
        victims: list[int] = []
        while (victim := policy.victim()) is not None:
            victims.append(victim)
            policy.discard(victim)
        assert sorted(victims) == sorted(members)


class TestLru(PolicyContract):
    make = LruPolicy

    @given(steps=steps)
    def test_victim_was_used_the_longest_ago(self, steps: list[tuple[str, int, int]]) -> None:
        policy, members = LruPolicy(), dict[int, int]()
        for step in steps:
            take(policy, members, step)
            oldest = min(((at, slot) for slot, at in members.items()), default=None)
            assert policy.victim() == (None if oldest is None else oldest[1])

    @pytest.mark.parametrize("verb", ["touch", "discard and add"])
    def test_garbage_is_bounded(self, verb: str) -> None:
        policy = LruPolicy()
        for slot in range(1, 101):
            policy.add(slot, 0)
        for at in range(1, 20_000):
            slot = 1 + at % 100
            if verb == "touch":
                policy.touch(slot, at)
            else:
                policy.discard(slot)
                policy.add(slot, at)
        assert len(policy._heap) <= 2 * len(policy) + 1024 + 1
