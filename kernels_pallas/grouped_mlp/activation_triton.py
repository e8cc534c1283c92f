"""The backward pass of an expert's activation, in one Triton kernel.

XLA computes the gradient of the pre-activations, the activations that the weight gradient reads,
and the gradients of the rows' factors in a pass each. The kernel reads its operands once.

Legend: N rows, F expert hidden, U = 2F (gated) or F.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.grouped_mlp.reference import (
    ActivationGradients,
    activate_gated,
    gelu_without_erf,
)
from kernels_pallas.triton import (
    BlockSizes,
    Ref,
    check_dtypes,
    index_range,
    launch_with_results,
    load,
    split_optional,
    store,
)

BLOCKS = BlockSizes(rows=4, columns=512, num_warps=4, num_stages=1)


def activation_gradients(
    h_NU: jax.Array,
    dscaled_NF: jax.Array,
    scale_N: jax.Array | None,
    *,
    activation: str,
    interpret: bool = False,
) -> ActivationGradients:
    """Return `reference.activation_gradients`' result; GELU is `gelu_without_erf`."""
    check_dtypes(h_NU, dscaled_NF)
    num_rows = h_NU.shape[0]
    outs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (h_NU, dscaled_NF)]
    operands = [h_NU, dscaled_NF]
    if scale_N is not None:
        outs.append(jax.ShapeDtypeStruct((num_rows,), jnp.float32))
        operands.append(scale_N)
    body = _ActivationGradients(activation, scale_N is not None)
    grid = (pl.cdiv(num_rows, BLOCKS.rows),)
    dh_NU, scaled_NF, *dscale = launch_with_results(
        body, outs, grid, operands, blocks=BLOCKS, interpret=interpret
    )
    return ActivationGradients(dh_NU, scaled_NF, dscale[0] if dscale else None)


@dataclass(frozen=True)
class _ActivationGradients:
    """The kernel's body. has_scale: whether rows have factors."""

    activation: str
    has_scale: bool
    __name__ = "activation_gradients_kernel"

    def __call__(self, h: Ref, dscaled: Ref, *refs: Ref) -> None:
        (scale,), (dh, scaled, *dscales) = split_optional(refs, (self.has_scale,))
        num_rows, width = dscaled.shape
        rows = index_range(pl.program_id(0) * BLOCKS.rows, BLOCKS.rows)
        factor = None if scale is None else load(scale.at[rows], rows < num_rows)[:, None]
        function, gates = self._function_and_gates()

        def add_columns(i: jax.Array, sums: jax.Array) -> jax.Array:
            columns = index_range(i * BLOCKS.columns, BLOCKS.columns)
            mask = (rows < num_rows)[:, None] & (columns < width)[None]
            at = rows[:, None], columns[None]
            parts = [(at[0], at[1] + width * part) for part in range(gates)]
            inputs = [load(h.at[part], mask).astype(jnp.float32) for part in parts]
            activated, pull = jax.vjp(function, *inputs)
            d = load(dscaled.at[at], mask).astype(jnp.float32)
            gradients = pull(d if factor is None else d * factor)
            for part, gradient in zip(parts, gradients, strict=True):
                store(dh.at[part], gradient, mask)
            store(scaled.at[at], activated if factor is None else activated * factor, mask)
            return sums + jnp.sum(d * activated, axis=1)

        sums = lax.fori_loop(
            0, pl.cdiv(width, BLOCKS.columns), add_columns, jnp.zeros(BLOCKS.rows, jnp.float32)
        )
        for out in dscales:
            store(out.at[rows], sums, rows < num_rows)

    def _function_and_gates(self) -> tuple[Callable[..., jax.Array], int]:
        """Return (the activation, a function of blocks of pre-activations; their number)."""
        if self.activation == "gelu":
            return gelu_without_erf, 1
        return lambda gate, up: activate_gated(gate, up, activation=self.activation), 2
