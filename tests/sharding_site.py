"""Eight CPU devices in a process of their own: small models on meshes of them, and what was seen, as JSON.

`python sharding_site.py` prints what it saw, and test_kda_jax_sharding.py judges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from kda_jax.engine import Shared
from kda_jax.engine.pieces import Pieces
from kda_jax.forward import step
from kda_jax.model import Model
from kda_jax.sharding import EXPERT, TENSOR, shard
from kda_jax.state import KDAState, ModelState, empty
from measure import relative_error
from random_model import K3, random_model, small_config
from same_state import assert_same_state
from transfer import MemoryObjects, Read
from transfer.objects import Bytes

EIGHT: dict[str, Any] = dict(
    vocab_size=72, hidden_size=32, intermediate_size=48, kda_num_heads=8, num_heads=8, kv_lora_rank=16,
    qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, num_experts=8, moe_intermediate_size=32,
    layers=("kda", "mla"), mlps=("dense", "moe"),
)  # fmt: skip
MODELS = {
    "linear": small_config(**EIGHT),
    "k3": small_config(**{**K3, **EIGHT, "q_lora_rank": 24}),
}
MESHES = {"linear": [(4, 2)], "k3": [(1, 1), (1, 2), (2, 2), (8, 1), (2, 4)]}
RESTORED = [(8, 1), (1, 1), (4, 2)]
ROWS, TOKENS, LENGTHS, BOUNDARY, PAGE = 2, 70, (70, 66), 37, 16
NAMESPACE = bytes(32)
PROMPT = np.arange(BOUNDARY + 1, dtype=np.int32)


def main() -> None:
    """Prints what was seen."""
    seen: dict[str, Any] = {}
    for name, config in MODELS.items():
        # of numpy: a device is then given slices, while jax's own would be cut by a program a shape
        model = jax.tree.map(np.asarray, random_model(config))
        whole, sharded = Prefill(model), {mesh: shard(model, mesh_of(*mesh)) for mesh in MESHES[name]}
        runs = {mesh: Prefill(other) for mesh, other in sharded.items()}
        seen[name] = {called(mesh): whole.compared(run) for mesh, run in runs.items()}
    # the last model is K3's
    sharded |= {mesh: shard(model, mesh_of(*mesh)) for mesh in RESTORED if mesh not in sharded}
    seen["checkpoint"] = checkpoint(sharded, runs[2, 4].row())
    seen["stepped"] = stepped(model, whole.row(), sharded[8, 1], runs[8, 1].row())
    seen["crossing"] = [crossing(int8) for int8 in (False, True)]
    print(json.dumps(seen))


def mesh_of(tensor: int, expert: int) -> Mesh:
    """The first devices, with the axes that `jax.make_mesh` makes."""
    return jax.make_mesh((tensor, expert), (TENSOR, EXPERT), devices=jax.devices()[: tensor * expert])


def called(mesh: tuple[int, int]) -> str:
    """Tensor x expert."""
    return f"{mesh[0]}x{mesh[1]}"


class Prefill:
    """A call of two rows, one of them padded, that also returns the states at a boundary."""

    def __init__(self, model: Model) -> None:
        graphdef, params = nnx.split(model)
        tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (ROWS, TOKENS), np.int32)
        arguments = params, tokens, empty(model.config, ROWS, TOKENS + 1), np.array(LENGTHS, np.int32)

        @jax.jit
        def run(params: Any, tokens: jax.Array, state: ModelState, lengths: jax.Array) -> tuple[Any, ...]:
            model = nnx.merge(graphdef, params)
            return model(tokens, state, lengths, jnp.full((ROWS, 1), BOUNDARY, jnp.int32))

        program = run.lower(*arguments).compile()
        self.moved, self.weights = moved(program.as_text() or ""), shapes_of(params)
        logits, self.end, self.at = program(*arguments)
        self.logits = np.asarray(logits)[np.arange(TOKENS) < np.array(LENGTHS)[:, None]]

    def row(self) -> ModelState:
        """The first row's state at the boundary."""
        return ModelState(tuple(_first_row(layer) for layer in self.at.layers))

    def compared(self, other: Prefill) -> dict[str, Any]:
        """What a sharded model makes of the same call, against this."""
        states = zip(*(jax.tree.leaves((run.end, run.at)) for run in (self, other)), strict=True)
        return {
            "logits": relative_error(self.logits, other.logits),
            "states": max(relative_error(a, b) for a, b in states),
            "kept": [kept(other.end), kept(other.at)],
            "weights": other.weights,
            "moved": other.moved,
        }


def moved(program: str) -> list[tuple[str, str, list[int]]]:
    """Of what devices send each other: operation, dtype and shape."""
    array = r"([a-z]+[0-9]+)\[([0-9,]*)\]"
    found = re.findall(r"= (.*?) ((?:all|collective|reduce)-[a-z]+)(?:-start)?\(", program)
    return [
        (operation, dtype, [int(size) for size in shape.split(",") if size])
        for result, operation in found
        for dtype, shape in re.findall(array, result)
    ]


def shapes_of(tree: Any) -> list[tuple[int, ...]]:
    """Of all leaves with two axes or more."""
    return [leaf.shape for leaf in jax.tree.leaves(tree) if leaf.ndim > 1]


def checkpoint(models: dict[tuple[int, int], Model], written: ModelState) -> dict[str, Any]:
    """A state of mesh 2x4 goes through a store to other meshes; on the last, each of the reads fails once."""
    with Watched() as objects:
        at = {mesh: Shared(objects, NAMESPACE, page=PAGE, model=model) for mesh, model in models.items()}
        stored = at[2, 4].publish(PROMPT, {BOUNDARY: written})
        restored, failed = {}, []
        for mesh in RESTORED:
            objects.reads = []
            state = at[mesh].resume(PROMPT).state
            restored[called(mesh)] = {
                "same": state is not None and same_bits(written, state),
                "kept": None if state is None else kept(state),
                "reads": objects.runs(),
            }
        for number in range(len(objects.reads)):
            objects.reads, objects.fails = [], number
            failed.append(at[RESTORED[-1]].resume(PROMPT).boundary)
    return {"stored": stored, "restored": restored, "failed": failed}


class Watched(MemoryObjects):
    """Knows what was read of states, and can fail the n-th read of one."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[list[Read]] = []
        self.fails: int | None = None

    def get(self, reads: Sequence[Read], timeout: float) -> list[Bytes | None]:
        """As the store's, if it does not fail."""
        if reads[0].key.startswith("state") and reads[0].nbytes is not None:
            self.reads.append(list(reads))
            if len(self.reads) - 1 == self.fails:
                return [None] * len(reads)
        return super().get(reads, timeout)

    def runs(self) -> list[list[tuple[int, int]]]:
        """Of each read of a state: [start, end) of its runs of bytes."""
        return [[(read.start, read.start + (read.nbytes or 0)) for read in reads] for reads in self.reads]


def stepped(model: Model, state: ModelState, sharded: Model, other: ModelState) -> dict[str, Any]:
    """A sharded model's next token: how far it is off, and what was sent for it."""
    (logits, _), (others, sent) = read_token(model, state), read_token(sharded, other)
    held = shapes_of((nnx.state(sharded), other))
    return {"logits": relative_error(logits, others), "moved": sent, "held": held}


def read_token(model: Model, state: ModelState) -> tuple[jax.Array, list[tuple[str, str, list[int]]]]:
    """Logits behind one token more, and what devices sent each other."""
    graphdef, params = nnx.split(model)
    arguments = params, np.array([5], np.int32), state
    program = (
        jax.jit(lambda params, tokens, state: step(nnx.merge(graphdef, params), tokens, state))
        .lower(*arguments)
        .compile()
    )
    return program(*arguments)[0], moved(program.as_text() or "")


def crossing(int8: bool) -> bool:
    """Six heads make two pieces: the second of three devices reads both, for a half of each."""
    config, rng = small_config(kda_num_heads=6, layers=("kda", "kda")), np.random.default_rng(0)
    shapes = {"conv": (1, 3, 144), "position": (1,)}
    if int8:
        shapes |= {"recurrent.values": (1, 6, 8, 8), "recurrent.scales": (1, 6, 8)}
    else:
        shapes |= {"recurrent": (1, 6, 8, 8)}
    leaves = {
        f"layers.{i}.{name}": rng.random(shape, np.float32) for i in (0, 1) for name, shape in shapes.items()
    }
    pieces = Pieces(config, mesh_of(3, 1), int8)
    stored = pieces.cut(leaves)
    read = pieces.read(lambda names: {name: stored[name] for name in names})
    return read.keys() == leaves.keys() and all(np.array_equal(leaves[name], read[name]) for name in leaves)


def same_bits(want: ModelState, got: ModelState) -> bool:
    """Whether all that is alive is the same."""
    try:
        assert_same_state(want, got)
    except AssertionError:
        return False
    return True


def kept(state: ModelState) -> list[tuple[int, ...]]:
    """The shapes of what a device has of the first layer, of KDA."""
    return [leaf.sharding.shard_shape(leaf.shape) for leaf in state.layers[0]]


def _first_row(layer: Any) -> Any:
    """Of a layer's states at one boundary, in the shape of a state."""
    if isinstance(layer, KDAState):
        return KDAState(*(leaf[:1, 0] for leaf in layer))
    return layer._replace(latent=layer.latent[:1], position=layer.position[:1, 0])


if __name__ == "__main__":
    main()
