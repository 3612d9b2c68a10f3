"""An engine's name of a request leads back to the client's."""

import pytest

from millpond.model.requests import client_request_ids, matches_request_id

HEX = "0a1b2c3d"


@pytest.mark.parametrize(
    "engine_id",
    [
        "chatcmpl-{}-" + HEX,
        "chatcmpl-{}",  # an engine told to add no random part
        "chatcmpl-{}_3-" + HEX,  # one of several prompts
        "2_chatcmpl-{}-" + HEX,  # one of several samples
        "cmpl-{}-0-" + HEX,
        "cmpl-{}-17",
        "1_cmpl-{}-0-" + HEX,
        "generate-tokens-{}-" + HEX,
        "{}-" + HEX,
        "{}",
    ],
)
@pytest.mark.parametrize(
    "client_id", ["abc", "trace/7:x y", "8f14e45f-ceea-467f-a83c-0a1b2c3d4e5f", "a-0", "Ü"]
)
def test_the_clients_name_is_found(engine_id: str, client_id: str) -> None:
    assert matches_request_id(engine_id.format(client_id), client_id)


@pytest.mark.parametrize(
    ("engine_id", "client_id"),
    [
        ("chatcmpl-abc-" + HEX, "ab"),
        ("chatcmpl-abc-" + HEX, "bc"),
        ("chatcmpl-abc-" + HEX, ""),
        ("chatcmpl-abc-" + HEX, HEX),
        ("chatcmpl-abc-0-" + HEX, "abc"),  # chat has no index with a dash
        ("cmpl-abc_0-0-" + HEX, "abc"),
        ("chatcmpl-abc-0A1B2C3D", "abc"),  # the random part is in lower case
        ("chatcmpl-abc-0a1b2c3", "abc"),
        ("xcmpl-abc-" + HEX, "abc"),
        ("chatcmpl-", ""),
    ],
)
def test_another_name_is_not(engine_id: str, client_id: str) -> None:
    assert not matches_request_id(engine_id, client_id)


def test_the_id_of_the_response_is_a_name_too() -> None:
    assert "chatcmpl-abc" in client_request_ids(f"chatcmpl-abc-{HEX}")
    assert "cmpl-abc" in client_request_ids(f"cmpl-abc-0-{HEX}")


def test_names_are_few() -> None:
    assert len(client_request_ids(f"3_cmpl-abc-0-{HEX}")) <= 20
