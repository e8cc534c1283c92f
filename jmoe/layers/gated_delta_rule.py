"""The gated delta rule: attention whose memory is one matrix per head, whatever a text's length.

Each value head has a state, a matrix from keys to values. A token decays the state, replaces a
share `beta` of the value that the state returns for the token's key, and reads the state with its
query (Gated Delta Networks, arXiv:2412.06464):

    S_t = exp(log_decay_t) S_(t-1)
    S_t = S_t + k_t (beta_t (v_t - S_t^T k_t))^T
    o_t = S_t^T q_t

`recurrent_delta_rule` is this definition, `delta_rule_step` one token of it, and
`chunked_delta_rule` the same in products of matrices: within a chunk the replaced values solve a
triangular system (the WY form), and only the states between chunks are computed one after the
other.

Legend: B rows, S tokens of a row, G key heads, H value heads, R = H / G value heads of a key head,
d size of a key, e size of a value, N chunks, C tokens of a chunk.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.matmul import float32_precision

CHUNK = 64  # tokens


class DeltaTokens(NamedTuple):
    """The operands of the gated delta rule for each token.

    q_BSGd, k_BSGd: of unit length; queries with the scale of the scores. v_BSHe: values.
    log_decay_BSH: float32, at most 0. beta_BSH: float32, the share of a value that is replaced, in
    [0, 1]. A token with both at 0 leaves the state unchanged, as padding must.
    """

    q_BSGd: jax.Array
    k_BSGd: jax.Array
    v_BSHe: jax.Array
    log_decay_BSH: jax.Array
    beta_BSH: jax.Array


def _delta_step_float32(tokens: DeltaTokens, state_BHde: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (output float32 [B, H, e], state) after one token of each row, without the axis S."""
    q_BGd, k_BGd, v_BHe, log_decay_BH, beta_BH = (x.astype(jnp.float32) for x in tokens)
    b, h, d, e = state_BHde.shape
    g = q_BGd.shape[1]
    state = state_BHde.reshape(b, g, h // g, d, e)
    decay, beta = (x.reshape(b, g, -1, 1) for x in (jnp.exp(log_decay_BH), beta_BH))
    both = jnp.stack([k_BGd, q_BGd], axis=2)  # one product reads the state for both
    precision = lax.Precision.HIGHEST
    read = decay[..., None] * jnp.einsum("bgnd,bgrde->bgrne", both, state, precision=precision)
    new = beta * (v_BHe.reshape(b, g, -1, e) - read[..., 0, :])
    along = (k_BGd * q_BGd).sum(axis=-1)[:, :, None, None]
    out = read[..., 1, :] + along * new
    state = decay[..., None] * state + k_BGd[:, :, None, :, None] * new[..., None, :]
    return out.reshape(b, h, e), state.reshape(b, h, d, e)


def delta_rule_step(tokens: DeltaTokens, state_BHde: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (output float32 [B, 1, H, e], state float32 [B, H, d, e]) after one token of each
    row.
    """
    out_BHe, state_BHde = _delta_step_float32(
        DeltaTokens(*(x.squeeze(1) for x in tokens)), state_BHde
    )
    return out_BHe[:, None], state_BHde


def delta_rule_states(tokens: DeltaTokens, state_BHde: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (output float32 [B, S, H, e], float32 [B, S, H, d, e], the state after each token),
    token by token.
    """
    if tokens.q_BSGd.shape[1] == 1:
        out, state = delta_rule_step(tokens, state_BHde)
        return out, state[:, None]

    def one_token(
        state: jax.Array, token: DeltaTokens
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        out, state = _delta_step_float32(token, state)
        return state, (out, state)

    in_order = jax.tree.map(lambda x: x.swapaxes(0, 1), tokens)
    _, (out, states) = lax.scan(one_token, state_BHde.astype(jnp.float32), in_order)
    return out.swapaxes(0, 1), states.swapaxes(0, 1)


def recurrent_delta_rule(tokens: DeltaTokens, state_BHde: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (output float32 [B, S, H, e], state float32 [B, H, d, e]), token by token."""

    def one_token(state: jax.Array, token: DeltaTokens) -> tuple[jax.Array, jax.Array]:
        out, state = _delta_step_float32(token, state)
        return state, out

    in_order = jax.tree.map(lambda x: x.swapaxes(0, 1), tokens)
    state_BHde, out = lax.scan(one_token, state_BHde.astype(jnp.float32), in_order)
    return out.swapaxes(0, 1), state_BHde


class _ChunkMasks(NamedTuple):
    """Which tokens of a chunk see each other and the states, by their documents; None for all.

    pairs: [N, B, 1, 1, C, C]. state: [N, B, 1, 1, C], the tokens that see the state before the
    chunk. end: [N, B, 1, 1, C], the tokens that the state after the chunk holds. whole: [N, B, 1,
    1], whether it holds the state before the chunk.
    """

    pairs: jax.Array
    state: jax.Array
    end: jax.Array
    whole: jax.Array


def _chunk_masks(documents_BS: jax.Array, chunk: int) -> _ChunkMasks:
    """Return the masks of documents, whose tokens see the earlier ones of their own document."""
    b = documents_BS.shape[0]
    number = documents_BS.reshape(b, -1, chunk).swapaxes(0, 1)[:, :, None, None]
    last = number[..., -1]
    before = jnp.concatenate([number[:1, ..., 0], last[:-1]])
    pairs = number[..., :, None] == number[..., None, :]
    return _ChunkMasks(
        pairs, number == before[..., None], number == last[..., None], last == before
    )


def _masked(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    return x if mask is None else jnp.where(mask, x, 0.0)


def _in_chunks(x_BSJi: jax.Array, chunk: int) -> jax.Array:
    """Return [N, B, J, C, i] of an array [B, S, J, i]; S is a multiple of `chunk`."""
    b, s, heads, size = x_BSJi.shape
    return x_BSJi.reshape(b, s // chunk, chunk, heads, size).transpose(1, 0, 3, 2, 4)


class _Chunks(NamedTuple):
    """The operands of the pass over chunks, one of each for a chunk, float32.

    value, key: the solved system: a chunk's new values are value - key @ state. query: reads the
    state before the chunk. scores: of a chunk's tokens among each other. end_key: writes the new
    values to the state after the chunk. kept: factor of the state before the chunk.
    """

    value: jax.Array  # [N, B, G, R, C, e]
    key: jax.Array  # [N, B, G, R, C, d]
    query: jax.Array  # [N, B, G, R, C, d]
    scores: jax.Array  # [N, B, G, R, C, C]
    end_key: jax.Array  # [N, B, G, R, C, d]
    kept: jax.Array  # [N, B, G, R]


def _solve_chunks(
    tokens: DeltaTokens, documents_BS: jax.Array | None, chunk: int, precision: lax.Precision | None
) -> _Chunks:
    """Return all that does not depend on the state, for all chunks at once."""
    g = tokens.q_BSGd.shape[2]
    q, k, v = (_in_chunks(x.astype(jnp.float32), chunk) for x in tokens[:3])
    n, b, h, c, e = v.shape
    v = v.reshape(n, b, g, h // g, c, e)
    decays, beta = (_in_chunks(x[..., None], chunk).reshape(v.shape[:-1]) for x in tokens[3:])
    masks = None if documents_BS is None else _chunk_masks(documents_BS, chunk)
    total = decays.cumsum(axis=-1)
    seen = jnp.tril(jnp.ones((c, c), bool))
    seen = seen if masks is None else seen & masks.pairs
    between = jnp.exp(jnp.where(seen, total[..., :, None] - total[..., None, :], -jnp.inf))
    product = partial(jnp.einsum, "...id,...jd->...ij", precision=precision)
    system = jnp.tril(product(k, k)[:, :, :, None] * beta[..., None] * between, -1)
    scores = product(q, k)[:, :, :, None] * between
    from_state = _masked(jnp.exp(total), masks and masks.state)[..., None]
    to_end = _masked(jnp.exp(total[..., -1:] - total), masks and masks.end)[..., None]
    k, q = k[:, :, :, None], q[:, :, :, None]
    right = jnp.concatenate([v * beta[..., None], k * beta[..., None] * from_state], axis=-1)
    solved = lax.linalg.triangular_solve(
        system, right, left_side=True, lower=True, unit_diagonal=True
    )
    kept = _masked(jnp.exp(total[..., -1]), masks and masks.whole)
    return _Chunks(solved[..., :e], solved[..., e:], q * from_state, scores, k * to_end, kept)


def chunked_delta_rule(
    tokens: DeltaTokens,
    state_BHde: jax.Array,
    documents_BS: jax.Array | None = None,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """Return (output float32 [B, S, H, e], state float32 [B, H, d, e]), in chunks.

    Products of float32 tokens are exact float32; those of narrower ones may be TF32 on a GPU.

    documents_BS: int32, equal for the tokens of one document, whose memory begins empty; the state
        belongs to the first token's document. None if a row is one document.
    """
    precision = float32_precision(tokens.v_BSHe)
    b, s, h, e = tokens.v_BSHe.shape
    g, chunk = tokens.q_BSGd.shape[2], min(chunk, s)
    missing = -s % chunk
    if missing:
        tokens = jax.tree.map(
            lambda x: jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2))), tokens
        )
        if documents_BS is not None:
            documents_BS = jnp.pad(documents_BS, ((0, 0), (0, missing)), mode="edge")
    chunks = _solve_chunks(tokens, documents_BS, chunk, precision)

    multiply = partial(jnp.einsum, "...ij,...jk->...ik", precision=precision)

    def one_chunk(state: jax.Array, x: _Chunks) -> tuple[jax.Array, jax.Array]:
        new = x.value - multiply(x.key, state)
        out = multiply(x.query, state) + multiply(x.scores, new)
        state = x.kept[..., None, None] * state + multiply(x.end_key.swapaxes(-1, -2), new)
        return state, out

    first = state_BHde.astype(jnp.float32).reshape(b, g, h // g, *state_BHde.shape[2:])
    state, out = lax.scan(one_chunk, first, chunks)  # out [N, B, G, R, C, e]
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(b, -1, h, e)[:, :s]
    return out, state.reshape(state_BHde.shape)
