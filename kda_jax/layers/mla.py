"""Multi-head latent attention as a layer: attention over one cached latent vector a token."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kda_jax.layers.projection import Linear, Projections, fan_in
from kda_jax.sharding import TENSOR, AnyMesh, lay, over
from kda_jax.state import MLAState, PagedMLAState
from pallas_kernels import mla_attention, rms_norm


class MultiHeadLatentAttention(nnx.Module):
    """Multi-head latent attention without positions (NoPE), in absorbed form: keys and values are never
    expanded.

    Kernels are [in, out]. `in_proj` holds, side by side, q (or its latent with `q_lora_rank`) | kv latent |
    shared key part | output gate (when asked for). `w_uk` [H, N, R] takes a head's query to the latents,
    `w_uv` [H, R, v] takes what was read there to a head's value.

    Args:
        hidden_size: width of input and output (D).
        num_heads: heads (H).
        kv_lora_rank: channels of the latent (R).
        qk_nope_head_dim: channels of a head's own query and key (N).
        qk_rope_head_dim: channels of the key part that all heads share (P); unrotated here, as in Kimi's
            models.
        v_head_dim: channels of a head's value.
        q_lora_rank: rank of the query projection, None for a whole matrix.
        output_gate: multiply the heads' outputs by sigmoid(x W) before the output projection (Kimi K3).
        latent_norm_eps: of the RMS norms on the latents.
        rngs: `params` is drawn from.
        dtype: of the parameters.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; Kimi Linear, arXiv:2510.26692, section 4 (NoPE);
        transformers 5.24 `KimiLinearAttention`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None = None,
        output_gate: bool = False,
        latent_norm_eps: float = 1e-6,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
    ):
        self.num_heads, self.rank, self.latent_norm_eps = num_heads, kv_lora_rank, latent_norm_eps
        self.nope_dim, self.rope_dim = qk_nope_head_dim, qk_rope_head_dim
        self.mesh: AnyMesh | None = None
        queries = num_heads * (qk_nope_head_dim + qk_rope_head_dim)
        outputs = num_heads * v_head_dim
        sizes = (q_lora_rank or queries, kv_lora_rank, qk_rope_head_dim, *([outputs] if output_gate else []))
        self.in_proj = Projections(hidden_size, sizes, rngs=rngs, dtype=dtype)
        if q_lora_rank is None:
            self.q_norm = self.q_b = None
        else:
            self.q_norm = nnx.Param(jnp.ones((q_lora_rank,), dtype))
            self.q_b = Linear(q_lora_rank, queries, rngs=rngs, dtype=dtype)
        self.kv_norm = nnx.Param(jnp.ones((kv_lora_rank,), dtype))
        self.w_uk = fan_in(rngs, (num_heads, qk_nope_head_dim, kv_lora_rank), dtype, kv_lora_rank)
        self.w_uv = fan_in(rngs, (num_heads, kv_lora_rank, v_head_dim), dtype)
        self.o_proj = Linear(outputs, hidden_size, rngs=rngs, dtype=dtype)

    def empty(self, batch: int, capacity: int, dtype: DTypeLike | None = None) -> MLAState:
        """The state before the first token of `batch` rows, with room for `capacity` tokens each."""
        dtype = self.kv_norm[...].dtype if dtype is None else dtype
        latent = jnp.zeros((batch, capacity, self.rank + self.rope_dim), dtype)
        return MLAState(latent, jnp.zeros((batch,), jnp.int32))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        state: MLAState | PagedMLAState | None = None,
        *,
        lengths: Int[Array, "B"] | None = None,
        boundaries: Int[Array, "... NB"] | None = None,
    ) -> tuple[Float[Array, "B T D"], MLAState | PagedMLAState, *tuple[MLAState | PagedMLAState, ...]]:
        """Attends from each token to itself and everything before it.

        Args:
            x: the tokens' vectors.
            state: what the rows have absorbed, with room for this call's tokens, in one piece or in pages (the
                bits are the same); None for nothing, and the state returned then has no room beyond this call.
            lengths: tokens of each row that count; the rest is padding, which touches nothing.
            boundaries: token counts of this call, 0..T, at which the state is returned too.

        Returns:
            y, the state behind each row's last token, and with `boundaries` the states there: the same
            latents with positions [B, NB].
        """
        rows, tokens = x.shape[:2]
        q, latent, shared_key, *gate = self.in_proj(x)
        latent, shared_key = lay(latent, self.mesh), lay(shared_key, self.mesh)
        latent = rms_norm(latent, self.kv_norm[...], eps=self.latent_norm_eps)
        latent = jnp.concatenate((latent, shared_key), axis=-1)
        table = None
        if state is None:
            start = None
            new = MLAState(latent, jnp.zeros((rows,), jnp.int32))
        elif isinstance(state, PagedMLAState):
            start, table = state.position, state.table
            new = state._replace(latent=_write_pages(state, latent, lengths))
        else:
            start = state.position
            new = MLAState(_write(state.latent, latent, start, lengths), start)
        out = self._attend(self._queries(q), new.latent, start, lengths, table)
        out = jnp.einsum("bthr,hrv->bthv", out, self.w_uv[...]).reshape(rows, tokens, -1)
        if gate:
            out = out * jax.nn.sigmoid(gate[0])
        y = self.o_proj(out)
        end = new._replace(position=new.position + (tokens if lengths is None else lengths))
        if boundaries is None:
            return y, end
        return y, end, new._replace(position=new.position[:, None] + boundaries)

    def _attend(
        self, q: Array, latent: Array, start: Array | None, lengths: Array | None, table: Array | None
    ) -> Float[Array, "B T H R"]:
        def attend(q, latent, start, lengths, page_table):
            scale = (self.nope_dim + self.rope_dim) ** -0.5
            at = dict(start=start, lengths=lengths, page_table=page_table)
            return mla_attention(q, latent, rank=self.rank, scale=scale, **at)

        heads, whole = PartitionSpec(None, None, TENSOR), PartitionSpec()
        return over(self.mesh, attend, (heads, whole, whole, whole, whole), heads)(
            q, latent, start, lengths, table
        )

    def _queries(self, q: Float[Array, "B T _"]) -> Float[Array, "B T H L"]:
        if self.q_b is not None and self.q_norm is not None:
            q = self.q_b(rms_norm(lay(q, self.mesh), self.q_norm[...], eps=self.latent_norm_eps))
        q = q.reshape(*q.shape[:2], self.num_heads, self.nope_dim + self.rope_dim)
        own = jnp.einsum("bthn,hnr->bthr", q[..., : self.nope_dim], self.w_uk[...])
        return jnp.concatenate((own, q[..., self.nope_dim :]), axis=-1)


def _write(
    old: Float[Array, "B S L"],
    new: Float[Array, "B T L"],
    start: Int[Array, "B"],
    lengths: Int[Array, "B"] | None,
) -> Float[Array, "B S L"]:
    """Puts each row's new latents behind its old ones; padding, and what lies beyond the capacity is lost."""
    capacity, tokens = old.shape[1], new.shape[1]
    new = new.astype(old.dtype)
    if tokens == 1:
        at = start if lengths is None else jnp.where(lengths > 0, start, capacity)
        return old.at[jnp.arange(old.shape[0]), at].set(new[:, 0], mode="drop")
    # Read by position rather than scattered: a select over the whole cache is one pass through memory, while
    # a scatter of T rows is T small updates on most devices.
    source = jnp.arange(capacity, dtype=jnp.int32) - start[:, None]
    live = (source >= 0) & (source < (tokens if lengths is None else lengths[:, None]))
    moved = jnp.take_along_axis(new, jnp.clip(source, 0, tokens - 1)[..., None], axis=1)
    return jnp.where(live[..., None], moved, old)


def _write_pages(
    old: PagedMLAState, new: Float[Array, "B T L"], lengths: Int[Array, "B"] | None
) -> Float[Array, "pages R L"]:
    """Puts each row's new latents behind its old ones; padding, and what lies beyond the table, goes to page 0."""
    size, (_, width) = old.latent.shape[1], old.table.shape
    token = jnp.arange(new.shape[1], dtype=jnp.int32)[None, :]
    at = old.position[:, None] + token
    kept = at < width * size
    if lengths is not None:
        kept &= token < lengths[:, None]
    page = jnp.take_along_axis(old.table, jnp.minimum(at // size, width - 1), axis=1)
    return old.latent.at[jnp.where(kept, page, 0), at % size].set(new.astype(old.latent.dtype))
