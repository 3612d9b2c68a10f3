"""Names of requests: what a client called it, and what an engine made of that.

vLLM takes a client's ``X-Request-Id`` and wraps it, with I the index of a prompt or of a
sample and 8 hexadecimal digits of its own at the end (unless told to leave those out):

    completions   [I_] cmpl-<id>-I [-xxxxxxxx]
    chat          [I_] chatcmpl-<id> [_I] [-xxxxxxxx]
    others        [I_] <word>-<id> [-xxxxxxxx]

Sources: vllm/entrypoints/openai/*/serving.py, v1/engine/input_processor.py
(assign_request_id), v1/engine/parallel_sampling.py; the same in 0.26 to 0.33.
"""

import re
from typing import Final

_SAMPLE: Final = re.compile(r"\d+_")
_RANDOM_SUFFIX: Final = re.compile(r"-[0-9a-f]{8}$")
_KNOWN_PREFIX: Final = re.compile(
    r"(?P<kind>cmpl|chatcmpl|generate-tokens|transcribe|translate|embd|pooling|score|classify)-"
)
_INDEX: Final = {"cmpl": re.compile(r"-\d+$"), "chatcmpl": re.compile(r"_\d+$")}


def client_request_ids(engine_id: str) -> frozenset[str]:
    """Return every name by which a client may know the request that an engine calls so.

    The engine's own name is one of them, and so is the ``id`` of the engine's response.
    """
    names = {engine_id}
    sample = _SAMPLE.match(engine_id)
    if sample:
        names.add(engine_id[sample.end() :])
    names |= {_RANDOM_SUFFIX.sub("", name) for name in names}
    for name in tuple(names):
        names |= _unwrapped(name)
    names.discard("")
    return frozenset(names)


def matches_request_id(engine_id: str, client_id: str) -> bool:
    """Return whether ``client_id`` may be a client's name for an engine's request.

    Names are not escaped by the engine: a client that uses both ``a`` and ``a-0`` for
    completions gets the second for the first as well.
    """
    return client_id in client_request_ids(engine_id)


def _unwrapped(name: str) -> set[str]:
    prefix = _KNOWN_PREFIX.match(name)
    if not prefix:
        return set()
    inner = name[prefix.end() :]
    names = {inner}
    index = _INDEX.get(prefix["kind"])
    if index:
        names |= {index.sub("", inner), index.sub("", name)}
    return names
