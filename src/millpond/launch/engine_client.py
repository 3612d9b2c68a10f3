"""Asking one vLLM replica: a greedy completion with its tokens, their odds and their times."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Self, cast

import httpx
from prometheus_client.parser import text_string_to_metric_families

_TOKENS_BY_SOURCE: Final = "vllm:prompt_tokens_by_source_total"


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer and when it came. ``ttft_s``: from sending to the first token's arrival."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ttft_s: float
    e2el_s: float

    def logprob_difference(self, other: "Completion") -> float:
        """Return the largest difference of log-probabilities, token by token.

        Raises ``ValueError`` for answers of different lengths.
        """
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max(abs(mine - theirs) for mine, theirs in pairs)


class EngineClient:
    """Asks one replica over HTTP. Every call is bounded by ``timeout_s`` without a byte."""

    def __init__(self, url: str, model: str, *, timeout_s: float) -> None:
        self._model = model
        # Replicas listen on this machine; a proxy from the environment has no business here.
        self._http = httpx.Client(base_url=url, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        num_tokens: int,
        request_id: str,
        fields: Mapping[str, object] = MappingProxyType({}),
    ) -> Completion:
        """Return the greedy continuation of ``prompt_ids`` by exactly ``num_tokens`` tokens.

        ``fields`` are added to the body, for what only some requests have.

        Raises ``httpx.HTTPError``, and ``ValueError`` for an answer without tokens.
        """
        body: dict[str, object] = {
            "model": self._model,
            "prompt": list(prompt_ids),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 0,
            "return_tokens_as_token_ids": True,
            **fields,
        }
        collected = _Collector()
        started_at = time.perf_counter()
        with self._http.stream(
            "POST", "/v1/completions", json=body, headers={"X-Request-Id": request_id}
        ) as answer:
            if answer.is_error:
                answer.read()
                answer.raise_for_status()
            for line in answer.iter_lines():
                collected.add(line)
        return collected.completion(request_id, started_at)

    def reset_prefix_cache(self) -> None:
        """Make the engine forget its local prefixes; needs VLLM_SERVER_DEV_MODE=1.

        Raises ``httpx.HTTPError``.
        """
        self._http.post("/reset_prefix_cache").raise_for_status()

    def prompt_tokens_by_source(self) -> dict[str, int]:
        """Return the prompt tokens that the engine has counted since its start, by its names.

        ``local_compute``, ``local_cache_hit`` and ``external_kv_transfer``, summed over engine
        cores. Raises ``httpx.HTTPError``.
        """
        text = self._http.get("/metrics").raise_for_status().text
        counted: dict[str, int] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == _TOKENS_BY_SOURCE:
                    source = sample.labels["source"]
                    counted[source] = counted.get(source, 0) + int(sample.value)
        return counted


class _Collector:
    """Server-sent events of one completion, as they arrive."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._first_at: float | None = None

    def add(self, line: str) -> None:
        if not line.startswith("data: {"):
            return
        event = cast("dict[str, object]", json.loads(line.removeprefix("data: ")))
        if "error" in event:
            raise ValueError(f"the engine answered {event['error']}")
        choices = cast("list[dict[str, dict[str, list[object]] | None]]", event["choices"])
        logprobs = choices[0]["logprobs"] if choices else None
        if not logprobs or not logprobs["tokens"]:
            return
        if self._first_at is None:
            self._first_at = time.perf_counter()
        # "token_id:17", because return_tokens_as_token_ids is set.
        self._token_ids += [
            int(str(token).removeprefix("token_id:")) for token in logprobs["tokens"]
        ]
        self._logprobs += [float(str(value)) for value in logprobs["token_logprobs"]]

    def completion(self, request_id: str, started_at: float) -> Completion:
        if self._first_at is None:
            raise ValueError(f"request {request_id}: the engine answered without tokens")
        return Completion(
            request_id=request_id,
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            ttft_s=self._first_at - started_at,
            e2el_s=time.perf_counter() - started_at,
        )
