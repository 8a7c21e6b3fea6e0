"""Our models beside transformers' kimi_linear, live, on random configs and the same weights, in float32 on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from kda_jax.config import ModelConfig
from kda_jax.forward import decode, prefill
from kda_jax.layers import KimiDeltaAttention
from kda_jax.model import Model
from kda_jax.weights import load, save
from kda_jax.weights.skeleton import parameters
from measure import relative_error
from random_model import random_model

pytestmark = pytest.mark.parity

SEEDS = range(24)
LENGTHS = (
    1,
    2,
    3,
    5,
    15,
    16,
    17,
    31,
    48,
    63,
    64,
    65,
    70,
    100,
    127,
    128,
    129,
    150,
    191,
    192,
    193,
    230,
    257,
    300,
)
NUM_DECODED = 4
ABSOLUTE, RELATIVE = 1e-4, 2e-5


@pytest.fixture(autouse=True)
def forget_programs() -> Iterator[None]:
    """Each test compiles its own: kept, they would fill gigabytes."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def hf() -> SimpleNamespace:
    """torch and transformers; one thread is the fastest for sizes like these."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return SimpleNamespace(torch=torch, transformers=transformers)


def draw_config(seed: int) -> ModelConfig:
    """A config that transformers can build: as many value heads as key heads, and as wide."""
    rng = np.random.default_rng(seed)

    def pick(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    layers = tuple(pick("kda", "kda", "mla") for _ in range(pick(1, 2, 2, 3, 4)))
    num_dense = int(rng.integers(0, len(layers) + 1))
    groups, per_group = pick((1, 1), (2, 1), (2, 2), (4, 2)), pick(2, 3, 4)
    num_experts = max(groups[0] * per_group, 4)
    return ModelConfig(
        vocab_size=int(rng.integers(40, 200)),
        hidden_size=pick(16, 24, 40, 64),
        layers=layers,
        mlps=("dense",) * num_dense + ("moe",) * (len(layers) - num_dense),
        intermediate_size=pick(16, 33, 96),
        model_max_length=4096,
        rms_norm_eps=pick(1e-5, 1e-6),
        kda_num_heads=pick(1, 2, 3, 4),
        kda_head_dim=pick(4, 8, 12, 16, 32),
        conv_size=pick(4, 4, 4, 2, 3, 5),
        num_heads=pick(1, 2, 3, 4),
        kv_lora_rank=pick(8, 20, 32),
        qk_nope_head_dim=pick(6, 12, 16),
        qk_rope_head_dim=pick(4, 8),
        v_head_dim=pick(5, 10, 16),
        q_lora_rank=pick(None, None, 12),
        num_experts=num_experts,
        experts_per_token=int(rng.integers(1, groups[1] * (num_experts // groups[0]) + 1)),
        moe_intermediate_size=pick(8, 20),
        num_shared_experts=pick(1, 2),
        num_expert_groups=groups[0],
        topk_groups=groups[1],
        moe_renormalize=pick(True, True, False),
        routed_scaling_factor=pick(1.0, 2.446),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def read_by_transformers(hf: SimpleNamespace, folder: Path) -> Any:
    model, info = hf.transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=hf.torch.float32,
        experts_implementation="eager",
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def logits_of(hf: SimpleNamespace, model: Any, tokens: np.ndarray, cache: Any = None) -> np.ndarray:
    with hf.torch.no_grad():
        return model(hf.torch.tensor(tokens), cache=cache, use_cache=cache is not None).logits.numpy()


def assert_equal_logits(name: str, want: np.ndarray, got: jax.Array) -> None:
    absolute, relative = np.abs(want - got).max(), relative_error(want, got)
    assert absolute < ABSOLUTE and relative < RELATIVE, f"{name}: {absolute=:.2e} {relative=:.2e}"


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed >= 2 else []) for seed in SEEDS]
)
def test_logits_and_decode_steps_agree(seed: int, hf: SimpleNamespace, tmp_path: Path) -> None:
    config = draw_config(seed)
    model = random_model(config, seed)
    save(model, tmp_path / "model")
    theirs = read_by_transformers(hf, tmp_path / "model")
    rng = np.random.default_rng(1000 + seed)
    length, rows = LENGTHS[seed % len(LENGTHS)], int(rng.integers(1, 4))
    tokens = rng.integers(0, config.vocab_size, (rows, length + NUM_DECODED))

    # transformers' cache counts tokens in its attention layers: without one it cannot go on
    cache = hf.transformers.DynamicCache(config=theirs.config) if "mla" in config.layers else None
    logits, state, *_ = prefill(model, tokens[:, :length])
    assert_equal_logits("prompt", logits_of(hf, theirs, tokens[:, :length], cache), logits)
    for at in range(length, length + NUM_DECODED):
        logits, state = decode(model, tokens[:, at], state)
        known = slice(0 if cache is None else at, at + 1)
        want = logits_of(hf, theirs, tokens[:, known], cache)[:, -1]
        assert_equal_logits(f"token {at}", want, logits)


def test_every_parameter_shows_in_the_logits() -> None:
    """A part whose weights do not matter here would be compared by nobody."""
    chosen = dict(num_experts=8, experts_per_token=2, num_expert_groups=2, topk_groups=1)
    config = dataclasses.replace(
        draw_config(0), layers=("kda", "mla"), mlps=("dense", "moe"), q_lora_rank=12, **chosen
    )
    graphdef, params = nnx.split(random_model(config))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (2, 40)), jnp.int32)
    logits = jax.jit(lambda params: nnx.merge(graphdef, params)(tokens)[0])
    before = logits(params)
    hidden = {}
    for key, param in nnx.to_flat_state(params):
        spread = 3 if key[-1] == "bias" else 0.1  # the router's only acts where it changes a choice
        noise = np.random.default_rng(1).uniform(1 - spread, 1 + spread, param.get_value().shape)
        noise = noise.astype(np.float32)
        changed = [
            (other, value.replace(value.get_value() * noise) if other == key else value)
            for other, value in nnx.to_flat_state(params)
        ]
        change = relative_error(before, logits(nnx.from_flat_state(changed)))
        if change < 10 * RELATIVE:
            hidden[".".join(map(str, key))] = change
    assert not hidden


@pytest.fixture(scope="module")
def both_ways(hf: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Any]:
    """A model with every kind of layer, and transformers' reading of it."""
    folder = tmp_path_factory.mktemp("parity") / "model"
    model = random_model(dataclasses.replace(draw_config(0), layers=("kda", "mla"), mlps=("dense", "moe")))
    save(model, folder)
    return model, read_by_transformers(hf, folder)


@pytest.mark.parametrize("original", [True, False], ids=["as released", "as in memory"])
def test_what_transformers_saves_is_loaded_to_the_bit(
    original: bool, both_ways: tuple[Model, Any], tmp_path: Path
) -> None:
    model, theirs = both_ways
    theirs.save_pretrained(tmp_path, save_original_format=original)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any("experts.gate_up_proj" in name for name in names) != original
    loaded = load(tmp_path)
    assert loaded.config == model.config
    for path, value in parameters(model).items():
        np.testing.assert_array_equal(value, parameters(loaded)[path], path)


def test_both_names_of_the_dense_layer_are_read_by_transformers(
    hf: SimpleNamespace, both_ways: tuple[Model, Any], tmp_path: Path
) -> None:
    from safetensors.numpy import save_file

    model, theirs = both_ways
    save(model, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    held = load_file(file)
    assert "model.layers.0.mlp.up_proj.weight" in held
    renamed = {name.replace("layers.0.mlp", "layers.0.block_sparse_moe"): held[name] for name in held}
    save_file(renamed, file, metadata={"format": "pt"})
    again = read_by_transformers(hf, tmp_path / "model").state_dict()
    for name, value in theirs.state_dict().items():
        assert hf.torch.equal(value, again[name]), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_weights_reach_transformers_to_the_bit(
    dtype: str, hf: SimpleNamespace, both_ways: tuple[Model, Any], tmp_path: Path
) -> None:
    model = random_model(both_ways[0].config, 7, dtype)
    save(model, tmp_path / "narrow")
    theirs = hf.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "narrow")
    assert theirs.dtype == getattr(hf.torch, dtype)
    theirs.save_pretrained(tmp_path / "back")
    back = parameters(load(tmp_path / "back"))
    for path, value in parameters(model).items():
        if path.endswith("A_log"):  # transformers keeps the other small tensors in float32, but not this one
            value = value.astype(dtype).astype(jnp.float32)
        np.testing.assert_array_equal(value, back[path], path)


def test_a_tied_model_means_the_same_to_transformers(hf: SimpleNamespace, tmp_path: Path) -> None:
    config = dataclasses.replace(draw_config(0), layers=("mla",), mlps=("dense",), tie_embeddings=True)
    model = random_model(config)
    save(model, tmp_path / "model")
    theirs = read_by_transformers(hf, tmp_path / "model")
    tokens = np.arange(12)[None] % config.vocab_size
    logits, *_ = prefill(model, tokens)
    assert_equal_logits("tied", logits_of(hf, theirs, tokens), logits)


@pytest.mark.parametrize("num_tokens", [1, 3, 70, 150])
def test_bounded_gate_agrees_with_glm5_next(num_tokens: int, hf: SimpleNamespace, tmp_path: Path) -> None:
    """GLM-5.3's linear attention is KDA with K3's bounded gate and Kimi Linear's low-rank output gate."""
    glm = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    config = dataclasses.replace(draw_config(0), layers=("kda",), mlps=("dense",), gate_lower_bound=-5.0)
    model, rng = random_model(config), np.random.default_rng(num_tokens)
    layer = model.layers[0].attn
    assert isinstance(layer, KimiDeltaAttention)
    layer.A_log[...] = jnp.asarray(rng.uniform(-1, 1, layer.A_log.shape), jnp.float32)
    layer.dt_bias[...] = jnp.asarray(rng.standard_normal(layer.dt_bias.shape), jnp.float32)
    save(model, tmp_path / "model")
    theirs = glm.Glm5NextTextLinearAttention(
        SimpleNamespace(
            hidden_size=config.hidden_size,
            linear_num_heads=config.kda_num_heads,
            linear_head_dim=config.kda_head_dim,
            linear_conv_kernel_dim=config.conv_size,
            linear_lower_bound=config.gate_lower_bound,
            hidden_act="silu",
            rms_norm_eps=config.rms_norm_eps,
            layer_types=["linear_attention"],
        ),
        0,
    )
    theirs.load_state_dict(
        _as_glm(hf, load_file(tmp_path / "model" / "model.safetensors"), config.kda_num_heads)
    )
    x = rng.standard_normal((2, num_tokens, config.hidden_size)).astype(np.float32)
    with hf.torch.no_grad():
        want = theirs(hf.torch.tensor(x)).numpy()
    got, state, *_ = jax.jit(lambda x: layer(x))(x)
    assert_equal_logits("bounded gate", want, got)
    assert state.position.tolist() == [num_tokens] * 2


def _as_glm(hf: SimpleNamespace, held: dict[str, np.ndarray], heads: int) -> dict[str, Any]:
    scope = "language_model.model.layers.0.self_attn."
    held = {name.removeprefix(scope): value for name, value in held.items() if name.startswith(scope)}
    held["conv1d.weight"] = np.concatenate([held.pop(f"{x}_conv1d.weight") for x in "qkv"])
    held["A_log"] = held["A_log"][:heads]
    gate = ("f_a_proj.weight", "f_b_proj.weight", "A_log", "dt_bias")
    held |= {f"forget_gate.{name}": held.pop(name) for name in gate}
    return {name: hf.torch.tensor(value) for name, value in held.items()}
