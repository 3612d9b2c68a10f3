"""The engine arguments that the user gave, looked up as vLLM's own parser reads them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

_SHORT: Final[Mapping[str, str]] = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-sc": "--speculative-config",
}
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


class GivenArguments:
    """Names with dashes or underscores, cut short, with ``=`` or a space: the last one counts."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = tuple(argv)
        self._given = list(_pairs(self.argv))

    def has(self, *names: str) -> bool:
        """Return whether any of these options was given, or a part of it (``--name.key``)."""
        return any(_is_meant(given, name) for given, _ in self._given for name in names)

    def value(self, name: str) -> str | None:
        """Return what was given for an option; None where it was not."""
        values = [value for given, value in self._given if _is_meant(given, name)]
        return values[-1] if values else None

    def count(self, name: str, default: int = 1) -> int:
        """Return a number above 0 that was given, else ``default``: vLLM refuses the rest."""
        value = self.value(name) or ""
        number = int(value) if value.isdecimal() else 0
        return number or default

    def tokens(self, name: str) -> int | None:
        """Return a number of tokens, which may be written as 32k or 32K; None for all else."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", self.value(name) or "")
        return None if found is None else int(float(found[1]) * _UNITS[found[2]])

    def is_on(self, name: str) -> bool | None:
        """Return what an option and its ``--no-`` opposite say; None where neither was given."""
        off = "--no-" + name.removeprefix("--")
        said = [
            _is_meant(given, name)
            for given, _ in self._given
            if _is_meant(given, name) or _is_meant(given, off)
        ]
        return said[-1] if said else None


def _pairs(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option with what follows it, up to the next option."""
    for i, word in enumerate(argv):
        if not word.startswith("-") or _is_number(word):
            continue
        name, has_value, value = word.partition("=")
        if not has_value:
            following = argv[i + 1] if i + 1 < len(argv) else ""
            value = "" if following.startswith("-") and not _is_number(following) else following
        yield _SHORT.get(name, name.replace("_", "-")), value


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-\d+(\.\d+)?", word) is not None


def _is_meant(given: str, name: str) -> bool:
    """Say whether ``given`` is the option: argparse takes any beginning that is not ambiguous."""
    whole = given.partition(".")[0]
    return whole == name or (len(whole) > len("--x") and name.startswith(whole))
