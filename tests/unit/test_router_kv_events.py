"""A replica's cache by its events: what is held, what was missed, and what makes no sense."""

import logging
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.router.cached_blocks import CachedBlocks, Event
from millpond.router.kv_events import Feed
from millpond.router.replicas import Address, Replica
from millpond.router.tokens import TokenNames
from tests.router_events import (
    CLEARED,
    STATE,
    hashes,
    payload,
    removed,
    stored,
    window,
)

IDS = list(range(1000, 1100))
OTHER = IDS[:48] + list(range(5000, 5052))
"""Shares three blocks of 16 with IDS."""
GROUP: dict[str, Any] = {"group_idx": 1}


class Cache:
    """A feed, and how many tokens it knows of a prompt."""

    def __init__(self, **options: int) -> None:
        self.replica = Replica("a", Address("http://a:1"))
        self.feed = Feed(self.replica, cached=CachedBlocks(**options))
        self.number = -1

    def send(self, *events: dict[str, Any], skip: int = 0, rank: int | None = 0) -> int | None:
        """Publish a batch, after ``skip`` ones that get lost."""
        self.number += 1 + skip
        return self.feed.take(self.number, payload(*events, rank=rank))

    def held(self, ids: list[int] = IDS, **names: str) -> int | None:
        # One token more: the last one of a prompt is never taken over.
        return self.feed.num_tokens(TokenNames([*ids, 0], **names))


# ---------------------------------------------------------------- what is held


def test_the_whole_blocks_of_a_prompt_are_held_and_no_more() -> None:
    cache = Cache()
    assert cache.held() is None, "nothing is known of a cache that has said nothing"
    cache.send(stored(IDS, 16))
    assert cache.replica.is_cache_known
    assert cache.held() == 96
    assert cache.held(OTHER) == 48
    assert cache.held([1, *IDS]) == 0
    assert cache.held(IDS[:40]) == 32
    exact = TokenNames(IDS[:48])
    assert cache.feed.num_tokens(exact) == 32, "the last token is computed again"


def test_blocks_follow_their_parents_over_several_batches() -> None:
    cache = Cache()
    cache.send(stored(IDS[:32], 16))
    cache.send(stored(IDS[:64], 16, first=2), stored(IDS, 16, first=4))
    assert cache.held() == 96


def test_a_block_is_held_until_its_last_copy_has_gone() -> None:
    cache = Cache()
    ends = hashes(IDS, 16)
    cache.send(stored(IDS, 16), stored(OTHER, 16))  # three blocks were computed twice
    cache.send(removed([ends[2], ends[5]]))
    assert cache.held() == 80
    cache.send(removed([ends[2]]))
    assert (cache.held(), cache.held(OTHER)) == (32, 32)
    cache.send(stored(IDS[:48], 16, first=2))
    assert (cache.held(), cache.held(OTHER)) == (80, 96), "what lay behind the gap was kept"
    cache.send(removed([12345, ends[5]]))
    assert cache.held() == 80


def test_a_cleared_cache_holds_nothing_and_fills_again() -> None:
    cache = Cache()
    cache.send(stored(IDS, 16))
    cache.send(CLEARED)
    assert cache.held() == 0
    assert cache.feed.statistics() == {"num_blocks": 0}
    cache.send(stored(OTHER, 16))
    assert (cache.held(), cache.held(OTHER)) == (48, 96)


def test_salts_adapters_and_images_tell_blocks_apart() -> None:
    cache = Cache()
    cache.send(stored(IDS, 16, salt="s"))
    assert (cache.held(), cache.held(salt="s"), cache.held(salt="t")) == (0, 96, 0)
    keys = [["x"]] * 6
    cache.send(stored(IDS, 16, salt="lora", extra_keys=keys))
    assert (cache.held(), cache.held(adapter="x"), cache.held(adapter="y")) == (0, 96, 0)
    image = [None, None, ["image", 3], None, None, None]
    cache.send(stored(IDS, 16, salt="image", extra_keys=image))
    assert cache.held() == 32, "up to the image, whose tokens are anybody's"


def test_other_tiers_are_not_the_cache() -> None:
    cache = Cache()
    cache.send(stored(IDS, 16, medium="CPU"))
    assert cache.held() == 0
    cache.send(stored(IDS, 16), removed(hashes(IDS, 16), medium="STORAGE"))
    assert cache.held() == 96


def test_a_recurrent_model_resumes_at_its_states() -> None:
    cache = Cache()
    cache.send(stored(IDS, 16, held=[5], **GROUP, **STATE))
    assert cache.held() is None, "only attention says which prefix a state is of"
    cache.send(stored(IDS, 16))
    assert cache.held() == 96
    assert cache.held(IDS[:80]) == 0, "there is no state before"
    cache.send(stored(OTHER[:48], 16, held=[2], **GROUP, **STATE))
    assert (cache.held(IDS[:80]), cache.held(OTHER)) == (48, 48)
    cache.send(removed([hashes(IDS, 16)[5]], **GROUP))
    assert cache.held() == 48


def test_a_window_needs_the_last_blocks_only() -> None:
    cache = Cache()
    kind = window(33)  # itself and 32 before it: two blocks
    cache.send(stored(IDS, 16, held=[], **GROUP, **kind), stored(IDS, 16))
    assert cache.held() == 0
    cache.send(stored(IDS, 16, held=[0, 3, 4], **GROUP, **kind))
    assert cache.held() == 80
    assert cache.held(IDS[:64]) == 16, "the first block alone, for nothing is before it"


def test_groups_must_agree_on_a_place() -> None:
    cache = Cache()
    cache.send(
        stored(IDS, 16),
        stored(IDS, 16, held=[1, 5], group_idx=1, **STATE),
        stored(IDS, 16, held=[1, 2, 3, 4], group_idx=2, **window(17)),
        stored(IDS, 32, held=[0, 1], group_idx=3),
    )
    assert cache.held() == 32


def test_blocks_of_another_length_are_not_guessed_at() -> None:
    cache = Cache()
    cache.send(stored(IDS, 32))
    assert cache.held() == 96
    cache.send(stored(OTHER, 16, first=4))  # a beginning of a block, inside of it
    assert (cache.held(), cache.held(OTHER)) == (96, 32)
    cache.send(stored(IDS, 64))
    assert cache.held() == 64, "these were the beginnings"
    cache = Cache()
    cache.send(stored(IDS, 32), stored(IDS, 48, **GROUP))
    assert cache.held() is None, "groups whose blocks do not fit into each other"


def test_kinds_of_cache_that_are_not_known_make_it_unknown() -> None:
    cache = Cache()
    cache.send(stored(IDS, 16))
    cache.send(stored(IDS, 16, **GROUP, kv_cache_spec_kind="chunked_local_attention"))
    assert cache.held() is None


def test_blocks_without_a_parent_are_found_by_nobody() -> None:
    cache = Cache()
    cache.send(stored(IDS, 16, first=3))
    assert (cache.held(), cache.replica.is_cache_known) == (0, True)
    cache.send(removed(hashes(IDS, 16)[3:]), stored(IDS, 16))
    assert cache.held() == 96


# ---------------------------------------------------------------- what was missed


def test_a_gap_is_asked_for_from_where_it_begins() -> None:
    cache = Cache()
    cache.send(stored(IDS[:32], 16))
    assert cache.send(stored(IDS, 16, first=4), skip=1) == 1
    assert cache.feed.take_again(1, payload(stored(IDS[:64], 16, first=2)))
    assert cache.feed.take_again(2, payload(stored(IDS, 16, first=4)))
    cache.feed.end_again()
    assert cache.held() == 96
    assert cache.feed.take(cache.number + 1, payload(removed([hashes(IDS, 16)[5]]))) is None
    assert cache.held() == 80


def test_what_comes_twice_counts_once() -> None:
    cache = Cache()
    cache.send(stored(IDS, 16))
    assert cache.send(CLEARED, skip=1) == 1
    for number in (0, 1, 2, 3):  # so far the publisher has got by now
        events = stored(IDS, 16) if number == 3 else CLEARED
        assert cache.feed.take_again(number, payload(events))
    cache.feed.end_again()
    assert cache.send(CLEARED) is None, "batch 3, which has come already"
    assert cache.held() == 96
    cache.send(removed(hashes(IDS, 16)))
    assert cache.held() == 0


def test_a_router_that_comes_late_asks_for_everything() -> None:
    cache = Cache()
    assert cache.send(stored(IDS, 16, first=2), skip=1) == 0
    assert cache.held() is None
    assert cache.feed.take_again(0, payload(stored(IDS[:32], 16)))
    assert cache.feed.take_again(1, payload(stored(IDS, 16, first=2)))
    assert cache.held() is None, "not before all has come"
    cache.feed.end_again()
    assert cache.held() == 96


def test_of_a_publisher_that_has_said_nothing_everything_is_known() -> None:
    cache = Cache()
    cache.feed.end_again()
    assert cache.held() == 0


@pytest.mark.parametrize("is_known_before", [True, False])
def test_what_is_not_remembered_any_more_makes_the_cache_unknown_until_it_is_cleared(
    is_known_before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache()
    if is_known_before:
        cache.send(stored(IDS, 16))
    missing = cache.send(stored(OTHER, 16), skip=5)
    assert missing == int(is_known_before)
    assert not cache.feed.take_again(missing + 1, payload(stored(OTHER, 16)))
    assert cache.held() is None
    assert cache.send(stored(IDS, 16)) is None, "asking again leads nowhere"
    assert cache.held() is None
    assert "not remembered" in caplog.text
    cache.send(stored(IDS, 16), CLEARED, stored(OTHER, 16))
    assert (cache.held(), cache.held(OTHER)) == (48, 96)


def test_without_an_answer_everything_is_asked_for_later() -> None:
    cache = Cache()
    cache.send(stored(IDS, 16))
    assert cache.send(CLEARED, skip=1) == 1
    cache.feed.give_up("no answer")
    assert cache.held() is None
    assert cache.send(CLEARED, stored(IDS, 16)) is None, "cleared: nothing before matters"
    assert cache.held() == 96
    cache.send(skip=1)
    cache.feed.give_up("no answer")
    assert cache.send(stored(IDS, 16)) == 0


def test_numbers_that_begin_anew_are_of_another_process() -> None:
    cache = Cache()
    cache.send(stored(IDS, 16))
    cache.send(stored(OTHER, 16), rank=0)
    cache.number = -1
    cache.send(stored(OTHER, 16), rank=1)
    assert (cache.held(), cache.held(OTHER)) == (48, 96)
    cache.send()
    cache.number = 0
    assert cache.send(stored(IDS, 16)) == 0, "its first batch was missed"
    assert cache.held() is None


def test_another_process_may_have_other_blocks_and_groups() -> None:
    cache = Cache()
    kind = "chunked_local_attention"
    cache.send(stored(IDS, 32), stored(IDS, 32, **GROUP, kv_cache_spec_kind=kind))
    assert cache.held() is None
    cache.number = -1
    cache.send(stored(IDS, 16))
    assert cache.held() == 96


def test_a_replica_that_was_down_is_asked_for_everything() -> None:
    cache = Cache()
    cache.send(stored(IDS, 16))
    cache.feed.forget("down")
    assert cache.held() is None
    assert cache.send(stored(OTHER, 16)) == 0


# ---------------------------------------------------------------- what makes no sense


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"x" * 1000,
        msgspec.msgpack.encode([1.0, [{"type": "BlockMoved"}], 0]),
        msgspec.msgpack.encode({"events": []}),
        payload(stored(IDS, 16, token_ids=[-1] * 96)),
        payload(stored(IDS, 16, token_ids=[2**32] * 96)),
        payload(stored(IDS, 16, block_size=0)),
        payload(stored(IDS, 16, token_ids=IDS[:95])),
        payload(stored(IDS, 16, extra_keys=[None])),
        payload(stored(IDS, 16, block_hashes=[7] * 6)),
        payload(stored(IDS, 16, block_hashes=[{}] * 6)),
        payload(rank=3),
    ],
)
def test_batches_without_sense_make_the_cache_unknown(data: bytes) -> None:
    cache = Cache()
    cache.send(stored(OTHER, 16))
    assert cache.feed.take(1, data) is None
    assert cache.held(OTHER) is None
    cache.number = 1
    assert cache.send(stored(IDS, 16)) is None
    assert cache.held() is None
    cache.number = -1
    cache.send(stored(IDS, 16), rank=3)
    assert cache.held() == 96, "a new process may make sense again"


def test_memory_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(num_blocks_max=10)
    cache.send(stored(IDS, 16))
    assert cache.feed.statistics() == {"num_blocks": 6}
    cache.send(stored(OTHER, 16), stored(list(range(100)), 16))
    assert cache.feed.statistics() == {"num_blocks": 0}
    assert cache.held() is None
    assert "more than 10 blocks" in caplog.text
    cache.number = -1
    cache.send(*(stored(IDS, 16, held=[], group_idx=i) for i in range(1000)))
    assert len(cache.feed._cached._groups) == 0
    assert "more than 256 groups" in caplog.text


def test_what_becomes_known_and_unknown_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cache = Cache()
    for _ in range(3):
        cache.send(stored(IDS, 16))
    for _ in range(3):
        cache.feed.give_up("no answer")
    for number in range(100, 103):
        cache.feed.take(number, b"garbage")
    assert [record.getMessage() for record in caplog.records] == [
        "cache known: replica=a",
        "cache unknown: replica=a why=no answer",
        ANY,
    ]


events = st.lists(
    st.one_of(
        st.builds(lambda n, first: stored(IDS[: 16 * n], 16, first % n), *[st.integers(1, 6)] * 2),
        st.builds(
            lambda ends: removed([hashes(IDS, 16)[i] for i in ends]), st.lists(st.integers(0, 5))
        ),
        st.just(CLEARED),
    ),
    max_size=30,
)


@given(events)
def test_what_is_held_is_what_a_count_of_copies_says(told: list[dict[str, Any]]) -> None:
    cache = CachedBlocks()
    ends = hashes(IDS, 16)
    copies: dict[int, int] = {}
    for each in told:
        cache.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(each), type=Event))
        if each["type"] == "AllBlocksCleared":
            copies.clear()
        elif each["type"] == "BlockRemoved":
            for end in each["block_hashes"]:
                copies[end] = max(0, copies.get(end, 0) - 1)
        elif each["parent_block_hash"] is None or copies.get(each["parent_block_hash"]):
            for end in each["block_hashes"]:
                copies[end] = copies.get(end, 0) + 1
        held = next((i for i, end in enumerate(ends) if not copies.get(end)), len(ends))
        assert cache.num_tokens(TokenNames([*IDS, 0])) == 16 * held
        assert cache.statistics() == {"num_blocks": sum(1 for num in copies.values() if num)}
