"""Copies between an engine's memory and the arena, and the order they must keep."""

from millpond.transfer.copies import Copies, Direction, plan_copies
from millpond.transfer.cpu import CpuCopyEngine
from millpond.transfer.device import Fence
from millpond.transfer.engine import CopyEngine, Ends, Pace, Ticket

__all__ = [
    "Copies",
    "CopyEngine",
    "CpuCopyEngine",
    "Direction",
    "Ends",
    "Fence",
    "Pace",
    "Ticket",
    "plan_copies",
]
