"""Attention over a KV cache that consists of blocks (PagedAttention, arXiv:2309.06180).

A row of a step has a table of blocks: its position i is in block blocks[p, i // L], at place i % L.

Legend: P rows of a step, C tokens a row, H query heads, G key/value heads, d size of a query or key
head, e size of a value head, N blocks of the cache, L positions of a block, W blocks of a table.
"""

from functools import cache, partial
from importlib import import_module

import jax

from kernels_pallas.implementations import Name, call_first_supported, implementations_among

MODULES: dict[Name, str] = {
    "triton": "kernels_pallas.paged_attention.triton",
    "xla": "kernels_pallas.paged_attention.xla",
}
_run = partial(call_first_supported, MODULES)


def paged_attention(  # noqa: PLR0913  the operands of attention over a cache
    q_PCHd: jax.Array,
    k_NGLd: jax.Array,
    v_NGLe: jax.Array | None,
    blocks_PW: jax.Array,
    positions_PC: jax.Array,
    *,
    scale: float,
    value_dim: int,
    window: jax.Array | int | None = None,
    sinks_H: jax.Array | None = None,
    context: int | None = None,
    implementation: Name | None = None,
) -> jax.Array:
    """Return attention [P, C, H, e], in q's dtype, of each token to the cached positions of its row
    up to its own.

    k_NGLd, v_NGLe: in q's dtype, bfloat16 as its bits in uint16; or FP8 as its bits in uint8, see
        `kernels_pallas/cached_values.py`. v_NGLe None: the first `value_dim` dimensions of a key
        are its value (latents).
    blocks_PW: int32; places of a table that no token reaches may hold any block.
    positions_PC: int32; W L marks padding, whose output is arbitrary. Positions of the cache behind
        a row's last one may hold NaN.
    value_dim: e.
    window: number of positions that a token attends to, its own included; None for all.
    sinks_H: a logit for each head that takes part in the softmax and has no value (gpt-oss).
    context: for one token a row, an exclusive bound on all positions, a multiple of L, with which
        XLA's form reads all positions at once; kernels do not use it.
    implementation: None for the first that supports the operands, or a name.
    """
    options = {"value_dim": value_dim, "window": window, "sinks_H": sinks_H, "context": context}
    operands = q_PCHd, k_NGLd, v_NGLe, blocks_PW, positions_PC
    return _run(implementation, "paged_attention", *operands, scale=scale, **options)


def reads_in_place() -> bool:
    """Return whether a kernel of the target device reads blocks where they are, so that one program
    serves contexts of all lengths.
    """
    return "triton" in implementations_among(MODULES) and _triton_is_importable()


@cache
def _triton_is_importable() -> bool:
    try:
        import_module(MODULES["triton"])
    except NotImplementedError:  # a JAX without Pallas-Triton
        return False
    return True
