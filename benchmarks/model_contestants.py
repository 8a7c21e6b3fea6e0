"""Contestants of `bench model`: our model and transformers', reading one checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contestant import Absent
from benchmarks.machine import num_cores
from kda_jax.forward import prefill, split
from kda_jax.generate.loop import decode_tokens
from kda_jax.weights import load


class Decoding(NamedTuple):
    """A greedy decode ready to be timed.

    `prepare` gives what one call uses up, outside the clock; `call` runs the steps and returns the tokens it
    absorbed, int [B, steps].
    """

    prepare: Callable[[], Any]
    call: Callable[[Any], np.ndarray]


class ModelContestant(Protocol):
    """What `bench model` asks of an implementation; every call returns when its work is done."""

    @property
    def name(self) -> str: ...

    @property
    def package(self) -> str: ...

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Float32 logits [B, T, vocab] of a whole prompt."""
        ...

    def prefill(self, tokens: np.ndarray) -> None:
        """Read a prompt [B, T]: the last token's logits and a state that decoding can go on from."""
        ...

    def decoding(self, tokens: np.ndarray, steps: int) -> Decoding:
        """Read a prompt [B, T] and get ready to absorb `steps` greedily chosen tokens behind it."""
        ...


class Ours:
    """Our model: `prefill`, and the loop behind `generate`, which decodes many tokens a dispatch."""

    name, package = "ours", "kda-jax"

    def __init__(self, path: Path) -> None:
        self.parts = split(load(path))

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        return np.asarray(prefill(self.parts, tokens)[0])

    def prefill(self, tokens: np.ndarray) -> None:
        jax.block_until_ready(prefill(self.parts, tokens, last_only=True))

    def decoding(self, tokens: np.ndarray, steps: int) -> Decoding:
        capacity = tokens.shape[1] + steps
        logits, state, *_ = prefill(self.parts, tokens, last_only=True, capacity=capacity)
        first = jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32)

        def call(_: None) -> np.ndarray:
            absorbed, state_after = decode_tokens(self.parts, first, state, steps)
            jax.block_until_ready(state_after)
            return absorbed

        return Decoding(prepare=lambda: None, call=call)


class Transformers:
    """transformers' `kimi_linear` in PyTorch: float32, eager experts, every core."""

    name, package = "transformers", "transformers"

    def __init__(self, path: Path) -> None:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise Absent(f"{error.name} is not installed") from error
        torch.set_num_threads(num_cores())
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, experts_implementation="eager"
        ).eval()

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        with self.torch.inference_mode():
            return self.model(self.ids(tokens), use_cache=False).logits.float().numpy()

    def prefill(self, tokens: np.ndarray) -> None:
        with self.torch.inference_mode():
            self.model(self.ids(tokens), use_cache=True, logits_to_keep=1)

    def decoding(self, tokens: np.ndarray, steps: int) -> Decoding:
        with self.torch.inference_mode():
            read = self.model(self.ids(tokens), use_cache=True, logits_to_keep=1)
        cache, first = read.past_key_values, read.logits[:, -1].argmax(-1, keepdim=True)

        def call(cache: Any) -> np.ndarray:
            token, absorbed = first, []
            with self.torch.inference_mode():
                for _ in range(steps):
                    logits = self.model(token, past_key_values=cache, use_cache=True).logits
                    absorbed.append(token)
                    token = logits[:, -1].argmax(-1, keepdim=True)
            return self.torch.cat(absorbed, 1).numpy()

        return Decoding(prepare=lambda: copy.deepcopy(cache), call=call)

    def ids(self, tokens: np.ndarray) -> Any:
        """Token ids as PyTorch wants them."""
        return self.torch.from_numpy(tokens.astype(np.int64))


CONTESTANTS: dict[str, Callable[[Path], ModelContestant]] = {"ours": Ours, "transformers": Transformers}
