"""Conversations of several turns, whose prompts grow."""

from millpond.bench.scenario import Sessions
from millpond.bench.workloads.requests import Piece, Request, Role, in_lanes


def session_groups(workload: Sessions) -> dict[str, int]:
    """Return the groups of sessions with how many tokens each begins with."""
    return {f"{workload.name} {tokens}": tokens for tokens in workload.initial_tokens}


def sessions(workload: Sessions, *, seed: str, num_replicas: int) -> list[Request]:
    """Return the turns of all sessions. A turn's prompt begins with all of the one before."""
    units = [
        _session(workload, seed, num_replicas, number=number, group=group)
        for number in range(workload.sessions)
        for group in session_groups(workload)
    ]
    return in_lanes(units, workload.concurrency)


def _session(
    workload: Sessions, seed: str, num_replicas: int, *, number: int, group: str
) -> list[Request]:
    unit = f"{group}/{number}"
    pieces = [Piece(f"{seed}/{unit}", session_groups(workload)[group])]
    turns: list[Request] = []
    for turn in range(workload.turns):
        if turn:
            pieces.append(Piece(f"{seed}/{unit}/{turn}", workload.growth_tokens))
        is_alternate = workload.placement == "alternate"
        turns.append(
            Request(
                key=f"{unit}/{turn}",
                group=group,
                role=_role(turn, num_replicas, is_alternate=is_alternate),
                unit=unit,
                pieces=tuple(pieces),
                output_tokens=workload.output_tokens,
                replica=(number + (turn if is_alternate else 0)) % num_replicas,
                turn=turn,
                after=turns[-1].key if turn else None,
                wait_s=workload.think_s if turn else 0.0,
            )
        )
    return turns


def _role(turn: int, num_replicas: int, *, is_alternate: bool) -> Role:
    if turn == 0:
        return "cold"
    return "moved" if is_alternate and num_replicas > 1 else "local"
