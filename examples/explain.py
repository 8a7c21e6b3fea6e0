"""Why a prompt is no hit, or not a deeper one.

    python examples/explain.py

The engine says of any prompt at which token it would resume and what keeps it from resuming deeper. The same is on a
server's `/explain`, and in `kda-jax explain`.
"""

from __future__ import annotations

from pathlib import Path

import kda_jax
from cache import Namespace
from kda_jax.engine import Engine, Explanation

MODEL = Path(__file__).resolve().parent / "tiny"
READ = "def area(width, height):\n    return width * height\n\n\n" * 4
PROMPTS = {
    "what was read before, and more": READ + "def volume(",
    "its first half": READ[: len(READ) // 2] + "x",
    "something else": "from pathlib import Path\n",
}


def run() -> dict[str, Explanation]:
    """Reads a text, and asks about prompts that share all, a part and nothing of it."""
    model, tokenizer = kda_jax.load(MODEL, dtype="float32"), kda_jax.load_tokenizer(MODEL)
    namespace = Namespace(weights=b"examples/tiny", tokenizer=b"examples/tiny")
    with Engine(model, namespace=namespace, slots=1, nbytes=2**25, max_tokens=2048, budget=64) as engine:
        engine.generate([tokenizer.encode(READ)], max_new_tokens=1)
        return {name: engine.explain(tokenizer.encode(prompt)) for name, prompt in PROMPTS.items()}


def main() -> None:
    for name, told in run().items():
        limits = ", ".join(f"{limit.why} at {limit.boundary}" for limit in told.limits) or "nothing"
        print(f"{name}: {told.boundary} of {told.tokens} tokens would not be computed; limited by: {limits}")


if __name__ == "__main__":
    main()
