"""One optimizer step, and the loop around it: log, checkpoint, resume."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kda_jax import Model, ModelConfig, split
from kda_jax.layers import SparseMoE
from kda_jax.layers.moe import Router, Routing
from tiny_lm.batches import Windows
from tiny_lm.corpus import Source
from tiny_lm.optimizer import Parts, make_optimizer, put_together, take_apart
from tiny_lm.plan import Phase, Plan

LN2 = float(np.log(2.0))


class TrainState(NamedTuple):
    """What a step changes: the trained parts, the routers' biases (moved by load, not by gradient), the moments."""

    weights: Parts
    biases: Parts
    optimizer: Any
    step: jax.Array


class Progress(NamedTuple):
    """One finished step: its number from 1, the loss in bits per token, the busiest expert's share over its fair one,
    seconds by the clock and seconds of all cores together."""

    step: int
    bits: float
    imbalance: float
    seconds: float
    core_seconds: float


class CountingRouter(Router):
    """The same router, which notes how often it chose each expert."""

    def __init__(self, router: Router) -> None:
        self.config, self.kernel, self.bias = router.config, router.kernel, router.bias
        self.load = nnx.Intermediate(jnp.zeros(router.bias.shape, jnp.float32))

    def __call__(self, x: jax.Array) -> Routing:
        routing = super().__call__(x)
        chosen = jax.nn.one_hot(routing.experts, self.load.shape[0], dtype=jnp.float32)
        self.load[...] = jax.lax.stop_gradient(chosen.sum(tuple(range(chosen.ndim - 1))))
        return routing


class Trainee:
    """A model taken apart for training: pure parts outside, the model again inside a trace."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.graphdef, self._shapes = split(nnx.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0))))
        paths, self.treedef = jax.tree.flatten_with_path(self._shapes)
        self.paths = [dotted(path) for path, _ in paths]

    @property
    def num_parameters(self) -> int:
        """Numbers the model holds."""
        return sum(leaf.size for leaf in jax.tree.leaves(self._shapes))

    def init(self, seed: int) -> tuple[Parts, Parts]:
        """Trained parts and router biases of a new model. Each branch's last matrix starts at zero."""
        params = dict(zip(self.paths, jax.tree.leaves(split(Model(self.config, rngs=nnx.Rngs(seed)))[1])))
        biases = {path: value for path, value in params.items() if path.endswith(".router.bias")}
        weights = {path: value for path, value in params.items() if path not in biases}
        for path in weights:
            if path.endswith((".o_proj.kernel", ".down.kernel", ".w_down")):
                weights[path] = jnp.zeros_like(weights[path])
        return take_apart(weights, self.config), biases

    def model(self, weights: Parts, biases: Parts) -> Model:
        """The model that holds these parameters."""
        params = put_together(weights, self.config) | biases
        return nnx.merge(
            self.graphdef, jax.tree.unflatten(self.treedef, [params[path] for path in self.paths])
        )

    def loss(self, weights: Parts, biases: Parts, windows: jax.Array) -> tuple[jax.Array, Parts]:
        """Mean bits per token of windows [B, T + 1], and how often each router chose each expert."""
        model = self.model(weights, biases)
        routers = {}
        for i, layer in enumerate(model.layers):
            path = f"layers.{i}.mlp.router.bias"
            if isinstance(layer.mlp, SparseMoE):
                layer.mlp.router = routers[path] = CountingRouter(layer.mlp.router)
        logits, _ = model(windows[:, :-1])
        bits = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), windows[:, 1:])
        return bits.mean() / LN2, {path: router.load[...] for path, router in routers.items()}


def dotted(path: tuple[Any, ...]) -> str:
    """A key path of jax.tree_util as `layers.0.attn.o_proj.kernel`."""
    names = [
        str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", entry)))) for entry in path
    ]
    return ".".join(name for name in names if name != "value")


def make_step(
    trainee: Trainee, optimizer: optax.GradientTransformation, plan: Plan, phase: Phase
) -> Callable[[TrainState, np.ndarray], tuple[TrainState, jax.Array, jax.Array]]:
    """The step of a phase: (state, windows [batch, length + 1]) -> (state, bits per token, imbalance).

    The batch's rows are dealt to all devices (`jax_num_cpu_devices` makes one of each core: the many small products of
    a linear attention keep one core busy, not two); the update is made once, by the first.
    """
    rows = phase.batch // phase.micro
    devices = jax.devices()[: math.gcd(rows, jax.device_count())]
    mesh = Mesh(np.asarray(devices), ("rows",))
    count = 1.0 / rows

    def gradients(weights: Parts, biases: Parts, windows: jax.Array) -> Any:
        def add(total: Any, piece: jax.Array) -> tuple[Any, None]:
            (bits, load), grads = jax.value_and_grad(trainee.loss, has_aux=True)(weights, biases, piece)
            return jax.tree.map(jnp.add, total, (bits, load, grads)), None

        zero = jnp.zeros((), jnp.float32), *jax.tree.map(jnp.zeros_like, (biases, weights))
        total, _ = jax.lax.scan(add, zero, windows.reshape(-1, phase.micro, windows.shape[1]))
        return jax.tree.map(lambda each: jax.lax.psum(each, "rows") * count, total)

    def update(state: TrainState, load: Parts, grads: Parts) -> tuple[TrainState, jax.Array]:
        updates, moments = optimizer.update(grads, state.optimizer, state.weights)
        weights = cast(Parts, optax.apply_updates(state.weights, updates))
        biases = {
            path: bias + plan.bias_rate * jnp.sign(load[path].mean() - load[path])
            for path, bias in state.biases.items()
        }
        crowd = jnp.stack([each.max() / each.mean() for each in load.values()] or [jnp.ones(())]).max()
        return TrainState(weights, biases, moments, state.step + 1), crowd

    every, split_rows = PartitionSpec(), PartitionSpec("rows")
    gradients = jax.jit(
        jax.shard_map(
            gradients, mesh=mesh, in_specs=(every, every, split_rows), out_specs=every, check_vma=False
        )
    )
    update = jax.jit(update, donate_argnums=0)

    def step(state: TrainState, windows: np.ndarray) -> tuple[TrainState, jax.Array, jax.Array]:
        everywhere = NamedSharding(mesh, every)
        weights, biases = jax.device_put((state.weights, state.biases), everywhere)
        bits, load, grads = gradients(
            weights, biases, jax.device_put(windows, NamedSharding(mesh, split_rows))
        )
        state, crowd = update(state, *jax.device_put((load, grads), devices[0]))
        return state, bits, crowd

    return step


class Run:
    """A training run in a folder: `plan.json`, `losses.csv`, `checkpoints/`. Making it again resumes it."""

    def __init__(self, plan: Plan, out: Path, sources: tuple[Source, ...], *, save_every: int = 100) -> None:
        self.plan, self.out, self.save_every = plan, out, save_every
        self.trainee = Trainee(plan.config)
        self.optimizer = make_optimizer(plan)
        self._windows = [
            Windows(sources, batch=phase.batch, length=phase.length, seed=1000 * plan.seed + index)
            for index, phase in enumerate(plan.phases)
        ]
        self._steps = [make_step(self.trainee, self.optimizer, plan, phase) for phase in plan.phases]
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._checkpoints = ocp.CheckpointManager((out / "checkpoints").absolute(), options=options)
        self.state = self._start()

    def __iter__(self) -> Iterator[Progress]:
        """Trains to the end of the plan, one step an item; saves every `save_every` steps and at the end."""
        log = self.out / "losses.csv"
        rows = _rows_until(log, int(self.state.step))
        with log.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Progress._fields)
            writer.writerows(rows)
            for number in range(int(self.state.step), self.plan.steps):
                began, used = time.perf_counter(), time.process_time()
                phase, place = self.plan.phase_of(number)
                self.state, bits, crowd = self._steps[phase](self.state, self._windows[phase](place))
                bits, crowd = float(bits), float(crowd)
                seconds, used = time.perf_counter() - began, time.process_time() - used
                done = Progress(number + 1, bits, crowd, seconds, used)
                if not np.isfinite(done.bits):
                    raise FloatingPointError(f"the loss of step {done.step} is {done.bits}; lower the rates")
                writer.writerow([done.step, repr(done.bits), *(round(each, 3) for each in done[2:])])
                file.flush()
                if done.step % self.save_every == 0 or done.step == self.plan.steps:
                    self._checkpoints.save(done.step, args=ocp.args.StandardSave(self.state))
                yield done

    def seconds_per_step(self, phase: int, repeats: int = 3) -> float:
        """Measures a phase's step on a copy of the state: the fastest of `repeats` after one that compiles."""
        state, times = jax.tree.map(jnp.copy, self.state), []
        for place in range(repeats + 1):
            windows = self._windows[phase](place)
            began = time.perf_counter()
            state, bits, _ = self._steps[phase](state, windows)
            float(bits)
            times.append(time.perf_counter() - began)
        return min(times[1:])

    def model(self) -> Model:
        """The model as trained so far."""
        return self.trainee.model(self.state.weights, self.state.biases)

    def _start(self) -> TrainState:
        def new() -> TrainState:
            weights, biases = self.trainee.init(self.plan.seed)
            return TrainState(weights, biases, self.optimizer.init(weights), jnp.zeros((), jnp.int32))

        latest = self._checkpoints.latest_step()
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        if latest is None:
            return jax.device_put(new(), device)
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), jax.eval_shape(new)
        )
        return cast(TrainState, self._checkpoints.restore(latest, args=ocp.args.StandardRestore(shapes)))


def read_losses(log: Path) -> list[Progress]:
    """All steps that a run has logged."""
    with log.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return [Progress(int(step), *map(float, rest)) for step, *rest in rows]


def _rows_until(log: Path, step: int) -> list[list[str]]:
    """The log's rows of the first `step` steps: a killed run may have gone on past its last checkpoint."""
    if not log.exists():
        return []
    with log.open(newline="") as file:
        return [row for row in csv.reader(file) if row and row[0].isdigit() and int(row[0]) <= step]
