"""Charts as inline SVG that fits any width: letters and dots keep their size, only space shrinks.

    <svg class="plot">                    the plot's own area; labels hang over its edges
      <text x="30%">, <circle cx="30%">   places in percent, sizes in pixels
      <svg viewBox="0 0 2000 1000">       stretched to the area, its strokes are not
        <path class="dots c1">            a dot is a stroke of no length with a round cap

So a phone gets the same chart with the same letters, and a dot costs about a dozen bytes.
"""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

Point = tuple[float, float]
"""Of values, as on the axes."""

_WIDTH: Final = 2000
_HEIGHT: Final = 1000
_PAD_SHARE: Final = 0.04
_LABEL_GAP: Final = 16
_NICE: Final = (1.0, 2.0, 2.5, 5.0, 10.0)
_TICKS_MIN: Final = 2


@dataclass(frozen=True, slots=True)
class Axis:
    """From values to places between 0 and 1; what lies beyond an end is put at that end."""

    low: float
    high: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return where a value is, 0 at ``low``."""
        if self.is_log:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))

    def ticks(self, *, num_max: int = 6) -> list[float]:
        """Return round values on the axis."""
        if self.is_log:
            for steps in ((1, 2, 5), (1, 3), (1,)):
                found = self._decades(steps)
                if _TICKS_MIN <= len(found) <= num_max:
                    return found
            if len(found := self._decades((1,))) > num_max:
                return found[:: math.ceil(len(found) / num_max)]
        return self._even(num_max)

    def _decades(self, steps: Sequence[int]) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        values = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        return [value for value in values if self.low <= value <= self.high]

    def _even(self, num_max: int) -> list[float]:
        least = (self.high - self.low) / num_max
        decade = 10.0 ** math.floor(math.log10(least))
        step = decade * next(nice for nice in _NICE if nice * decade >= least)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [number * step for number in range(first, last + 1)]


def log_axis(values: Iterable[float]) -> Axis:
    """Return an axis that holds all values above 0, with a little room at both ends."""
    known = [value for value in values if value > 0] or [1.0]
    low, high = min(known), max(known)
    room = max(1.1, (high / low) ** _PAD_SHARE)
    return Axis(low / room, high * room, is_log=True)


def linear_axis(values: Iterable[float]) -> Axis:
    """Return an axis that holds all values, with a little room at both ends."""
    known = list(values) or [0.0]
    low, high = min(known), max(known)
    room = _PAD_SHARE * (high - low) or 1.0
    return Axis(low - room, high + room)


@dataclass(slots=True)
class Chart:
    """One chart. What is drawn first lies below; ``colour`` is a class of the page's style."""

    label: str
    x: Axis
    y: Axis
    height: int = 200
    _shapes: list[str] = field(default_factory=list[str])
    _marks: list[str] = field(default_factory=list[str])
    _texts: list[str] = field(default_factory=list[str])

    def dots(self, points: Iterable[Point], colour: str, *, num_max: int) -> int:
        """Draw small dots and return how many: those that would cover each other become one."""
        places = self._thinned(points, num_max)
        # Not of length 0, which not every browser draws.
        self._path(f"dots {colour}", "".join(f"M{x} {y}h.1" for x, y in places))
        return len(places)

    def knots(self, points: Iterable[Point], colour: str) -> None:
        """Draw large dots."""
        places = map(self._place, points)
        self._path(f"knots {colour}", "".join(f"M{x} {y}h.1" for x, y in places))

    def line(self, points: Iterable[Point], colour: str) -> None:
        """Draw a line through all points."""
        places = [f"{x} {y}" for x, y in map(self._place, points)]
        self._path(f"line {colour}", "M" + "L".join(places))

    def bars(self, spans: Iterable[tuple[float, float, float]], colour: str) -> None:
        """Draw upright bars of (x, low, high)."""
        ends = [(self._place((x, low)), self._place((x, high))) for x, low, high in spans]
        self._path(f"line {colour}", "".join(f"M{x} {y}V{top}" for (x, y), (_, top) in ends))

    def area(self, outline: Iterable[Point], colour: str) -> None:
        """Fill what is within an outline."""
        places = [f"{x} {y}" for x, y in map(self._place, outline)]
        self._path(f"area {colour}", f"M{'L'.join(places)}Z")

    def rings(self, points: Iterable[Point], colour: str, *, num_max: int) -> None:
        """Draw open circles; those that would cover each other become one."""
        for x, y in self._thinned(points, num_max):
            self._marks.append(
                f'<circle cx="{100 * x / _WIDTH:g}%" cy="{100 * y / _HEIGHT:g}%" r="4" '
                f'class="ring {colour}"/>'
            )

    def crosses_on_top(self, xs: Iterable[float], *, num_max: int) -> None:
        """Draw crosses at the upper edge, for what has an x and no y."""
        for x, _ in self._thinned(((x, self.y.high) for x in xs), num_max):
            self._marks.append(f'<text class="cross" x="{100 * x / _WIDTH:g}%" y="9">×</text>')

    def x_ticks(self, labels: Iterable[tuple[float, str]], *, with_lines: bool = True) -> None:
        """Write below the chart."""
        for value, label in labels:
            if with_lines:
                x, _ = self._place((value, self.y.low))
                self._shapes.insert(0, f'<path class="grid" d="M{x} 0V{_HEIGHT}"/>')
            self.write_below(value, label)

    def y_ticks(self, labels: Iterable[tuple[float, str]]) -> None:
        """Write left of the chart, with a line across for each."""
        for value, label in labels:
            _, y = self._place((self.x.low, value))
            self._shapes.insert(0, f'<path class="grid" d="M0 {y}H{_WIDTH}"/>')
            self._texts.append(
                f'<text class="left" x="-7" y="{100 * y / _HEIGHT:g}%" dy="4">{_text(label)}</text>'
            )

    def write_below(self, value: float, label: str, *, row: int = 0) -> None:
        """Write at one place of the x axis, in a row below the chart."""
        y = self.height + _LABEL_GAP * (row + 1)
        x = 100 * self.x.place(value)
        self._texts.append(f'<text class="below" x="{x:.4g}%" y="{y}">{_text(label)}</text>')

    def svg(self, alternative: str) -> str:
        """Return the markup, which is well-formed XML as well, with what it says in words."""
        return (
            f'<svg class="plot" height="{self.height}" role="img" '
            f'aria-label="{_text(alternative)}">'
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" '
            f'width="100%" height="100%">{"".join(self._shapes)}</svg>'
            f"{''.join(self._marks)}{''.join(self._texts)}</svg>"
        )

    def _place(self, point: Point) -> tuple[int, int]:
        x, y = point
        return round(_WIDTH * self.x.place(x)), round(_HEIGHT * (1 - self.y.place(y)))

    def _thinned(self, points: Iterable[Point], num_max: int) -> list[tuple[int, int]]:
        """Return the places of points on a grid so coarse that they are at most ``num_max``."""
        places = dict.fromkeys(map(self._place, points))
        step = 1
        while len(places) > max(1, num_max):
            step *= 2
            places = dict.fromkeys((x // step * step, y // step * step) for x, y in places)
        return list(places)

    def _path(self, css: str, d: str) -> None:
        self._shapes.append(f'<path class="{css}" d="{d}"/>')


def _text(text: str) -> str:
    return html.escape(text)
