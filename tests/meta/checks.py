"""Checks of the repository itself, as functions from text to findings.

Each finding is one line that says where and what. The tests call them on the repository, where
they must find nothing, and on a planted example, where they must find it.
"""

import ast
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 600

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

LEFT_OVER_NOTES = ("TO" + "DO", "FIX" + "ME", "XX" + "X")

FORBIDDEN_TEXT: Mapping[str, str] = {
    # In pieces, so that this file is not found by its own check.
    r"(?<![\w.-])/wo" + "rk/": "a path of somebody's machine",
    "/tmp/scr" + "atch": "a path of somebody's machine",
    r"(?<![\w.-])/ro" + "ot/": "a path of somebody's machine",
    r"(?<![\w.-])/ho" + r"me/\w": "a path of somebody's machine",
    r"\.\./sha" + "red": "a folder outside the repository",
    r"\b(?:LAY" + "OUT|ENG" + "INE|RIV" + r"ALS|DEVEL" + r"OPERS)\.md": (
        "a document that is not in the repository"
    ),
    r"\bissues? \d": "a number that says nothing to a reader",
    r"\bpy" + r"pi\.org": "the host of a registry",
    r"python" + r"hosted\.org": "the host of a registry",
    r"download\.py" + r"torch\.org": "the host of a registry",
    r"registry\.np" + r"mjs\.org": "the host of a registry",
    r"\bCla" + "ude": "how the text came about",
    "Anthr" + "opic": "how the text came about",
    "Co-Auth" + "ored-By": "how the text came about",
    r"\bsub-?ag" + "ent": "how the text came about",
    r"\bAI(?:-| )(?:gen|ass)" + r"\w+": "how the text came about",
    "working ses" + "sion": "how the text came about",
    "work" + "place": "how the text came about",
    "nvidia-h2" + "00": "the name of somebody's machine",
}


def repository_files() -> list[Path]:
    """Return all files that are, or would be, in the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=30,
    ).stdout
    names = [name.decode() for name in listed.split(b"\0") if name]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def python_files(*folders: str) -> Iterator[tuple[str, str]]:
    """Yield path below the root and text of each Python file under ``folders``."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


# ---------------------------------------------------------------- source


def long_code(where: str, text: str) -> Iterator[str]:
    """Find files and functions that are longer than somebody can hold in mind."""
    num_lines = text.count("\n")
    if num_lines > FILE_LINES_MAX:
        yield f"{where}: {num_lines} lines, at most {FILE_LINES_MAX}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, FunctionNode):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > FUNCTION_LINES_MAX:
                yield f"{where}:{node.lineno} {node.name}: {num_lines} lines"


def broad_excepts(where: str, text: str) -> Iterator[str]:
    """Find handlers that swallow every error; one that ends by raising again swallows none."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        names = {item.id if isinstance(item, ast.Name) else None for item in caught}
        is_broad = node.type is None or names & {"Exception", "BaseException"}
        last = node.body[-1]
        raises_again = isinstance(last, ast.Raise) and last.exc is None
        if is_broad and not raises_again:
            yield f"{where}:{node.lineno} broad except"


def sleeps(where: str, text: str) -> Iterator[str]:
    """Find ``time.sleep``: a test waits for an event, or with tests/waiting.py."""
    for node in ast.walk(ast.parse(text)):
        is_call = isinstance(node, ast.Attribute) and ast.unparse(node) == "time.sleep"
        is_import = (
            isinstance(node, ast.ImportFrom)
            and node.module == "time"
            and any(alias.name == "sleep" for alias in node.names)
        )
        if is_call or is_import:
            yield f"{where}:{node.lineno} time.sleep"


def stubs(where: str, text: str) -> Iterator[str]:
    """Find code that says that it is not written yet."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and node.id == "NotImplementedError":
            yield f"{where}:{node.lineno} NotImplementedError"


def missing_docstrings(where: str, text: str) -> Iterator[str]:
    """Find modules, and public classes and functions in them, without a docstring."""
    tree = ast.parse(text)
    if tree.body and ast.get_docstring(tree) is None:
        yield f"{where}: module without a docstring"
    for node in tree.body:
        is_public = isinstance(node, FunctionNode | ast.ClassDef) and node.name[0] != "_"
        if is_public and ast.get_docstring(node) is None:
            yield f"{where}:{node.lineno} {node.name} has no docstring"


def third_party_imports(text: str) -> set[str]:
    """Return the top-level names of all modules that ``text`` imports, lazily or not."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


# ---------------------------------------------------------------- text


def left_over_notes(where: str, text: str) -> Iterator[str]:
    """Find notes to oneself."""
    for number, line in enumerate(text.splitlines(), start=1):
        for note in LEFT_OVER_NOTES:
            if re.search(rf"\b{note}\b", line):
                yield f"{where}:{number} {note}"


def forbidden_text(where: str, text: str) -> Iterator[str]:
    """Find what belongs to the making of the repository and not to it."""
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern, reason in FORBIDDEN_TEXT.items():
            if re.search(pattern, line, re.IGNORECASE):
                yield f"{where}:{number} {reason}: {line.strip()[:80]}"


def broken_links(where: str, text: str, existing: set[str]) -> Iterator[str]:
    """Find links of a Markdown file to files that are not in ``existing``."""
    folder = Path(where).parent
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" in target or target.startswith("mailto:"):
            continue
        path = str((ROOT / folder / target).resolve().relative_to(ROOT))
        if path not in existing and not any(name.startswith(path + "/") for name in existing):
            yield f"{where}: link to {target}, which does not exist"


def named_documents(text: str) -> set[str]:
    """Return the documents below docs/ that a text names."""
    return set(re.findall(r"\bdocs/[\w/.-]+\.md\b", text))


def commands_in(markdown: str) -> list[str]:
    """Return each line in the code blocks and each code span, comments cut off."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", markdown, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```[^\n]*\n.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", prose)
    return [line.partition("  #")[0].strip().removeprefix("$ ") for line in lines]


def make_targets(makefile: str) -> set[str]:
    """Return the targets that a Makefile declares as phony."""
    phony = re.findall(r"^\.PHONY:(.*)$", makefile, re.MULTILINE)
    return set(" ".join(phony).split())
