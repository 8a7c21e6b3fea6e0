"""What a saved store says of itself, in one file: boundaries, tokens, and which file holds which payload."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cache.files import DIGEST_NBYTES, digest
from cache.node import whole_pages
from cache.tier import Tier
from cache.tokens import Tokens

LAYOUT = 1
"""Of all files; what was saved in another one is not read."""


class Line(NamedTuple):
    """A boundary.

    Attributes:
        key: its name.
        namespace: that it lies in.
        parent: place in the list of the deepest boundary before it; -1 without one.
        stop: tokens before it.
        kind: why it was made first.
        turn: prompts that had ended on its path when it was made.
        last_use: time of the last request that resumed there or could have.
        edge: the tokens from its parent on, as the store's index has them.
        names: of the pages that end in `edge`.
    """

    key: bytes
    namespace: bytes
    parent: int
    stop: int
    kind: str
    turn: int
    last_use: float
    edge: Tokens
    names: tuple[bytes, ...]


class SavedTier(NamedTuple):
    """What a tier held.

    Attributes:
        states: digests of the checkpoints' files by key, the least worth first.
        pages: digests of the pages' files by name.
        policy: what its policy knows, if that is `Lasting`.
    """

    states: dict[bytes, bytes]
    pages: dict[bytes, bytes]
    policy: dict[str, Any] | None


class SavedIndex(NamedTuple):
    """All of it.

    Attributes:
        page: latent rows a page.
        now: when it was saved.
        media: digests, in the order of their ids in edges: -1, -2, ...
        lines: boundaries, parents before their children.
        tiers: by tier.
    """

    page: int
    now: float
    media: Sequence[bytes]
    lines: Sequence[Line]
    tiers: Mapping[Tier, SavedTier]


def encoded(index: SavedIndex) -> bytes:
    """Its digest, a line of JSON, the tokens of all edges, and the names of all pages."""
    said = {
        "layout": LAYOUT,
        "page": index.page,
        "now": index.now,
        "media": [each.hex() for each in index.media],
        "lines": [[line.key.hex(), line.namespace.hex(), *line[2:7]] for line in index.lines],
        "tiers": {
            tier.name: {"states": _hex(saved.states), "pages": _hex(saved.pages), "policy": saved.policy}
            for tier, saved in index.tiers.items()
        },
    }
    edges = (line.edge.astype("<i4", copy=False).tobytes() for line in index.lines)
    names = (name for line in index.lines for name in line.names)
    data = b"".join((json.dumps(said).encode(), b"\n", *edges, *names))
    return digest(data) + data


def decoded(data: bytes) -> SavedIndex:
    """What was encoded.

    Raises:
        ValueError: if these are other bytes, or another layout.
    """
    expected, data = data[:DIGEST_NBYTES], data[DIGEST_NBYTES:]
    if digest(data) != expected:
        raise ValueError(f"an index of {len(data)} bytes is not what was written")
    at = data.index(b"\n") + 1
    said = json.loads(data[:at])
    if said["layout"] != LAYOUT:
        raise ValueError(f"the index has layout {said['layout']}, this version reads {LAYOUT}")
    starts = [said["lines"][line[2]][3] if line[2] >= 0 else 0 for line in said["lines"]]
    tokens = np.frombuffer(data, "<i4", sum(line[3] for line in said["lines"]) - sum(starts), at)
    tokens, at = tokens.astype(np.int32, copy=False), at + tokens.nbytes
    lines = []
    for (key, namespace, parent, stop, kind, turn, last_use), start in zip(said["lines"], starts):
        edge, tokens = tokens[: stop - start], tokens[stop - start :]
        end = at + DIGEST_NBYTES * whole_pages(start, stop, said["page"])
        names = tuple(data[each : each + DIGEST_NBYTES] for each in range(at, end, DIGEST_NBYTES))
        place = bytes.fromhex(key), bytes.fromhex(namespace), parent, stop
        lines.append(Line(*place, kind, turn, last_use, edge, names))
        at = end
    tiers = {
        Tier[name]: SavedTier(_bytes(saved["states"]), _bytes(saved["pages"]), saved["policy"])
        for name, saved in said["tiers"].items()
    }
    return SavedIndex(
        said["page"], said["now"], [bytes.fromhex(each) for each in said["media"]], lines, tiers
    )


def _hex(digests: Mapping[bytes, bytes]) -> dict[str, str]:
    return {key.hex(): value.hex() for key, value in digests.items()}


def _bytes(digests: Mapping[str, str]) -> dict[bytes, bytes]:
    return {bytes.fromhex(key): bytes.fromhex(value) for key, value in digests.items()}
