"""Scenarios: what a benchmark sends and in how many periods, read from a TOML file.

    [design]        rounds of four periods, warm-up, limits
    [[workload]]    one table for each workload; ``kind`` says which of the four it is

Every key is checked when the file is read: a wrong one is a ``ConfigError`` that names the
file, the key, its value and what to write instead.
"""

import difflib
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from msgspec import Meta

from millpond.model.errors import ConfigError

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Tokens = Annotated[int, Meta(ge=1, le=10_000_000)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
Share = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9-]{0,39}$")]
Scale = Annotated[float, Meta(gt=0, le=10_000)]

_FOLDERS: Final = (
    Path(__file__).parent / "scenarios",
    Path(__file__).parents[3] / "benchmarks" / "scenarios",
)
"""In a wheel they lie beside this file, in a checkout where people look for them."""


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file: unknown keys are errors."""


class Design(_Table, frozen=True, kw_only=True):
    """How often to measure.

    A round is four periods, OFF-ON-ON-OFF; ``aa_rounds`` come first and are OFF in all four.
    ``settle_s`` pass between the start of a period's replicas and its warm-up: on a GPU the
    arena is registered meanwhile. ``warm_up`` requests of each workload come before each
    period and are kept apart.
    """

    rounds: Annotated[int, Meta(ge=0, le=1000)] = 1
    aa_rounds: Annotated[int, Meta(ge=0, le=1000)] = 1
    settle_s: Seconds = 0.0
    warm_up: Annotated[int, Meta(ge=0, le=10_000)] = 4
    request_timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 600.0


class Moved(_Table, frozen=True, kw_only=True, tag="moved", tag_field="kind"):
    """Each prompt is asked of one replica and, ``gap_s`` after its end, of the next one."""

    name: Name = "moved"
    lengths: Annotated[tuple[Tokens, ...], Meta(min_length=1)]
    prompts: Count
    output_tokens: Tokens = 16
    gap_s: Seconds = 0.05
    concurrency: Count = 1


class Sessions(_Table, frozen=True, kw_only=True, tag="sessions", tag_field="kind"):
    """Conversations: ``initial_tokens``, and ``growth_tokens`` more with each turn.

    The growth is all that is new in a prompt: the answer before and the next question.
    ``alternate`` sends each turn to another replica than the last one, ``fixed`` all to one.
    """

    name: Name = "sessions"
    placement: Literal["alternate", "fixed"]
    initial_tokens: Annotated[tuple[Tokens, ...], Meta(min_length=1)]
    sessions: Count
    turns: Count
    growth_tokens: Tokens
    output_tokens: Tokens
    think_s: Seconds = 0.0
    concurrency: Count = 1


class Mixed(_Table, frozen=True, kw_only=True, tag="mixed", tag_field="kind"):
    """Each prompt is asked twice, and a share of the second requests goes to another replica."""

    name: Name = "mixed"
    moved_shares: Annotated[tuple[Share, ...], Meta(min_length=1)]
    tokens: Tokens
    prompts: Count
    output_tokens: Tokens = 16
    gap_s: Seconds = 0.05
    concurrency: Count = 1


class Replay(_Table, frozen=True, kw_only=True, tag="replay", tag_field="kind"):
    """A trace, at its own times divided by ``time_scale``.

    ``mooncake`` is a line of JSON for each request; ``sessions`` a file of JSON for each
    session, a folder of them, or a tar archive. ``token_scale`` shortens the prompts, prefix
    blocks and answers alike; ``prompt_tokens_max`` cuts prompts after that. Only the first
    ``requests`` are sent, and of each session only ``turns_max`` turns. ``round-robin`` sends
    each request to the next replica, ``fixed`` all of a session to one.
    """

    name: Name = "replay"
    format: Literal["mooncake", "sessions"]
    trace: str | None = None
    requests: Count
    turns_max: Count = 1_000_000
    time_scale: Scale = 1.0
    token_scale: Annotated[float, Meta(gt=0, le=1)] = 1.0
    prompt_tokens_max: Tokens = 10_000_000
    output_tokens_max: Tokens = 10_000_000
    placement: Literal["round-robin", "fixed"] = "round-robin"


Workload = Moved | Sessions | Mixed | Replay


class Scenario(_Table, frozen=True, kw_only=True):
    """A whole file. ``seed`` decides all prompts; the engines' part of chance it does not."""

    name: Name
    description: str
    seed: int = 1
    design: Design = Design()
    workload: Annotated[tuple[Workload, ...], Meta(min_length=1)]


def scenario_files() -> dict[str, Path]:
    """Return the scenarios that come with Millpond, by name."""
    return {path.stem: path for folder in _FOLDERS for path in sorted(folder.glob("*.toml"))}


def find_scenario(name: str) -> Path:
    """Return the file of a scenario by its name or path; raises ``ConfigError``."""
    files = scenario_files()
    if name in files:
        return files[name]
    path = Path(name)
    if path.suffix == ".toml" and path.is_file():
        return path
    raise ConfigError(
        f"no scenario {name!r}: give the path of a .toml file, or one of {', '.join(files)}"
    )


def load_scenario(path: Path) -> Scenario:
    """Read and check a file; raises ``ConfigError``."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    try:
        scenario = msgspec.convert(document, Scenario)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_explain(str(error), document)}") from error
    names = [each.name for each in scenario.workload]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{path}: workload.name = {name!r} is there twice: give each workload a name "
                "of its own"
            )
    for each in scenario.workload:
        _check_distinct(each, path)
    return scenario


def _check_distinct(workload: Workload, path: Path) -> None:
    """Refuse prompts that would be asked twice: they are told apart by these values."""
    for key in ("lengths", "initial_tokens", "moved_shares"):
        values: tuple[float, ...] = getattr(workload, key, ())
        # As the groups are named: `workloads.mixed_groups`.
        written = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
        for value in written:
            if written.count(value) > 1:
                raise ConfigError(
                    f"{path}: workload.{key} has {value} twice: give each once, and differing in "
                    "six digits"
                )


_WHERE: Final = re.compile(r"(?P<reason>.*?)(?: - at `\$\.?(?P<key>[^`]*)`)?", re.DOTALL)
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(\w+)`")
_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")


def _explain(message: str, document: dict[str, object]) -> str:
    """Return key, value and remedy from msgspec's message, which has no value."""
    match = _WHERE.fullmatch(message)
    reason, key = (message, "") if match is None else (match["reason"], match["key"] or "")
    dot = "." if key else ""
    if missing := _MISSING.match(reason):
        return f"{key}{dot}{missing[1]} is missing: add it"
    if unknown := _UNKNOWN.match(reason):
        value = _value_at(f"{key}{dot}{unknown[1]}", document)
        return f"{key}{dot}{unknown[1]} = {value!r} is no known key{_nearest(unknown[1])}"
    value = _value_at(key, document)
    return f"{key} = {value!r} can't be used: {reason[:1].lower()}{reason[1:]}; write that"


def _nearest(key: str) -> str:
    tables = (Scenario, Design, Moved, Sessions, Mixed, Replay)
    known = sorted({name for table in tables for name in table.__struct_fields__} | {"kind"})
    near = difflib.get_close_matches(key, known, 1)
    return f": did you mean {near[0]}?" if near else ": remove it"


def _value_at(key: str, document: dict[str, object]) -> object:
    value = cast("Any", document)
    for step in re.findall(r"\w+", key):
        value = value[int(step)] if step.isdigit() else value.get(step)
    return value
