"""Token windows for training: every batch is a function of (seed, step), so that resuming needs no reader's state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiny_lm.corpus import Source

BOS = 256
EOS = 257
PAD = 258


def document(data: bytes) -> np.ndarray:
    """One file as tokens, uint16: BOS, the bytes, EOS."""
    tokens = np.empty(len(data) + 2, np.uint16)
    tokens[0], tokens[-1] = BOS, EOS
    tokens[1:-1] = np.frombuffer(data, np.uint8)
    return tokens


class Windows:
    """Batches cut from the files' tokens, laid end to end in an order that changes with every pass.

    A window of `length` tokens overlaps the next by none: pass p of the corpus is cut at a random phase and its
    windows are dealt in random order, so that every token is a target once a pass.
    """

    def __init__(self, sources: Sequence[Source], *, batch: int, length: int, seed: int) -> None:
        """Args: `batch` rows of `length` input tokens each; `seed` decides all orders."""
        self._documents = [document(source.data) for source in sources]
        self._batch, self._length, self._seed = batch, length, seed
        self.num_tokens = sum(len(tokens) for tokens in self._documents)
        # The phase may cost one window, the last target another.
        self.batches_per_pass = (self.num_tokens // length - 2) // batch
        if self.batches_per_pass < 1:
            raise ValueError(
                f"{self.num_tokens} tokens give no batch of {batch} x {length}; give more files or a smaller batch"
            )
        self._cached: tuple[int, np.ndarray, np.ndarray] | None = None

    def __call__(self, step: int) -> np.ndarray:
        """The batch of this step, counted from 0: int32 [batch, length + 1], inputs and, one later, targets."""
        number, index = divmod(step, self.batches_per_pass)
        stream, starts = self._pass(number)
        rows = starts[index * self._batch : (index + 1) * self._batch]
        return stream[rows[:, None] + np.arange(self._length + 1)].astype(np.int32)

    def _pass(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        if self._cached is None or self._cached[0] != number:
            random = np.random.default_rng([self._seed, number])
            order = random.permutation(len(self._documents))
            stream = np.concatenate([self._documents[i] for i in order])
            phase = int(random.integers(self._length))
            count = (len(stream) - 1 - phase) // self._length
            self._cached = number, stream, phase + self._length * random.permutation(count)
        return self._cached[1], self._cached[2]
