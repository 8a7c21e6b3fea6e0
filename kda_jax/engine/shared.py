"""Checkpoints of a model that other processes resume from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from cache import Payload
from cache.tiers import page_name
from cache.tokens import Tokens, as_tokens
from kda_jax.engine.checkpoint import cut, join
from kda_jax.engine.object_storage import ObjectStorage
from kda_jax.engine.pieces import Pieces
from kda_jax.engine.prompt_keys import PromptKeys
from kda_jax.model import Model
from kda_jax.sharding import shard_state
from kda_jax.state import ModelState
from transfer import Found, Objects, announce, find

PAGE = 512


class Resumed(NamedTuple):
    """Where a prompt goes on: the state behind its first `boundary` tokens, None and 0 for a cold start.

    Attributes:
        boundary: tokens that are not computed again.
        state: with room for these and no more; nobody else has its memory.
        found: what the search said of the prompt's other boundaries.
    """

    boundary: int
    state: ModelState | None
    found: Found


class Shared:
    """One model's checkpoints in a store of objects: latents as pages, shared between the checkpoints of a path."""

    def __init__(
        self,
        objects: Objects,
        namespace: bytes,
        *,
        page: int = PAGE,
        int8: bool = False,
        timeout: float = 30.0,
        model: Model | None = None,
    ) -> None:
        """
        Args:
            objects: open; whoever opened it closes it.
            namespace: `cache.Namespace.digest()`, which says so if `int8`.
            page: latent rows a page, and tokens a link of the keys: the same for all who share.
            int8: keeps recurrent states in int8, which is not exact.
            timeout: seconds for a search, and for each payload, or each device's part of one.
            model: of `kda_jax.shard`, if its states lie over the devices of a mesh. Their heads are then stored apart,
                and each device is given its own only. All who share have such a model, on any mesh (of one device
                too); if they are to get the very bits they would have computed, the mesh belongs in the namespace.

        Raises:
            ValueError: for a model that was not sharded.
        """
        self._pieces = None if model is None else _pieces(model, int8)
        self._storage = ObjectStorage(objects, namespace, timeout)
        self._objects, self._namespace, self._page, self._int8 = objects, namespace, page, int8

    def publish(
        self,
        tokens: Sequence[int] | Tokens,
        states: Mapping[int, ModelState],
        *,
        resumed: int = 0,
        known: Sequence[int] = (),
    ) -> list[int]:
        """Stores states of one prompt: the pages before each, then the state, then the marks to find it by.

        Args:
            tokens: the prompt, or its beginning up to the deepest boundary.
            states: by boundary, of one row each.
            resumed: the boundary that the prompt was resumed at: the store has the pages before it.
            known: other boundaries that the store has of this prompt, as `Resumed.found.known`.

        Returns:
            The boundaries that are there now. The store may fail, or have no room: then fewer.
        """
        keys, stored, after = PromptKeys(self._namespace, self._page, as_tokens(tokens)), [], resumed
        for boundary, state in sorted(states.items()):
            leaves, pages = cut(state, self._page, after=after, int8=self._int8)
            first = boundary // self._page - len(pages)
            with suppress(OSError):
                for number, page in enumerate(pages, start=first):
                    self._storage.write(page_name(keys.pages[number]), page)
                self._storage.write(
                    keys.name(boundary), leaves if self._pieces is None else self._pieces.cut(leaves)
                )
                stored.append(boundary)
                after = max(after, boundary)
        if stored:
            passed = [resumed] if resumed else []  # its marks may have been evicted
            announce(self._objects, keys.name, [*passed, *stored], known, self._storage.timeout)
        return stored

    def resume(self, tokens: Sequence[int] | Tokens) -> Resumed:
        """Finds the deepest checkpoint below a prompt's last token that can be read whole, and reads it.

        Raises:
            ValueError: without tokens.
        """
        tokens = as_tokens(tokens)
        if not len(tokens):
            raise ValueError("a prompt has at least one token")
        keys = PromptKeys(self._namespace, self._page, tokens)
        found = find(self._objects, keys.name, len(tokens) - 1, self._storage.timeout)
        for boundary in found.boundaries:
            with suppress(OSError, ValueError):  # gone, or no state that belongs here
                names = [page_name(name) for name in keys.pages[: boundary // self._page]]
                state = self._read(keys.name(boundary), names)
                if state is not None and int(np.asarray(state.position)[0]) == boundary:
                    return Resumed(boundary, state, found)
        return Resumed(0, None, found)

    def _read(self, name: str, page_names: Sequence[str]) -> ModelState | None:
        """A state and its pages; None, an OSError or a ValueError if any of it is not there or does not belong here."""
        if self._pieces is None:
            leaves, *rows = self._storage.read_all([name, *page_names])
            return None if leaves is None else join(leaves, _there(rows))
        rows = _there(self._storage.read_all(page_names))
        leaves = self._pieces.read(lambda wanted: self._storage.read(name, leaves=wanted))
        return shard_state(join(leaves, rows), self._pieces.mesh)


def _there(rows: Sequence[Payload | None]) -> list[Payload]:
    return [page for page in rows if page is not None]


def _pieces(model: Model, int8: bool) -> Pieces:
    if model.mesh is None:
        raise ValueError("the model is on no mesh: pass what kda_jax.shard returned, or leave it out")
    return Pieces(model.config, model.mesh, int8)
