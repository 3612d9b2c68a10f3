"""``millpond gate order`` on the emulated device: what it finds, how it ends, an own path."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from millpond.cli import run
from millpond.cli.exits import Exit
from millpond.gate import errors, mutants
from millpond.gate.device import Size
from millpond.gate.emulated import EmulatedDevice
from millpond.gate.geometry import GEOMETRIES, Geometry, Tensor, check_geometry
from millpond.gate.mutants import MUTANTS, run_mutants
from millpond.gate.own import OwnPath
from millpond.gate.reuse import REUSES, Reuse, reuse
from millpond.gate.subject import Subject, Timing
from millpond.gate.targets import TARGETS
from millpond.gate.verdicts import GUARDS, Control, Edge
from millpond.model.limits import BLOCKS_PER_RESERVE_MAX, SLOT_ALIGNMENT_BYTES
from millpond.transfer.routes import Route
from tests.conftest import num_gpus
from tests.meta.checks import ROOT

GEOMETRY_MUTANTS = [mutant for mutant in MUTANTS if mutant.test is None]
EMULATED = ("gate", "order", "--device", "emulated")


def order(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run with --json; return the exit code, the data, and what stderr says."""
    code = run([*EMULATED, "--json", *arguments], {})
    printed = capsys.readouterr()
    return code, json.loads(printed.out)["data"] if printed.out else {}, printed.err


# ---------------------------------------------------------------- our own code


def test_our_own_engine_is_ordered_and_its_geometry_right(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, data, _ = order(capsys)
    assert [each for each in data["findings"] if each["verdict"] != "ordered"] == []
    assert code == Exit.OK
    assert data["device"].startswith("emulated")
    assert {each["edge"] for each in data["findings"]} == {edge.value for edge in Edge}
    assert all(each["bytes_compared"] > 0 for each in data["findings"])
    assert data["bytes_compared"] == sum(each["bytes_compared"] for each in data["findings"])
    assert data["mutants"] == []


def test_every_mutant_of_our_own_code_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    code, data, _ = order(capsys, "--mutants")
    assert [each["name"] for each in data["mutants"] if not each["caught"]] == []
    assert code == Exit.OK
    assert [(each["edge"], each["name"]) for each in data["mutants"]] == [
        (mutant.edge.value, mutant.name) for mutant in MUTANTS
    ]
    assert data["bytes_compared"] > 0
    assert data["seconds"] < 120


def test_a_mutant_that_changes_nothing_is_not_caught_and_ends_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = next(mutant for mutant in MUTANTS if mutant.edge is Edge.G1)
    whole = mutants._with_geometry(lambda right, _: right)
    harmless = mutants.Mutant(Edge.G1, "nothing-is-broken", geometry.test, whole)
    monkeypatch.setattr(mutants, "MUTANTS", (harmless,))
    code, data, err = order(capsys, "--mutants")
    assert code == Exit.NO
    assert [each["caught"] for each in data["mutants"]] == [False]
    assert "nothing-is-broken was not caught" in err


def test_no_mutant_counts_as_caught_by_a_test_that_fails_anyway(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = next(each for each in MUTANTS if each.name == "store-without-fence")
    monkeypatch.setattr(mutants, "MUTANTS", (mutant,))
    with mutant.broken(device):
        (caught,) = run_mutants(device, Timing(delay_s=0.2), lambda _: None)
    assert not caught.is_caught
    assert "does not pass" in caught.reason


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    made = EmulatedDevice()
    yield made
    made.close()


@pytest.mark.parametrize("way", REUSES.values(), ids=list(REUSES))
def test_reuse_of_more_slots_than_one_reserve_grants_is_tested(
    device: EmulatedDevice, way: Reuse
) -> None:
    path = OwnPath("many pages", lambda: device.copier(Route.LOOP))
    size = Size(2 * BLOCKS_PER_RESERVE_MAX, SLOT_ALIGNMENT_BYTES)
    subject = Subject(device, path, size, Timing())
    path.watch.is_kept = True
    try:
        whole = reuse(subject, path, way, Control.NONE)
        broken = reuse(subject, path, way, Control.EDGE_REMOVED)
    finally:
        path.watch.forget()
        subject.close()
    assert len(subject.pairs) > BLOCKS_PER_RESERVE_MAX
    assert (whole.late, whole.fault) == (False, None)
    is_right = whole.comparison.is_right, broken.comparison.is_right
    assert is_right == (True, False)


# ---------------------------------------------------------------- geometry


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda each: each.name)
def test_geometry_is_right(device: EmulatedDevice, geometry: Geometry) -> None:
    finding = check_geometry(device, geometry)
    assert finding.words() == "right"
    assert finding.num_bytes > 0


def test_the_oracle_counts_items_of_a_block_as_one_does_by_hand() -> None:
    # Keys of 3 blocks, then values of 3 blocks; a block has 2 tokens of 2 items.
    apart = Tensor(0, (2, 3, 2, 2), (12, 4, 2, 1), block_axis=1)
    assert apart.items_of(1).tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    padded = Tensor(0, (3, 2), (5, 1), block_axis=0)
    assert padded.items_of(2).tolist() == [10, 11]
    split = Tensor(0, (6, 2), (2, 1), block_axis=0, split=2)
    assert split.items_of(1).tolist() == [4, 5, 6, 7]
    assert (apart.num_items, padded.num_items, split.num_items) == (24, 12, 12)


@pytest.mark.parametrize("mutant", GEOMETRY_MUTANTS, ids=lambda each: each.name)
def test_a_mutant_of_geometry_spares_what_it_does_not_touch(
    device: EmulatedDevice, mutant: mutants.Mutant
) -> None:
    with mutant.broken(device):
        words = {each.name: check_geometry(device, each).words() for each in GEOMETRIES}
    assert words["plain"] == "right"
    assert "WRONG" in words.values()


# ---------------------------------------------------------------- paths of others


EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.fixture
def own_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file for a module that the gate can import; what it makes is forgotten."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_path", raising=False)
    return tmp_path / "my_path.py"


def example() -> str:
    (text,) = EXAMPLE.findall((ROOT / "docs/ORDERING.md").read_text(encoding="utf-8"))
    return text


def test_the_example_of_the_documents_is_ordered(
    own_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_path.write_text(example(), encoding="utf-8")
    code, data, _ = order(capsys, "--target", "my_path:make", "--delay", "0.2")
    assert code == Exit.OK
    assert [each["edge"] for each in data["findings"]] == ["E1", "E2", "E3", "E4", "E6", "E6"]
    assert {each["path"] for each in data["findings"]} == {"my path"}
    assert "torch" in data["versions"]


def test_the_example_without_its_stream_is_found_out_and_pictured(
    own_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ordered = "stream.enqueue(lambda: self._move(direction, mine))"
    assert ordered in example()
    own_path.write_text(example().replace(ordered, "self._move(direction, mine)"), encoding="utf-8")
    report = tmp_path / "order.html"
    arguments = ("--target", "my_path:make", "--delay", "0.2", "--report", str(report))
    code, data, err = order(capsys, *arguments)
    assert code == Exit.NO
    lost = {each["edge"]: each for each in data["findings"] if each["verdict"] == "NOT ordered"}
    assert set(lost) == {"E1", "E3"}
    assert lost["E1"]["wrong_words"]["stale"] > 0
    assert "my path: E1 is NOT ordered" in err
    page = report.read_text(encoding="utf-8")
    assert page.count("<svg viewBox") == 2
    assert 'class="k1"' in page
    assert "<script" not in page
    assert "http" not in page


@pytest.mark.parametrize(
    ("directions", "reason"),
    [("directions = ()", "nothing was compared"), ("", "AttributeError")],
    ids=["empty", "missing"],
)
def test_a_path_of_which_nothing_is_tested_is_not_a_pass(
    directions: str, reason: str, own_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "directions = tuple(Direction)"
    assert line in example()
    own_path.write_text(example().replace(line, directions), encoding="utf-8")
    code, data, err = order(capsys, "--target", "my_path:make", "--delay", "0.1")
    assert code == Exit.NOT_CHECKED
    assert [each["verdict"] for each in data["findings"]] == ["could not test"]
    assert reason in err


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        ("NoGpu", Exit.NO_GPU),
        ("TooLittleMemory", Exit.GPU_MEMORY),
        ("NoPackage", Exit.NO_PACKAGE),
        ("UnknownVersion", Exit.UNKNOWN_VERSION),
        ("CannotTest", Exit.NOT_CHECKED),
    ],
)
def test_what_cannot_be_tested_has_a_reason_and_an_exit_code(
    raised: str, code: Exit, own_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_path.write_text(
        f"from millpond.gate.errors import {raised}\n"
        f"def make():\n    raise {raised}('because of the weather')\n",
        encoding="utf-8",
    )
    assert issubclass(getattr(errors, raised), errors.CannotTest)
    seen, data, err = order(capsys, "--target", "my_path:make")
    assert seen == code
    (finding,) = data["findings"]
    assert finding["verdict"] == "could not test"
    assert "because of the weather" in finding["reason"]
    assert "because of the weather" in err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def make():\n    return {}['x']\n", "KeyError"),
        ("import no_such_package\n", "no_such_package"),
        ("x = 1\n", "make"),
    ],
)
def test_a_target_that_breaks_is_a_reason_and_no_bug_of_the_gate(
    text: str, reason: str, own_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_path.write_text(text, encoding="utf-8")
    code, data, _ = order(capsys, "--target", "my_path:make")
    assert code == Exit.NOT_CHECKED
    assert reason in data["findings"][0]["reason"]


# ---------------------------------------------------------------- the command


def test_targets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gate", "order", "--list"], {}) == Exit.OK
    assert capsys.readouterr().out.split() == ["millpond", *TARGETS]


@pytest.mark.parametrize(
    "arguments",
    [("--target", "nonsense"), ("--mutants", "--target", "millpond"), ("--delay", "0"), ("x",)],
)
def test_wrong_usage_ends_with_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*EMULATED, *arguments], {}) == Exit.USAGE
    assert arguments[-1] in capsys.readouterr().err


@pytest.mark.skipif(num_gpus() > 0, reason="there is a CUDA device")
def test_a_gpu_that_is_asked_for_and_not_there_has_its_own_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["gate", "order", "--device", "cuda"], {}) == Exit.NO_GPU
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("modules", "code", "words"),
    [
        ({"triton": None}, Exit.NO_PACKAGE, "triton"),
        ({"millpond.gate.spin": ModuleType("spin")}, Exit.GPU_MEMORY, "7 MiB of the GPU's"),
    ],
    ids=["no Triton", "no memory"],
)
def test_a_gpu_that_cannot_be_used_has_its_own_code(
    modules: dict[str, ModuleType | None],
    code: Exit,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (7 * 2**20, 2**40))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.delitem(sys.modules, "millpond.gate.spin", raising=False)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert run(["gate", "order", "--device", "cuda"], {}) == code
    assert words in capsys.readouterr().err


def test_the_table_says_first_on_which_device(
    own_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_path.write_text(example(), encoding="utf-8")
    assert run([*EMULATED, "--target", "my_path:make", "--delay", "0.1"], {}) == Exit.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "device: emulated: streams are threads, no GPU was used"
    assert "bytes compared" in lines[-1]


# ---------------------------------------------------------------- the documents


def test_every_edge_has_a_mutant_and_every_mutant_is_documented() -> None:
    assert {mutant.edge for mutant in MUTANTS} == set(Edge) == set(GUARDS)
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    text = (ROOT / "docs/ORDERING.md").read_text(encoding="utf-8")
    rows = [
        line.split(" | ")[:2] for line in text.splitlines() if re.match(r"\| [EG]\d \| `", line)
    ]
    documented = [(edge.removeprefix("| "), name.strip("`")) for edge, name in rows]
    assert documented == [(mutant.edge.value, mutant.name) for mutant in MUTANTS]
