"""`bench transfer`: checkpoints into stores of objects and back, beside the least that this could cost."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from benchmarks import machine, pages, report, restore
from benchmarks.bare import BareMooncake, Socket
from benchmarks.timing import Contender, Timing, race
from kda_jax.config import ModelConfig
from transfer import About, DiskObjects, Item, MemoryObjects, Objects, Put, Read, fetch, publish, withdraw
from transfer.mooncake import MooncakeObjects, MooncakeSettings
from transfer.mooncake.library import connect, disconnect
from transfer.mooncake.local import LocalMooncake

NAMESPACE = "benchmark"
TIMEOUT_S = 120.0
SHARDS = 7  # about 64 MB of K3 a shard
LEASE_MS = 2000  # longer than any read here
ROOM = 3 << 30  # bytes of each store
BARE = "bare mooncake"
NOTES = {
    "nbytes": "of the arrays: recurrent states in float32, convolution windows in bfloat16, no latents",
    "objects": "one contiguous buffer through Objects.put and .get, without digests",
    "checkpoint": "the leaves as they are through publish and fetch: packed, every byte digested, compared when read",
    "ratio_to_bare": "median seconds of Mooncake's put_from or get_into of one registered buffer, over these",
    "copied": "bytes that were copied in this process in one call; the library's own copies are not counted",
    "memcpy": "NumPy's copy of one contiguous buffer to another",
    "socket": "all bytes to another process over loopback and one back; or all bytes from there",
    "disk": "synced: on the disk when the call ends",
}


class Sample(NamedTuple):
    """A checkpoint: what it is called, and its arrays by leaf."""

    name: str
    arrays: Mapping[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def whole(self) -> np.ndarray:
        """All bytes, one leaf after the other, [nbytes]."""
        return np.concatenate([array.reshape(-1).view(np.uint8) for array in self.arrays.values()])


def shapes(config: ModelConfig, shards: int = 1) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of the states of a model's KDA layers by leaf, or of one in `shards` parts of its heads."""
    heads, value_heads = config.kda_num_heads // shards, config.kda_value_heads // shards
    channels = 2 * heads * config.kda_head_dim + value_heads * config.kda_value_dim
    recurrent = (1, value_heads, config.kda_head_dim, config.kda_value_dim), np.dtype(np.float32)
    conv = (1, config.conv_size - 1, channels), np.dtype(ml_dtypes.bfloat16)
    layers = [i for i, kind in enumerate(config.layers) if kind == "kda"]
    by_kind = {"recurrent": recurrent, "conv": conv}
    return {f"layers.{i}.{kind}": leaf for i in layers for kind, leaf in by_kind.items()}


def sample(name: str, config: ModelConfig, shards: int = 1) -> Sample:
    """A checkpoint of these shapes, with random numbers."""
    rng = np.random.default_rng(0)
    leaves = shapes(config, shards).items()
    return Sample(
        name, {leaf: rng.standard_normal(shape, np.float32).astype(dtype) for leaf, (shape, dtype) in leaves}
    )


def samples(quick: bool) -> list[Sample]:
    """Checkpoints of the example's model, of Kimi Linear 48B, of a shard of Kimi K3, and of K3."""
    small = [sample("small model", ModelConfig.tiny())]
    if quick:
        return small
    k3 = ModelConfig.kimi_k3()
    large = [("Kimi Linear 48B", ModelConfig.kimi_linear_48b(), 1), ("shard of Kimi K3", k3, SHARDS)]
    return [*small, *(sample(*each) for each in large), sample("Kimi K3", k3)]


class Way:
    """A sample through a store, as one object or as a checkpoint, under a new name each time."""

    def __init__(self, store: str, level: str, objects: Objects, sample: Sample, whole: np.ndarray) -> None:
        self.store, self.level, self.copied = store, level, {"put": 0, "get": 0}
        self._objects, self._arrays, self._whole = objects, sample.arrays, whole
        self._count, self._name = 0, ""

    def prepare(self) -> str:
        """Removes what was put before, and names the next one."""
        if self._name:
            if self.level == "objects":
                gone = self._objects.remove([self._name], TIMEOUT_S)[0]
            else:
                gone = withdraw(self._objects, self._name, TIMEOUT_S)
            if not gone:
                raise RuntimeError(f"{self.store}: {self._name} was not removed")
        self._count += 1
        self._name = f"{self.level}/{self._count}"
        return self._name

    def put(self, name: str) -> None:
        """Stores the sample."""
        before = self._objects.counters().copied
        if self.level == "objects":
            put = self._objects.put([Item(name, [self._whole])], TIMEOUT_S)[0]
        else:
            put = publish(self._objects, name, self._arrays, About(NAMESPACE, 0), TIMEOUT_S)
        if put is not Put.STORED:
            raise RuntimeError(f"{self.store}, {self.level}: {put}, {self._objects.counters()}")
        self.copied["put"] = self._objects.counters().copied - before

    def get(self, _: object) -> None:
        """Reads what was put last."""
        before, after = self._objects.counters().copied, 0
        if self.level == "objects":
            found = self._objects.get([Read(self._name)], TIMEOUT_S)[0]
        else:
            found = fetch(self._objects, self._name, NAMESPACE, None, TIMEOUT_S)
            after = 0 if found is None else found.copied
        if found is None:
            raise RuntimeError(f"{self.store}, {self.level}: nothing read, {self._objects.counters()}")
        self.copied["get"] = self._objects.counters().copied - before + after


def measure(
    what: Sample, stores: Mapping[str, Objects], bare: BareMooncake, rounds: int, log: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Races put, then get, of one sample through every store."""
    whole = what.whole
    copy, wire = np.empty_like(whole), Socket(whole.nbytes)
    ways = [
        Way(store, level, objects, what, whole)
        for store, objects in stores.items()
        for level in ("objects", "checkpoint")
    ]
    records = []
    for op in ("put", "get"):
        contenders = [
            Contender(name="memcpy", call=lambda _: np.copyto(copy, whole)),
            Contender(name="socket", call=getattr(wire, op)),
            Contender(name=BARE, call=getattr(bare, op), prepare=bare.prepare if op == "put" else None),
        ]
        contenders += [
            Contender(
                name=f"{way.store}, {way.level}",
                call=getattr(way, op),
                prepare=way.prepare if op == "put" else None,
            )
            for way in ways
        ]
        timings = race(
            contenders,
            rounds=rounds,
            budget_s=60.0,
            on_call=lambda name, op=op: log(f"{what.name}, {op}: {name}"),
        )
        records += _records(what, op, timings, ways)
    wire.close()
    for way in ways:
        way.prepare()
    return records


def _records(what: Sample, op: str, timings: Mapping[str, Timing], ways: list[Way]) -> list[dict[str, Any]]:
    """One record a contender."""
    levels = {f"{way.store}, {way.level}": way for way in ways}
    records = []
    for name, timing in timings.items():
        way = levels.get(name)
        records.append(
            {
                "sample": what.name,
                "nbytes": what.nbytes,
                "op": op,
                "store": way.store if way else name,
                "level": way.level if way else None,
                "seconds": timing.median_ms / 1e3,
                "least_seconds": timing.min_ms / 1e3,
                "rounds": timing.rounds,
                "ratio_to_bare": timings[BARE].median_ms / timing.median_ms,
                "ratio_to_memcpy": timings["memcpy"].median_ms / timing.median_ms,
                "copied": way.copied[op] if way else None,
            }
        )
    return records


def main(json: Path | None = None, quick: bool = False) -> dict[str, Any]:
    """Move checkpoints through every store, find from how many tokens on restoring beats recomputing, push pages.

    Args:
        json: where to write the report; None writes none.
        quick: the small model's checkpoint alone, few rounds: a look at whether everything runs.

    Returns:
        The report, as written: `results` [{sample, nbytes, op, store, level, seconds, ratio_to_bare, copied, ...}],
        `restore` and `pages`.

    Raises:
        transfer.Unavailable: Mooncake is not installed or does not start; says what to do.
        RuntimeError: a store failed.
    """
    console, rounds, records = report.console(), 3 if quick else 15, []
    report.make_folders(json)
    with report.progress(console) as log, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log("starting Mooncake")
        mooncake = stack.enter_context(
            LocalMooncake(segment_bytes=ROOM, lease_ms=LEASE_MS // 10 if quick else LEASE_MS)
        )
        library = connect(MooncakeSettings(master=mooncake.address))
        stack.callback(disconnect, library)
        stores = {
            "memory": MemoryObjects(),
            "disk": stack.enter_context(DiskObjects(folder / "objects", ROOM)),
            "mooncake": MooncakeObjects(MooncakeSettings(master=mooncake.address), library),
        }
        for what in samples(quick):
            bare = BareMooncake(library, what.nbytes)
            records += measure(what, stores, bare, rounds, log)
            bare.close()
        restored = restore.measure(stores, quick, log)
        pushed = pages.measure(quick, log)
    result = {
        "benchmark": "transfer",
        "machine": machine.describe(),
        "notes": NOTES | restore.NOTES | pages.NOTES,
        "results": records,
        "restore": restored,
        "pages": pushed,
    }
    show(console, result)
    report.write(json, result)
    return result


def show(console: Any, result: Mapping[str, Any]) -> None:
    """A table a sample and act, and where restoring begins to win."""
    records = result["results"]
    for name, op in dict.fromkeys((record["sample"], record["op"]) for record in records):
        chosen = [record for record in records if (record["sample"], record["op"]) == (name, op)]
        rows = [
            (
                ", ".join(filter(None, (record["store"], record["level"]))),
                f"{1e3 * record['least_seconds']:.3g} / {1e3 * record['seconds']:.3g}",
                f"{record['nbytes'] / record['seconds'] / 2**30:.2f}",
                f"{record['ratio_to_bare']:.2f}",
                "-" if record["copied"] is None else f"{record['copied']:,}",
            )
            for record in chosen
        ]
        title = f"{name}, {chosen[0]['nbytes']:,} bytes: {op}"
        columns = ("", "ms, least / median", "GiB/s", "of bare", "copied")
        console.print(report.table(title, columns, rows))
    restore.show(console, result["restore"])
    pages.show(console, result["pages"])
