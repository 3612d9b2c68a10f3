"""Prompts that are asked twice: ``moved`` and ``mixed``."""

import math
from dataclasses import dataclass

from millpond.bench.scenario import Mixed, Moved
from millpond.bench.workloads.requests import Piece, Request, in_lanes


@dataclass(frozen=True, slots=True)
class _Twice:
    """What the two requests of one prompt have in common."""

    group: str
    number: int
    num_tokens: int
    output_tokens: int
    gap_s: float


def moved(workload: Moved, *, seed: str, num_replicas: int) -> list[Request]:
    """Return, for each prompt, a cold request and a moved one. Homes change in turn."""
    prompts = [
        _Twice(f"{workload.name} {length}", number, length, workload.output_tokens, workload.gap_s)
        # Lengths take turns, so that a drift meets all of them alike.
        for number in range(workload.prompts)
        for length in workload.lengths
    ]
    units = [_unit(prompt, seed, num_replicas, is_moved=True) for prompt in prompts]
    return in_lanes(units, workload.concurrency)


def mixed_groups(workload: Mixed) -> dict[str, float]:
    """Return the groups of a mix with the share of each that moves."""
    return {f"{workload.name} {share:g}": share for share in workload.moved_shares}


def mixed(workload: Mixed, *, seed: str, num_replicas: int) -> list[Request]:
    """Return, for each prompt, a cold request and a repeated one, of which a share is moved."""
    units = [
        _unit(
            _Twice(
                group,
                number,
                workload.tokens,
                workload.output_tokens,
                workload.gap_s,
            ),
            seed,
            num_replicas,
            is_moved=_is_chosen(number, share),
        )
        for number in range(workload.prompts)
        for group, share in mixed_groups(workload).items()
    ]
    return in_lanes(units, workload.concurrency)


def _is_chosen(number: int, share: float) -> bool:
    """Choose that share of all numbers, spread evenly."""
    # Rounded: 0.1 added up in floats would leave out the tenth of ten.
    return math.floor(round((number + 1) * share, 9)) > math.floor(round(number * share, 9))


def _unit(prompt: _Twice, seed: str, num_replicas: int, *, is_moved: bool) -> list[Request]:
    unit = f"{prompt.group}/{prompt.number}"
    home = prompt.number % num_replicas
    cold = Request(
        key=f"{unit}/cold",
        group=prompt.group,
        role="cold",
        unit=unit,
        pieces=(Piece(f"{seed}/{unit}", prompt.num_tokens),),
        output_tokens=prompt.output_tokens,
        replica=home,
    )
    again = Request(
        key=f"{unit}/again",
        group=prompt.group,
        role="moved" if is_moved else "local",
        unit=unit,
        pieces=cold.pieces,
        output_tokens=prompt.output_tokens,
        replica=(home + is_moved) % num_replicas,
        turn=1,
        after=cold.key,
        wait_s=prompt.gap_s,
    )
    return [cold, again]
