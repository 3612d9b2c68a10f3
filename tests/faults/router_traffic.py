"""Scripted replicas that share a pool as real ones do: caches, reports, times to first token."""

import asyncio
import io
import json
from collections import Counter
from contextlib import ExitStack

import aiohttp

from millpond.service.client import SchedulerClient
from millpond.service.protocol import Report
from tests.faults.router_world import DONE, EVENT, Call, ScriptedReplica, stream
from tests.faults.world import identity

BLOCK = 256


class PooledReplicas:
    """Replicas that hold what they have served, and load from each other what they have not.

    Prompts are token ids of which the first names the conversation: two prompts of one
    conversation have the shorter one in common. A token takes ``s_per_token`` to compute and
    a hundredth of that to load. ``reports`` is all that they have told the pool.
    """

    def __init__(
        self, stack: ExitStack, socket_path: str, names: str, *, s_per_token: float = 0.0
    ) -> None:
        self.reports: list[tuple[str, Report]] = []
        self._s_per_token = s_per_token
        self._local: dict[str, Counter[int]] = {name: Counter() for name in names}
        self._writers: dict[int, list[str]] = {}
        self._clients = {
            name: stack.enter_context(
                SchedulerClient.connect(socket_path, identity(name, f"key-{name}"))
            )
            for name in names
        }
        self.replicas = [self._replica(name) for name in names]

    def _replica(self, name: str) -> ScriptedReplica:
        async def script(call: Call) -> None:
            report = self._serve(name, call)
            computing_s = report.computed_tokens * self._s_per_token
            await asyncio.sleep(computing_s + report.loaded_tokens * self._s_per_token / 100)
            await stream(EVENT, DONE)(call)
            self._clients[name].report(report)
            self.reports.append((name, report))

        return ScriptedReplica(name, script)

    def _serve(self, name: str, call: Call) -> Report:
        ids = json.loads(call.body)["prompt"]
        conversation, num_blocks = ids[0], len(ids) // BLOCK
        pooled = self._writers.setdefault(conversation, [])
        num_local = min(self._local[name][conversation], num_blocks)
        loaded = Counter(pooled[num_local:num_blocks])
        self._local[name][conversation] = max(num_local, num_blocks)
        pooled += [name] * (num_blocks - len(pooled))
        num_loaded = BLOCK * loaded.total()
        (request_id,) = call.header("x-request-id")
        return Report(
            request_id=f"cmpl-{request_id}-0-0123abcd",
            prompt_tokens=len(ids),
            computed_tokens=len(ids) - BLOCK * num_local - num_loaded,
            local_tokens=BLOCK * num_local,
            loaded_tokens=num_loaded,
            writers={writer: BLOCK * num for writer, num in loaded.items()},
        )


async def ask(
    session: aiohttp.ClientSession, url: str, conversation: int, num_tokens: int, **headers: str
) -> None:
    """Send a prompt of a conversation to a router, and read the answer to its end."""
    body = {"model": "m", "prompt": [conversation] * num_tokens, "stream": True}
    data = io.BytesIO(json.dumps(body).encode())
    async with session.post(f"{url}/v1/completions", data=data, headers=headers) as reply:
        assert await reply.content.read() == EVENT + DONE
