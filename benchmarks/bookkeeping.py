"""What the cache's bookkeeping costs beside the least that the same work can cost.

    python -m benchmarks.bookkeeping [--json F]

Sizes are those of long agent sessions: an index of 10,000 sessions, a prompt of 2^20 tokens that came in 16 turns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.timing import Contender, race
from cache.keys import UNIT, KeyChain
from cache.namespace import Namespace
from cache.payload import Sized
from cache.plan import Limits
from cache.retention.protocol import Boundary, Creation, Kind
from cache.store import Store
from cache.tier import Tier
from cache.tokens import Tokens

NAMESPACE = Namespace(weights=b"weights", tokenizer=b"tokenizer").digest()
STATE_NBYTES, ROW_NBYTES = 449_372_160, 27_648
"""Of Kimi K3."""
LENGTH, TURNS, SESSIONS = 2**20, 16, 10_000


class KeepAll:
    """A policy that gives nothing up, so that what is measured is the store."""

    creation = Creation()

    def made(self, boundary: Boundary, now: float) -> KeepAll:
        return self

    def held(self, key: bytes, now: float) -> KeepAll:
        return self

    def used(self, path: Sequence[bytes], hit: bytes | None, now: float) -> KeepAll:
        return self

    def dropped(self, key: bytes, now: float) -> KeepAll:
        return self

    def forgotten(self, key: bytes) -> KeepAll:
        return self

    def victims(self, nbytes: int, now: float) -> Iterator[bytes]:
        return iter(())

    def worth(self, key: bytes, now: float) -> float:
        return 0.0


def put(store: Store, tokens: Tokens) -> Store:
    """With a checkpoint behind all tokens."""
    pages = [Sized(UNIT * ROW_NBYTES)] * (len(tokens) // UNIT)
    return store.put(NAMESPACE, tokens, Sized(STATE_NBYTES), pages, kind=Kind.PROMPT_END, now=0.0)


def sessions(count: int, rng: np.random.Generator) -> Store:
    """A store with one checkpoint for each of many prompts of 4,096 tokens, which share one of 32 system prompts."""
    store = Store.empty({Tier.DEVICE: 10**18}, KeepAll(), state_nbytes=STATE_NBYTES, row_nbytes=ROW_NBYTES)
    systems = [rng.integers(0, 160_000, 2048, np.int32) for _ in range(32)]
    for number in range(count):
        store = put(store, np.append(systems[number % 32], rng.integers(0, 160_000, 2048, np.int32)))
    return store


def measure(rounds: int = 30) -> dict[str, float]:
    """Milliseconds of each act (the fastest of interleaved rounds), and the ratios that must stay small."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 160_000, LENGTH, np.int32)
    few, many = sessions(100, rng), sessions(SESSIONS, rng)
    filled = many
    for turn in range(1, TURNS + 1):
        filled = put(filled, prompt[: LENGTH * turn // TURNS])
    longer = np.append(prompt, np.int32(1))
    assert filled.plan(filled.match(NAMESPACE, longer), LENGTH + 1, Limits()).boundary == LENGTH
    other, data = prompt.copy(), prompt.tobytes()
    short = KeyChain.start(NAMESPACE).extend(prompt[:2048])
    long = KeyChain.start(NAMESPACE).extend(prompt)
    more, fresh = rng.integers(0, 160_000, 1000, np.int32), rng.integers(0, 160_000, 4096, np.int32)
    timings = race(
        [
            Contender(name="compare", call=lambda _: bool((prompt == other).all())),
            Contender(name="match", call=lambda _: filled.match(NAMESPACE, longer)),
            Contender(name="hash", call=lambda _: hashlib.blake2b(data, digest_size=32).digest()),
            Contender(name="keys", call=lambda _: KeyChain.start(NAMESPACE).extend(prompt)),
            Contender(name="extend_2k", call=lambda _: short.extend(more)),
            Contender(name="extend_1m", call=lambda _: long.extend(more)),
            Contender(name="put_100", call=lambda _: put(few, fresh)),
            Contender(name="put_10k", call=lambda _: put(many, fresh)),
        ],
        rounds=rounds,
        budget_s=30.0,
    )
    ms = {f"{name}_ms": timing.min_ms for name, timing in timings.items()}
    return {
        **ms,
        "match_to_compare": ms["match_ms"] / ms["compare_ms"],
        "keys_to_hash": ms["keys_ms"] / ms["hash_ms"],
        "extend_1m_to_2k": ms["extend_1m_ms"] / ms["extend_2k_ms"],
        "put_10k_to_100": ms["put_10k_ms"] / ms["put_100_ms"],
    }


def main() -> None:
    """Prints the figures, and writes them to a file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = measure()
    for name, value in figures.items():
        print(f"{name:20} {value:9.4f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"results": [figures]}) + "\n")


if __name__ == "__main__":
    main()
