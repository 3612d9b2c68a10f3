"""Answers browsers: the page as one document, and its state."""

import base64
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Final

import msgspec

from millpond.router.page.state import About, page_state
from millpond.router.page.window import Window
from millpond.router.replicas import Replicas

PAGE_PATHS: Final = frozenset({"/millpond", "/millpond/"})
STATE_PATH: Final = "/millpond/state.json"
_KEPT_S: Final = 1.0
"""However many people look, the state is put together once in this time."""
_SAFE: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a browser gets, with status 200."""

    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


class LivePage:
    """Serves ``PAGE_PATHS`` and ``STATE_PATH``; nothing is computed until somebody asks."""

    def __init__(
        self,
        replicas: Replicas,
        policy: str,
        *,
        identity: Callable[[], str],
        has_pool: Callable[[], bool],
    ) -> None:
        self.window = Window()
        self._replicas = replicas
        self._policy = policy
        self._identity = identity
        self._has_pool = has_pool
        self._started_at = time.time()
        self._document = _document()
        self._state = b""
        self._state_until_s = 0.0

    def answer(self, path: str) -> Answer:
        """Return the page or its state, which may be a second old."""
        if path in PAGE_PATHS:
            return self._document
        now_s = time.monotonic()
        if now_s >= self._state_until_s:
            self._state = msgspec.json.encode(self._state_now())
            self._state_until_s = now_s + _KEPT_S
        return Answer(_headers("application/json"), self._state)

    def _state_now(self) -> dict[str, object]:
        about = About(
            policy=self._policy,
            identity=self._identity(),
            started_at=self._started_at,
            now=time.time(),
            has_pool=self._has_pool(),
        )
        return page_state(about, self._replicas, self.window)


def _document() -> Answer:
    """Return the page with style and script in it.

    It may run what has these digests and nothing else: whatever a name or a replica's answer
    is made to look like, it is no script here.
    """
    folder = resources.files("millpond.router.page")
    html, style, script = (
        (folder / f"page.{suffix}").read_text(encoding="utf-8") for suffix in ("html", "css", "js")
    )
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    body = html.replace("/* page.css */", style).replace("/* page.js */", script).encode()
    headers = _headers("text/html; charset=utf-8")
    return Answer([*headers, (b"content-security-policy", policy.encode())], body)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _headers(content_type: str) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", content_type.encode()), *_SAFE]
