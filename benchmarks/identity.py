"""What it costs to know a prompt's prefix: by text, by tokens, by what caches tell.

    python benchmarks/identity.py [--rounds 7] [--long 131072]

Prompts are the standard library's sources; their tokens are those of a byte-level BPE of 32,768
that is trained on the same sources first. For prompts of 1k, 16k and 128k tokens, in turns:

    text      the router reads a request and names its text
    library   the same tokenizer in this process, and names of blocks of 256 and 16
    tokenize  a replica's /tokenize, and the same names: a round trip, and of it CPU time here
    ids       a request with token ids: they are read and named
    events    a batch that tells of all blocks of 16: it is decoded and applied; then a lookup

Needs an engine: it starts a tiny one, whose tokenizer is replaced. Prints one line of JSON:
medians in microseconds, ratios to text, and bytes that a known block takes.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import sys
import sysconfig
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from millpond.launch.system import System, SystemOptions
from millpond.launch.tiny import make_attention
from millpond.router.kv_events import Feed
from millpond.router.prefixes import TextIdentity
from millpond.router.prompts import read_prompt
from millpond.router.replicas import Address, Replica, Replicas, State
from millpond.router.tokenizing import ReplicaTokenizer, read_call
from millpond.router.tokens import TOKEN_BLOCK, TokenNames

COMPLETIONS = "/v1/completions"
VOCABULARY = 32_768
ENGINE_BLOCK = 16
CORPUS_BYTES = 12 * 2**20
CPU_ROUND_TRIP = "tokenize_cpu"


# ---------------------------------------------------------------- prompts


def corpus() -> list[str]:
    """Return sources of the standard library, in an order that is always the same."""
    texts: list[str] = []
    num_bytes = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts and num_bytes < CORPUS_BYTES:
            texts.append(path.read_text(encoding="utf-8", errors="ignore"))
            num_bytes += len(texts[-1])
    return texts


def train(texts: Sequence[str]) -> Tokenizer:
    """Return a byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def prompt_of(tokenizer: Tokenizer, texts: Sequence[str], num_tokens: int, seed: int) -> str:
    """Return a text of about so many tokens, of pieces that no other seed begins with."""
    chance = random.Random(seed)
    text = ""
    while len(ids := tokenizer.encode(text).ids) < num_tokens:
        text += "".join(chance.choices(texts, k=max(1, num_tokens // 8_000)))
    return tokenizer.decode(ids[:num_tokens])


# ---------------------------------------------------------------- ways


def microseconds(work: Callable[[], object]) -> float:
    """Return what a call takes."""
    started = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - started) / 1e3


def name_all(ids: Sequence[int]) -> None:
    """Name a prompt for the pool and for caches with blocks of 16."""
    names = TokenNames(ids)
    names.names(TOKEN_BLOCK)
    names.names(ENGINE_BLOCK)


def batch(ids: Sequence[int], number: int) -> bytes:
    """Return the batch of an engine that has cached a prompt."""
    num_blocks = len(ids) // ENGINE_BLOCK
    event = {
        "type": "BlockStored",
        "block_hashes": [(number << 32) + i for i in range(num_blocks)],
        "parent_block_hash": None,
        "token_ids": list(ids[: num_blocks * ENGINE_BLOCK]),
        "block_size": ENGINE_BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * num_blocks,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return msgspec.msgpack.encode([time.time(), [event], 0])


def new_feed() -> Feed:
    return Feed(Replica("a", Address("http://a:1")))


def bytes_per_block(ids: Sequence[int]) -> float:
    """Return the memory that a known block takes, over many prompts."""
    chance = random.Random(0)
    batches = [batch(chance.sample(ids, len(ids)), i) for i in range(8)]
    gc.collect()
    tracemalloc.start()
    feed = new_feed()
    for i, each in enumerate(batches):
        feed.take(i, each)
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / feed.statistics()["num_blocks"]


async def measure(
    tokenizer: Tokenizer, asked: ReplicaTokenizer, text: str, rounds: int
) -> dict[str, list[float]]:
    """Return the times of each way for one prompt."""
    ids: list[int] = tokenizer.encode(text).ids
    body = json.dumps({"prompt": text}).encode()
    body_of_ids = json.dumps({"prompt": ids}).encode()
    identity = TextIdentity()
    stored = batch(ids, 0)
    prompt = TokenNames(ids)
    prompt.names(ENGINE_BLOCK)

    def read_ids() -> None:
        call = read_call(COMPLETIONS, body_of_ids)
        assert call is not None
        assert call.ids is not None
        name_all(call.ids)

    found: dict[str, list[float]] = {}
    for i in range(rounds + 1):
        feed = new_feed()
        ways: dict[str, Callable[[], object]] = {
            "text": lambda: read_prompt(COMPLETIONS, body, None, identity),
            "library": lambda: name_all(tokenizer.encode(text).ids),
            "ids": read_ids,
            "events": lambda feed=feed: feed.take(0, stored),
            "lookup": lambda feed=feed: feed.num_tokens(prompt),
        }
        times = {name: microseconds(work) for name, work in ways.items()}
        assert feed.num_tokens(prompt) == (len(ids) - 1) // ENGINE_BLOCK * ENGINE_BLOCK
        started, cpu = time.perf_counter_ns(), time.process_time_ns()
        names = await asked.names(COMPLETIONS, body, None)
        assert names is not None, "the replica gave no tokens"
        assert names.num_tokens == len(ids)
        names.names(TOKEN_BLOCK)
        names.names(ENGINE_BLOCK)
        times["tokenize"] = (time.perf_counter_ns() - started) / 1e3
        times[CPU_ROUND_TRIP] = (time.process_time_ns() - cpu) / 1e3
        if i:  # the first round warms up
            for name, value in times.items():
                found.setdefault(name, []).append(value)
    return found


# ---------------------------------------------------------------- all of it


def figures(samples: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Return medians, and ratios to naming a text."""
    found: dict[str, float] = {}
    for length, ways in samples.items():
        medians = {way: statistics.median(values) for way, values in ways.items()}
        for way, value in medians.items():
            found[f"identity_{way}_{length}_us"] = round(value, 1)
            if way != "text":
                found[f"identity_{way}_{length}_ratio"] = round(value / medians["text"], 2)
    return found


async def measure_all(
    tokenizer: Tokenizer, prompts: dict[str, str], url: str, rounds: int
) -> dict[str, float]:
    """Ask a replica and measure everything else beside it."""
    replicas = Replicas()
    replicas.add("a", url).state = State.READY
    # As the router's own session does.
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        asked = ReplicaTokenizer(replicas, session)
        samples = {
            length: await measure(tokenizer, asked, text, rounds)
            for length, text in prompts.items()
        }
    return figures(samples)


def main() -> None:
    """Train, start, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--long", type=int, default=131_072, help="tokens of the longest prompt")
    options = parser.parse_args()
    texts = corpus()
    tokenizer = train(texts)
    lengths = {"1k": 1_024, "16k": 16_384, "128k": options.long}
    prompts = {
        name: prompt_of(tokenizer, texts, num, seed)
        for seed, (name, num) in enumerate(lengths.items())
    }
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        model = Path(folder) / "model"
        make_attention(model, seed=1)
        tokenizer.save(str(model / "tokenizer.json"))
        system = SystemOptions(
            model=str(model),
            num_replicas=1,
            device="cpu",
            environ=os.environ,
            pool=None,
            engine_args=("--max-model-len", "4096", "--block-size", "64"),
        )
        with System(system) as running:
            url = running.replicas[0].url
            found = asyncio.run(measure_all(tokenizer, prompts, url, options.rounds))
    found["identity_bytes_per_known_block"] = round(
        bytes_per_block(tokenizer.encode(prompts["128k"]).ids), 1
    )
    found["identity_text_bytes_per_token"] = round(
        len(prompts["128k"].encode()) / len(tokenizer.encode(prompts["128k"]).ids), 2
    )
    json.dump(found, sys.stdout)
    print()


if __name__ == "__main__":
    main()
