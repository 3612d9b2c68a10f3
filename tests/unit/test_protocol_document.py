"""docs/PROTOCOL.md says what the code does: every message, field, code and limit is in it."""

import re
from pathlib import Path
from typing import get_args

import pytest

from millpond.model import limits
from millpond.model.namespace import FieldDifference, Namespace, PartSpec
from millpond.service import protocol

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "PROTOCOL.md").read_text(encoding="utf-8")
CODE = " ".join(re.findall(r"`([^`]+)`", DOCUMENT.replace("\n", " ")))
"""All that the document sets as code."""
MESSAGES = get_args(protocol.Request) + get_args(protocol.Reply)
STRUCTS = (*MESSAGES, Namespace, PartSpec, FieldDifference)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.__name__)
def test_each_message_is_named(message: type) -> None:
    assert re.search(rf"\b{message.__struct_config__.tag}\b", CODE)


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda m: m.__name__)
def test_each_field_is_named(struct: type) -> None:
    assert [f for f in struct.__struct_fields__ if not re.search(rf"\b{f}\b", CODE)] == []


def test_a_missing_field_would_be_found() -> None:
    assert not re.search(r"\bno_such_field\b", CODE)


@pytest.mark.parametrize(
    "text",
    [
        f"{limits.FRAME_BYTES_MAX:,}",
        f"{limits.OUTPUT_BYTES_MAX // limits.MIB} MiB of replies",
        f"{limits.ARENA_HEADER_BYTES:,}",
        f"{limits.KEYS_PER_REQUEST_MAX:,} of them",
        f"{limits.LEASES_PER_SESSION_MAX:,} leases",
        f"{limits.CLIENTS_MAX:,} connections",
        f"{limits.NAME_LENGTH_MAX} printable characters",
        f"{limits.STRING_LENGTH_MAX:,} characters",
        f"{limits.PARTS_MAX} parts",
        f"at most {limits.RANKS_MAX}",
        f"{limits.REPORTS_KEPT_MAX:,}",
        f"1 to {limits.BLOCKS_SHOWN_MAX:,}",
        f"after {limits.HANDSHAKE_S_MAX:.0f} seconds",
        f"after {limits.WRITE_LEASE_S_MAX:.0f} seconds",
        f"Version {limits.PROTOCOL_VERSION}.",
        "16 or 32",
    ],
)
def test_each_limit_is_the_codes(text: str) -> None:
    assert text in DOCUMENT.replace("\n", " ")


def test_each_code_is_explained() -> None:
    source = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("service", "pool")
        for path in (ROOT / "src" / "millpond" / folder).glob("*.py")
    )
    codes = set(re.findall(r'HandshakeRefused\(\s*"([a-z-]+)"', source))
    codes |= set(re.findall(r'code="([a-z-]+)"', source))
    assert codes >= {"version", "taken", "full", "too-large", "role", "broken"}
    assert [code for code in sorted(codes) if f"| `{code}` |" not in DOCUMENT] == []
