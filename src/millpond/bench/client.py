"""Asking one endpoint: a streamed completion, and when each of its tokens came.

The first token is the first event that has content. Events without any do not count: one that
only names the role, one that only says why the answer ends, one with the usage.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self, cast

import aiohttp
import msgspec

_CONNECT_TIMEOUT_S: Final = 10.0
_LINE_BYTES_MAX: Final = 2**20
_ERROR_CHARACTERS: Final = 300
_NS_PER_MS: Final = 1e6
_CONTENT: Final = ("content", "reasoning_content", "reasoning", "tool_calls")


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go: one replica, or a router before all of them."""

    name: str
    url: str
    model: str


@dataclass(slots=True)
class Answer:
    """What came, by ``time.perf_counter_ns``. ``replica`` is a router's word, if it gave one."""

    started_ns: int
    first_ns: int | None = None
    ended_ns: int | None = None
    event_ns: list[int] = field(default_factory=list[int])
    num_tokens: int = 0
    cached_tokens: int | None = None
    replica: str | None = None
    error: str | None = None

    @property
    def ttft_ms(self) -> float | None:
        """From sending to the first event with content."""
        return None if self.first_ns is None else (self.first_ns - self.started_ns) / _NS_PER_MS

    @property
    def e2el_ms(self) -> float | None:
        """From sending to the end of the stream; None where it broke off."""
        return None if self.ended_ns is None else (self.ended_ns - self.started_ns) / _NS_PER_MS

    @property
    def itl_ms(self) -> list[float]:
        """Times between events with content."""
        pairs = zip(self.event_ns, self.event_ns[1:], strict=False)
        return [(later - earlier) / _NS_PER_MS for earlier, later in pairs]


def request_body(model: str, prompt: Sequence[int], num_tokens: int) -> bytes:
    """Return the body of a greedy completion of exactly ``num_tokens`` tokens."""
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            # The count in each event tells a token without text from an event without token.
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    )


class Client:
    """Asks endpoints. ``timeout_s`` bounds each wait for bytes."""

    def __init__(self, *, timeout_s: float) -> None:
        # No limit on connections, or an open-loop request would wait for another's answer. None
        # is used twice: the server may be closing it just then.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=timeout_s
            ),
            read_bufsize=_LINE_BYTES_MAX,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._session.close()

    async def ask(self, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Return the answer, whatever it was: a failure is in its ``error``."""
        answer = Answer(time.perf_counter_ns())
        try:
            async with self._session.post(
                f"{url}/v1/completions",
                data=body,
                headers={"Content-Type": "application/json", **headers},
            ) as response:
                answer.replica = response.headers.get("x-millpond-replica")
                if response.status != 200:
                    text = (await response.text(errors="replace"))[:_ERROR_CHARACTERS]
                    answer.error = f"status {response.status}: {text}"
                    return answer
                await _read(response, answer)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
        return answer


async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    is_done = False
    async for line in response.content:
        now_ns = time.perf_counter_ns()
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            is_done = True
            answer.ended_ns = now_ns
        elif data:
            take_event(answer, cast("Mapping[str, object]", msgspec.json.decode(data)), now_ns)
    if answer.error is None and not is_done:
        answer.error = "the stream ended without [DONE]"
    if answer.error is None and answer.first_ns is None:
        answer.error = "the answer had no token"


def take_event(answer: Answer, event: Mapping[str, object], now_ns: int) -> None:
    """Add one event that arrived at ``now_ns``."""
    if "error" in event:
        answer.error = f"the endpoint answered {event['error']}"[:_ERROR_CHARACTERS]
        return
    choices = cast("Sequence[Mapping[str, object]]", event.get("choices") or ())
    usage = cast("Mapping[str, object] | None", event.get("usage"))
    counted = cast("int | None", usage["completion_tokens"]) if usage else None
    has_text = any(_has_content(choice) for choice in choices)
    has_token = bool(choices) and counted is not None and counted > answer.num_tokens
    # Text without a new token was held back from an earlier one. Without counts, text decides.
    if has_token or (has_text and (counted is None or answer.first_ns is None)):
        if answer.first_ns is None:
            answer.first_ns = now_ns
        answer.event_ns.append(now_ns)
        answer.num_tokens += 1
    if counted is not None:
        # Events may bring several tokens each; the server has counted them.
        answer.num_tokens = counted
    details = cast("Mapping[str, int] | None", (usage or {}).get("prompt_tokens_details"))
    if details:
        answer.cached_tokens = details.get("cached_tokens")


def _has_content(choice: Mapping[str, object]) -> bool:
    if choice.get("text"):
        return True
    delta = cast("Mapping[str, object]", choice.get("delta") or {})
    return any(delta.get(name) for name in _CONTENT)
