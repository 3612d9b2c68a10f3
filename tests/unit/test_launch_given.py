"""A user's engine arguments are found however vLLM's parser lets them be written."""

import pytest

from millpond.launch.given import GivenArguments


@pytest.mark.parametrize(
    "argv",
    [
        ["--block-size", "64"],
        ["--block-size=64"],
        ["--block_size", "64"],
        ["--block", "64"],
        ["--block-size", "16", "--block-size", "64"],
        ["--dtype", "half", "--block-size", "64", "--enforce-eager"],
    ],
)
def test_a_value_is_found(argv: list[str]) -> None:
    given = GivenArguments(argv)
    assert given.value("--block-size") == "64"
    assert given.count("--block-size") == 64
    assert given.has("--block-size")


def test_what_was_not_given_is_not_there() -> None:
    given = GivenArguments(["--max-num-seqs", "4", "--enforce-eager"])
    assert given.value("--max-model-len") is None
    assert not given.has("--max-model-len", "--block-size")
    assert given.count("--tensor-parallel-size") == 1
    assert given.value("--enforce-eager") == ""


@pytest.mark.parametrize("written", ["0", "00", "-1", "many", "\u00b2", ""])
def test_what_is_no_count_is_left_to_the_engine(written: str) -> None:
    assert GivenArguments([f"--block-size={written}"]).count("--block-size", 16) == 16


def test_a_longer_name_is_another_option() -> None:
    given = GivenArguments(["--data-parallel-size-local", "4"])
    assert given.count("--data-parallel-size") == 1


@pytest.mark.parametrize("argv", [["-tp", "4"], ["-tp=4"]])
def test_short_names_are_known(argv: list[str]) -> None:
    assert GivenArguments(argv).count("--tensor-parallel-size") == 4


def test_a_part_of_a_json_option_counts_as_it() -> None:
    assert GivenArguments(["--kv-transfer-config.kv_role", "x"]).has("--kv-transfer-config")


@pytest.mark.parametrize(
    ("written", "tokens"),
    [
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        ("2.5k", 2500),
        ("auto", None),
        ("-1", None),
    ],
)
def test_tokens_are_read_with_their_unit(written: str, tokens: int | None) -> None:
    assert GivenArguments(["--max-model-len", written]).tokens("--max-model-len") == tokens


@pytest.mark.parametrize(
    ("argv", "is_on"),
    [
        ([], None),
        (["--enable-prefix-caching"], True),
        (["--no-enable-prefix-caching"], False),
        (["--no-enable-prefix-caching", "--enable_prefix_caching"], True),
        (["--enable-prefix-caching", "--no-enable-prefix-caching"], False),
    ],
)
def test_the_last_of_two_opposites_counts(argv: list[str], is_on: bool | None) -> None:
    assert GivenArguments(argv).is_on("--enable-prefix-caching") is is_on
