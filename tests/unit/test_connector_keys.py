"""Which requests share keys, by vLLM's own hashing: tokens alone do not name a block."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from millpond.connector.adapters import Adapters
from millpond.connector.requests import RequestState, skips_pool

HASH_TOKENS = 16
BLOCK = 64
TOKENS = list(range(4 * BLOCK + 5))


@pytest.fixture(autouse=True)
def hash_seed() -> None:
    init_none_hash(sha256)


def request(tokens: list[int] = TOKENS, **fields: Any) -> Request:  # noqa: ANN401
    hasher = get_request_block_hasher(HASH_TOKENS, sha256)
    parameters = SamplingParams(max_tokens=4)
    return Request("r", list(tokens), parameters, None, block_hasher=hasher, **fields)


def keys(made: Request) -> list[bytes]:
    """Return the key of each block, as another replica would make them."""
    state = RequestState(made, skips_pool(made), Adapters().digest(made))
    num_blocks = state.extend_keys(BLOCK, HASH_TOKENS)
    assert len(state.keys) == num_blocks * state.key_bytes
    size = state.key_bytes
    return [bytes(state.keys[i * size : (i + 1) * size]) for i in range(num_blocks)]


def num_shared(one: list[bytes], other: list[bytes]) -> int:
    shared = [x == y for x, y in zip(one, other, strict=True)]
    assert sorted(shared, reverse=True) == shared, "keys are chained"
    return sum(shared)


def test_the_same_tokens_have_the_same_keys() -> None:
    assert len(keys(request())) == 4
    assert num_shared(keys(request()), keys(request())) == 4


def test_another_token_changes_its_block_and_all_after_it() -> None:
    changed = list(TOKENS)
    changed[BLOCK + 7] += 1
    assert num_shared(keys(request()), keys(request(changed))) == 1


def test_keys_are_extended_with_the_tokens_that_are_generated() -> None:
    made = request(TOKENS[: 2 * BLOCK - 1])
    state = RequestState(made, skips_pool=False)
    assert state.extend_keys(BLOCK, HASH_TOKENS) == 1
    made.append_output_token_ids(TOKENS[2 * BLOCK - 1])
    assert state.extend_keys(BLOCK, HASH_TOKENS) == 2
    assert bytes(state.keys) == b"".join(keys(request())[:2])


def test_salted_requests_share_with_their_own_salt_alone() -> None:
    plain, mine = keys(request()), keys(request(cache_salt="mine"))
    assert num_shared(plain, mine) == 0
    assert num_shared(keys(request(cache_salt="yours")), mine) == 0
    assert num_shared(keys(request(cache_salt="mine")), mine) == 4


# ---------------------------------------------------------------- LoRA


def adapter(folder: Path, content: bytes = b"weights", **fields: Any) -> LoRARequest:  # noqa: ANN401
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    return LoRARequest(**{"lora_name": "x", "lora_int_id": 1, "lora_path": str(folder)} | fields)


def test_an_adapter_shares_neither_with_the_base_model_nor_with_others(tmp_path: Path) -> None:
    one = keys(request(lora_request=adapter(tmp_path / "1")))
    assert num_shared(keys(request()), one) == 0
    assert num_shared(keys(request(lora_request=adapter(tmp_path / "1"))), one) == 4
    other_name = adapter(tmp_path / "1", lora_name="y")
    assert num_shared(keys(request(lora_request=other_name)), one) == 0


def test_two_adapters_of_one_name_do_not_share(tmp_path: Path) -> None:
    """Hashes of vLLM 0.26 and 0.27 have the name alone; another replica may mean another."""
    one = keys(request(lora_request=adapter(tmp_path / "1")))
    other = keys(request(lora_request=adapter(tmp_path / "2")))
    assert num_shared(one, other) == 0


def test_other_weights_at_the_same_path_do_not_share(tmp_path: Path) -> None:
    before = keys(request(lora_request=adapter(tmp_path / "1", b"old")))
    after = keys(request(lora_request=adapter(tmp_path / "1", b"new")))
    assert num_shared(before, after) == 0


def test_a_name_is_no_salt(tmp_path: Path) -> None:
    """The hashes of vLLM 0.26 and 0.27 do not tell the two apart."""
    named = keys(request(lora_request=adapter(tmp_path / "1")))
    assert num_shared(named, keys(request(cache_salt="x"))) == 0


def test_files_are_read_once_while_an_adapter_stays_loaded(tmp_path: Path) -> None:
    adapters = Adapters()
    first = adapters.digest(request(lora_request=adapter(tmp_path / "1", b"old")))
    # On disk there are new files, in the engine still the old weights.
    again = request(lora_request=adapter(tmp_path / "1", b"new"))
    assert adapters.digest(again) == first
    loaded_anew = request(lora_request=adapter(tmp_path / "1", b"new", lora_int_id=2))
    assert adapters.digest(loaded_anew) != first
    in_place = request(lora_request=adapter(tmp_path / "1", b"new", load_inplace=True))
    assert adapters.digest(in_place) != first


# ---------------------------------------------------------------- multimodal


def image(value: int, *, at: int) -> MultiModalFeatureSpec:
    """Return an image of one colour whose 20 placeholders begin ``at`` a token."""
    pixels = torch.full((4, 4, 3), value, dtype=torch.uint8)
    name = MultiModalHasher.hash_kwargs("blake3", image=pixels)
    return MultiModalFeatureSpec(None, "image", name, PlaceholderRange(at, 20))


def test_images_are_told_apart_by_what_is_on_them() -> None:
    """All placeholders of an image are one token, so the tokens do not tell."""
    at = 2 * BLOCK + 10
    red = keys(request(mm_features=[image(1, at=at)]))
    assert num_shared(red, keys(request(mm_features=[image(1, at=at)]))) == 4
    assert num_shared(red, keys(request(mm_features=[image(2, at=at)]))) == 2
    assert num_shared(red, keys(request())) == 2, "blocks before the image are text"


def test_an_image_that_is_moved_within_its_block_is_another() -> None:
    one = keys(request(mm_features=[image(1, at=10)]))
    assert num_shared(one, keys(request(mm_features=[image(1, at=11)]))) == 0


# ---------------------------------------------------------------- who leaves the pool alone


def test_a_prompt_that_comes_in_pieces_leaves_the_pool_alone() -> None:
    assert skips_pool(request(resumable=True))
    assert not skips_pool(request())


def test_a_user_can_ask_to_leave_the_pool_alone() -> None:
    asking = SamplingParams(extra_args={"kv_transfer_params": {"millpond": "off"}})
    made = Request("r", TOKENS, asking, None)
    assert skips_pool(made)
