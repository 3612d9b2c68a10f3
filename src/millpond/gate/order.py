"""``millpond gate order``: which device, which paths, and everything that was found."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from millpond.gate.device import GateDevice, Size
from millpond.gate.emulated import EmulatedDevice
from millpond.gate.errors import CannotTest
from millpond.gate.geometry import GEOMETRIES, check_geometry
from millpond.gate.mutants import Caught, run_mutants
from millpond.gate.ordering import FAILURES, Show, check_path, untested
from millpond.gate.own import OwnPath
from millpond.gate.paths import Path
from millpond.gate.subject import Timing
from millpond.gate.targets import make_target
from millpond.gate.verdicts import Finding, Verdict
from millpond.model.limits import KIB
from millpond.transfer.routes import Route

OWN: Final = "millpond"
"""The name of our own engine among the targets: all of its routes, and the geometry."""


@dataclass(frozen=True, slots=True)
class OrderOptions:
    """Which paths are tested, and how long things are late."""

    targets: Sequence[str] = (OWN,)
    timing: Timing = field(default_factory=Timing)


@dataclass(slots=True)
class OrderReport:
    """What was found. ``versions`` are those of the packages under test."""

    device: str
    is_emulated: bool
    delay_s: float
    findings: list[Finding] = field(default_factory=list[Finding])
    mutants: list[Caught] = field(default_factory=list[Caught])
    versions: dict[str, str] = field(default_factory=dict[str, str])
    seconds: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes that were compared."""
        return sum(each.num_bytes for each in (*self.findings, *self.mutants))

    def faults(self) -> list[str]:
        """Return what is wrong, a line each."""
        bad = [each for each in self.findings if each.verdict is Verdict.NOT_ORDERED]
        escaped = [each.mutant for each in self.mutants if not each.is_caught]
        return [
            *(f"{each.path}: {each.edge} is NOT ordered: {each.reason}" for each in bad),
            *(f"mutant {each.edge} {each.name} was not caught" for each in escaped),
        ]

    def untested(self) -> list[Finding]:
        """Return what could not be tested."""
        return [each for each in self.findings if each.verdict is Verdict.UNTESTED]

    def as_json(self) -> dict[str, object]:
        """Return the report as plain values."""
        return {
            "device": self.device,
            "is_emulated": self.is_emulated,
            "delay_s": self.delay_s,
            "versions": self.versions,
            "findings": [each.as_json() for each in self.findings],
            "mutants": [each.as_json() for each in self.mutants],
            "bytes_compared": self.num_bytes,
            "seconds": round(self.seconds, 1),
        }


def open_device(wanted: str) -> GateDevice:
    """Return the device for ``auto``, ``cuda`` or ``emulated``; raises a kind of ``CannotTest``."""
    if wanted == "emulated" or (wanted == "auto" and not torch.cuda.is_available()):
        return EmulatedDevice()
    # Its kernels need Triton, which comes with a CUDA torch.
    from millpond.gate.cuda import open_cuda

    return open_cuda()


def check_order(device: GateDevice, options: OrderOptions, show: Show) -> OrderReport:
    """Test every edge of every path that was asked for."""
    report = OrderReport(device.name, device.is_emulated, options.timing.delay_s)
    started_s = time.monotonic()
    for target in options.targets:
        num_before = len(report.findings)
        if target == OWN:
            _check_own(device, options.timing, report, show)
        else:
            _check_target(device, target, options.timing, report, show)
        found = report.findings[num_before:]
        if not any(each.num_bytes or each.verdict is Verdict.UNTESTED for each in found):
            # A path without directions, say: nothing wrong was seen, for nothing was looked at.
            report.findings.append(untested(None, target, CannotTest("nothing was compared")))
    report.seconds = time.monotonic() - started_s
    return report


def check_mutants(device: GateDevice, options: OrderOptions, show: Show) -> OrderReport:
    """Break our own code, one order or piece of geometry at a time; each must be noticed."""
    report = OrderReport(device.name, device.is_emulated, options.timing.delay_s)
    started_s = time.monotonic()
    report.mutants = run_mutants(device, options.timing, show)
    report.seconds = time.monotonic() - started_s
    return report


def _check_own(device: GateDevice, timing: Timing, report: OrderReport, show: Show) -> None:
    seen: set[Route] = set()
    for route, size in device.routes:
        name = f"{OWN} ({route.value}, {size.num_pages} x {size.page_bytes // KIB} KiB)"
        path = OwnPath(name, lambda route=route: device.copier(route))
        report.versions.update(path.versions)
        report.findings += check_path(device, path, size, timing, show)
        if route in seen:
            continue
        seen.add(route)
        for geometry in GEOMETRIES:
            show(f"{name}: {geometry.edge} {geometry.name}")
            report.findings.append(check_geometry(device, geometry, path=name, route=route))


def _check_target(
    device: GateDevice, target: str, timing: Timing, report: OrderReport, show: Show
) -> None:
    show(f"{target}: importing it")
    try:
        path: Path = make_target(target)
    except FAILURES as error:
        report.findings.append(untested(None, target, error))
        return
    versions: Mapping[str, str] = path.versions
    report.versions.update(versions)
    report.findings += check_path(device, path, _target_size(device), timing, show)


def _target_size(device: GateDevice) -> Size:
    return device.routes[0][1]
