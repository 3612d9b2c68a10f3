"""Documents say what is there, and nothing about how it came about."""

import re
from collections.abc import Callable, Iterator

import click
import pytest

import millpond
from millpond.cli.app import cli
from millpond.cli.exits import Exit
from millpond.config import settings
from tests.meta import checks
from tests.meta.checks import ROOT

DOCUMENTS = (
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "docs/GLOSSARY.md",
    "docs/PROTOCOL.md",
    "docs/decisions/0001-dependencies.md",
    "docs/decisions/0002-lease-hazard.md",
)
LOCK_FILES = re.compile(r"(^|/)(.*\.lock|.*-lock\.(json|yaml|toml)|requirements.*\.txt|pylock.*)$")


def repository_texts() -> Iterator[tuple[str, str]]:
    for path in checks.repository_files():
        try:
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture, say; it has no words to check


@pytest.mark.parametrize("name", DOCUMENTS)
def test_document_exists(name: str) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) >= 5


def test_documents_that_the_texts_name_exist() -> None:
    existing = {str(path.relative_to(ROOT)) for path in checks.repository_files()}
    missing = [
        f"{where} names {name}"
        for where, text in repository_texts()
        if not where.startswith("tests/meta/")
        for name in checks.named_documents(text) - existing
    ]
    assert "\n".join(missing) == ""
    assert checks.named_documents("see docs/a/B.md and docs/C.") == {"docs/a/B.md"}


def test_links_lead_somewhere() -> None:
    existing = {str(path.relative_to(ROOT)) for path in checks.repository_files()}
    findings = [
        finding
        for where, text in repository_texts()
        if where.endswith(".md")
        for finding in checks.broken_links(where, text, existing)
    ]
    assert "\n".join(findings) == ""
    planted = "[a](GLOSSARY.md#term) [b](gone.md) [c](https://example.org) [d](decisions)"
    assert list(checks.broken_links("docs/X.md", planted, existing)) == [
        "docs/X.md: link to gone.md, which does not exist"
    ]


def test_changelog_has_an_entry_for_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    entry = re.search(
        rf"^## {re.escape(millpond.__version__)}\b.*?\n(.*?)(?=^## |\Z)", changelog, re.M | re.S
    )
    assert entry is not None
    assert re.search(r"^- \w", entry[1], re.M)


def test_no_lock_file() -> None:
    names = [str(path.relative_to(ROOT)) for path in checks.repository_files()]
    assert [name for name in names if LOCK_FILES.search(name)] == []
    assert all(map(LOCK_FILES.search, ["uv.lock", "a/package-lock.json", "requirements-dev.txt"]))


@pytest.mark.parametrize("check", [checks.forbidden_text, checks.left_over_notes])
def test_no_forbidden_text(check: Callable[[str, str], Iterator[str]]) -> None:
    findings = [finding for where, text in repository_texts() for finding in check(where, text)]
    assert "\n".join(findings) == ""


@pytest.mark.parametrize(
    "planted",
    [
        "see ../sha" + "red/design",
        "cd /wo" + "rk/main",
        "tried in a working ses" + "sion",
        "from https://py" + "pi.org/simple",
        "as LAY" + "OUT.md says",
        "closes issue " + "2",
    ],
)
def test_forbidden_text_is_found(planted: str) -> None:
    assert len(list(checks.forbidden_text("planted.md", f"fine\n{planted}\nfine"))) == 1


def test_left_over_note_is_found() -> None:
    assert len(list(checks.left_over_notes("planted.py", "x = 1  # TO" + "DO: y"))) == 1


# ---------------------------------------------------------------- commands


def markdown_files() -> list[tuple[str, str]]:
    return [(where, text) for where, text in repository_texts() if where.endswith(".md")]


def unknown_make_targets(markdown: str) -> list[str]:
    targets = checks.make_targets((ROOT / "Makefile").read_text(encoding="utf-8"))
    words = [line.split() for line in checks.commands_in(markdown)]
    named = [line[1] for line in words if line[:1] == ["make"] and len(line) > 1]
    return [f"make {name}" for name in named if name not in targets]


def unknown_millpond_commands(markdown: str) -> list[str]:
    """Return what the CLI would refuse: commands, subcommands and options it does not have."""
    found: list[str] = []
    for line in checks.commands_in(markdown):
        words = line.split()
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        if words[:1] == ["millpond"]:
            found += _unknown_words(line, words[1:])
    return found


def _unknown_words(line: str, words: list[str]) -> list[str]:
    found: list[str] = []
    commands: list[click.Command] = [cli]
    for word in (item.strip("[]") for item in words):
        if word in ("--", "|", "&", ">", "&&", "…", "..."):
            break
        if word.startswith("--"):
            option = word.partition("=")[0]
            if option not in _options(commands):
                found.append(f"{line}: no option {option}")
        elif isinstance(commands[-1], click.Group) and re.fullmatch(r"[a-z|-]+", word):
            group = commands[-1]
            found += [
                f"{line}: no {name}" for name in word.split("|") if name not in group.commands
            ]
            first = group.commands.get(word.partition("|")[0])
            if first is not None:
                commands.append(first)
    return found


def _options(commands: list[click.Command]) -> set[str]:
    names = {"--help"}
    for command in commands:
        for parameter in command.params:
            names.update(parameter.opts)
            names.update(parameter.secondary_opts)
    return names


def test_commands_in_the_documents_exist() -> None:
    findings = [
        f"{where}: {finding}"
        for where, text in markdown_files()
        for finding in unknown_make_targets(text) + unknown_millpond_commands(text)
    ]
    assert "\n".join(findings) == ""


def test_readme_names_every_make_target_and_command() -> None:
    lines = checks.commands_in((ROOT / "README.md").read_text(encoding="utf-8"))
    targets = checks.make_targets((ROOT / "Makefile").read_text(encoding="utf-8"))
    hidden = {"help", "lint", "fast-tests"}
    wanted = {f"make {name}" for name in targets - hidden}
    wanted |= {f"millpond {name}" for name in cli.commands}
    missing = {item for item in wanted if not any(line.startswith(item) for line in lines)}
    assert missing == set()


def test_examples_in_the_help_exist() -> None:
    commands = list(_all_commands(cli))
    texts = [f"{command.help}\n{command.epilog}" for command in commands]
    lines = [line.strip().partition("  #")[0] for text in texts for line in text.splitlines()]
    examples = [line for line in lines if line.startswith("millpond ")]
    assert len(examples) >= len(commands)
    assert unknown_millpond_commands("\n".join(f"`{line}`" for line in examples)) == []


def _all_commands(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from _all_commands(inner)


def test_unknown_commands_are_found() -> None:
    planted = "```\n$ make fly  # up\nmillpond levitate --high\n```\nor `millpond pool --wings 2`\n"
    assert unknown_make_targets(planted) == ["make fly"]
    assert unknown_millpond_commands(planted) == [
        "millpond levitate --high: no levitate",
        "millpond levitate --high: no option --high",
        "millpond pool --wings 2: no option --wings",
    ]


def test_makefile_calls_commands_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    called = re.findall(r"\.venv/bin/millpond (\w+)", makefile)
    assert called
    assert [name for name in called if name not in cli.commands] == []


# ---------------------------------------------------------------- tables of the README


def test_readme_has_every_setting_with_its_default() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in readme.splitlines() if line.startswith("| ")]
    hidden = {"connector.copy_delay_s"}  # for tests only; docs/ORDERING.md has it
    for option in settings._ALL_OPTIONS:
        if option.key in hidden:
            continue
        (row,) = [cells for cells in rows if f"`{option.key}`" in cells[0]]
        assert f"`{option.variable}`" in row[1]
        if option.default is not None:
            assert str(option.default).lower().removesuffix(".0") in row[-1]


def test_readme_has_every_exit_code() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("## Exit codes")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    codes = {int(code) for cell in cells for code in re.findall(r"\d+", cell)}
    assert codes == {int(code) for code in Exit}
