"""The grouped MLP by two grouped matmuls of some kernel. Without gradients, biases and activation
are fused into them.

With gradients the pre-activations must be in memory, so XLA computes bias and activation between
the two products. The factors of the rows' outputs (the router's weights) multiply the activations
in the same pass: the gradient of a factor is then the product of a row's activations and their
gradient, which the backward pass has, and no outputs are saved for it. The form is SonicMoE's
(arXiv 2512.14080).

Legend: N rows sorted by group, L groups (local experts), D hidden, F expert hidden, U = 2F (SwiGLU)
or F (GELU), M slots.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.compressed import SCALES, uint16_as_bfloat16
from kernels_pallas.grouped_matmul import Implementation, grouped_matmul
from kernels_pallas.grouped_matmul.api import MODULES as MATMULS
from kernels_pallas.grouped_matmul.operands import Epilogue, WeightSlots
from kernels_pallas.grouped_mlp.reference import (
    MLPWeights,
    ProductChange,
    activate,
    activate_gated,
    gelu_without_erf,
    scaled_activation,
)
from kernels_pallas.implementations import Name, call_first_supported, first_supported
from kernels_pallas.matmul import float32_precision
from kernels_pallas.saved import mark_saved
from kernels_pallas.token_permute import RowMap

ACTIVATIONS: dict[Name, str] = {
    "triton": "kernels_pallas.grouped_mlp.activation_triton",
    "xla": "kernels_pallas.grouped_mlp.reference",
}


@jax.custom_vjp
def _add_bias(
    h_NU: jax.Array, b_LU: jax.Array, group_N: jax.Array, scale_N: jax.Array | None = None
) -> jax.Array:
    """Return h + b[group] in float32, with b[group] times `scale_N` if given. The gradient of b is
    a product with the groups' indicator matrix, not a scatter of floats.
    """
    b_NU = jnp.take(b_LU, group_N, axis=0, mode="clip").astype(jnp.float32)
    return h_NU.astype(jnp.float32) + (b_NU if scale_N is None else b_NU * scale_N[:, None])


_BiasResiduals: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]


def _add_bias_fwd(
    h_NU: jax.Array, b_LU: jax.Array, group_N: jax.Array, scale_N: jax.Array | None
) -> tuple[jax.Array, _BiasResiduals]:
    of_dtype = jnp.zeros(0, h_NU.dtype)
    return _add_bias(h_NU, b_LU, group_N, scale_N), (group_N, of_dtype, b_LU, scale_N)


def _add_bias_bwd(
    residuals: _BiasResiduals, dy_NU: jax.Array
) -> tuple[jax.Array, jax.Array, None, jax.Array | None]:
    group_N, of_dtype, b_LU, scale_N = residuals
    dh_NU = dy_NU.astype(of_dtype.dtype)
    num_groups = b_LU.shape[0]
    member_NL = group_N[:, None] == jnp.arange(num_groups, dtype=group_N.dtype)
    factor_N1 = 1 if scale_N is None else scale_N[:, None]
    factors_NL = jnp.where(member_NL, factor_N1, 0).astype(dh_NU.dtype)
    # rows beyond the groups may hold NaN
    inside_NU = jnp.where((group_N < num_groups)[:, None], dh_NU, 0)
    db_LU = lax.dot_general(
        factors_NL,
        inside_NU,
        (((0,), (0,)), ((), ())),
        precision=float32_precision(inside_NU),
        preferred_element_type=jnp.float32,
    )
    dscale_N = None
    if scale_N is not None:
        b_NU = jnp.take(b_LU, group_N, axis=0, mode="clip").astype(jnp.float32)
        dscale_N = (dy_NU.astype(jnp.float32) * b_NU).sum(axis=-1)
    return dh_NU, db_LU.astype(b_LU.dtype), None, dscale_N


_add_bias.defvjp(_add_bias_fwd, _add_bias_bwd)


class _Operands(NamedTuple):
    """The operands of the grouped MLP that have gradients."""

    x_ND: jax.Array
    weights: MLPWeights
    scale_N: jax.Array | None = None


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _activate_and_project(
    h_NU: jax.Array,
    scale_N: jax.Array | None,
    w_down_LFD: jax.Array,
    group_sizes_L: jax.Array,
    activation: str,
    matmul: Implementation | None,
) -> jax.Array:
    """Return the down projection of the scaled activations. The backward pass computes the
    activations again, in the kernel that computes their gradient.
    """
    a_NF = scaled_activation(h_NU, scale_N, activation)
    return grouped_matmul(a_NF, w_down_LFD, group_sizes_L, implementation=matmul)


# h_NU, scale_N, w_down_LFD, group_sizes_L
_ProjectionResiduals: TypeAlias = tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]


def _activate_and_project_fwd(
    h_NU: jax.Array,
    scale_N: jax.Array | None,
    w_down_LFD: jax.Array,
    group_sizes_L: jax.Array,
    activation: str,
    matmul: Implementation | None,
) -> tuple[jax.Array, _ProjectionResiduals]:
    operands = h_NU, scale_N, w_down_LFD, group_sizes_L
    return _activate_and_project(*operands, activation, matmul), operands


def _activate_and_project_bwd(
    activation: str,
    matmul: Implementation | None,
    residuals: _ProjectionResiduals,
    dy_ND: jax.Array,
) -> tuple[jax.Array, jax.Array | None, jax.Array, None]:
    h_NU, scale_N, w_down_LFD, group_sizes_L = residuals
    run = partial(call_first_supported, MATMULS, matmul)
    dscaled_NF = run("grouped_matmul", dy_ND, w_down_LFD, group_sizes_L, transpose_rhs=True)
    gradients: Any = call_first_supported(
        ACTIVATIONS, None, "activation_gradients", h_NU, dscaled_NF, scale_N, activation=activation
    )
    dh_NU, scaled_NF, dscale_N = gradients
    dw_down_LFD = run("weight_gradient", scaled_NF, dy_ND, group_sizes_L)
    return dh_NU, dscale_N, dw_down_LFD, None


_activate_and_project.defvjp(_activate_and_project_fwd, _activate_and_project_bwd)


def _prevent_second_launch(y_NU: jax.Array) -> jax.Array:
    """Return a kernel's result so that XLA launches the kernel only once.

    A scan over layers stacks residuals; XLA would fuse a second launch of the kernel into the write
    to the stack.
    """
    return lax.optimization_barrier(y_NU)


def _mlp_with_saved_preactivations(
    operands: _Operands,
    group_sizes_L: jax.Array,
    rows: RowMap | None,
    activation: str,
    matmul: Implementation | None,
    change: ProductChange | None = None,
) -> jax.Array:
    """Return the MLP's output. Its pre-activations are marked as residuals that a rematerialization
    policy may save under the name `expert_up`. XLA adds the biases and applies the activation.
    matmul: None for the best that supports the operands. change: see `changed_grouped_mlp`.
    """
    x_ND, (w_up_LDU, w_down_LFD, b_up_LU, b_down_LD), scale_N = operands
    ends_L = jnp.cumsum(group_sizes_L)
    num_rows = (x_ND if rows is None else rows.src_M).shape[0]
    group_N = (jnp.arange(num_rows, dtype=jnp.int32)[:, None] >= ends_L).sum(
        axis=-1, dtype=jnp.int32
    )
    h = grouped_matmul(x_ND, w_up_LDU, group_sizes_L, rows=rows, implementation=matmul)
    h = _add_change(h, change, "w_up", x_ND)
    if b_up_LU is not None:
        h = _add_bias(h, b_up_LU, group_N).astype(x_ND.dtype)
    h = mark_saved(_prevent_second_launch(h), "expert_up")
    if change is None:
        y = _activate_and_project(h, scale_N, w_down_LFD, group_sizes_L, activation, matmul)
    else:
        a_NF = scaled_activation(h, scale_N, activation)
        y = grouped_matmul(a_NF, w_down_LFD, group_sizes_L, implementation=matmul)
        y = _add_change(y, change, "w_down", a_NF)
    return (
        _prevent_second_launch(y)
        if b_down_LD is None
        else _add_bias(y, b_down_LD, group_N, scale_N).astype(x_ND.dtype)
    )


def _add_change(y: jax.Array, change: ProductChange | None, name: str, x: jax.Array) -> jax.Array:
    """Return the product y = x @ weight `name` with its change added in float32, in y's dtype."""
    added = None if change is None else change(name, x)
    if added is None:
        return y
    return (y.astype(jnp.float32) + added.astype(jnp.float32)).astype(y.dtype)


def changed_grouped_mlp(
    x_ND: jax.Array,
    group_sizes_L: jax.Array,
    weights: MLPWeights,
    change: ProductChange,
    *,
    activation: str,
    rows: RowMap | None = None,
    scale_N: jax.Array | None = None,
) -> jax.Array:
    """Return `grouped_mlp.api`'s result with a change added to both products; differentiable in x,
    weights, scale and what `change` computes with.

    weights: in x's dtype. change: of ("w_up", `x_ND` as it is, not gathered by `rows`) and of
    ("w_down", the activations [N, F], times `scale_N`); linear in these.
    """
    operands = _Operands(x_ND, weights, scale_N)
    return _mlp_with_saved_preactivations(operands, group_sizes_L, rows, activation, None, change)


def _fused_mlp(
    operands: _Operands,
    group_sizes_L: jax.Array,
    rows: RowMap | None,
    activation: str,
    matmul: Implementation,
) -> jax.Array:
    """Return the MLP's output with biases and activation inside the kernels: pre-activations never
    leave the registers.
    """
    x_ND, (w_up_LDU, w_down_LFD, b_up_LU, b_down_LD), scale_N = operands
    if scale_N is not None and b_down_LD is not None:
        raise NotImplementedError("no kernel scales a bias by a factor of the row")
    gated = activation != "gelu"
    function = partial(activate_gated, activation=activation) if gated else gelu_without_erf
    up, down = Epilogue(b_up_LU, function, gated), Epilogue(b_down_LD)
    by_index = {} if rows is None else {"src_N": rows.src_M}
    a_NF = matmul.grouped_matmul(x_ND, w_up_LDU, group_sizes_L, epilogue=up, **by_index)
    if scale_N is not None:
        a_NF = (a_NF.astype(jnp.float32) * scale_N[:, None]).astype(x_ND.dtype)
    return matmul.grouped_matmul(a_NF, w_down_LFD, group_sizes_L, epilogue=down)


def grouped_mlp_in_slots_by_matmul(
    matmul: Implementation,
    x_ND: jax.Array,
    group_sizes_E: jax.Array,
    slots: Mapping[str, jax.Array],
    slot_E: jax.Array,
    *,
    activation: str,
    change: ProductChange | None = None,
    fp8_inputs: bool = False,
) -> jax.Array:
    """Return [N, D] in x's dtype: the MLP with the weights in slot slot_E[e], applied to the rows
    of group e. Rows beyond the groups hold arbitrary values.

    slots, slot_E, change, fp8_inputs: see `mlp_in_slots`. The kernel reads only the slots of groups
    with rows.
    """
    multiply = partial(matmul.grouped_matmul, group_sizes_E=group_sizes_E)
    operands = multiply, x_ND, slots, slot_E
    gates = matmul.gates_slots
    options: dict[str, Any] = {"activation": activation, "change": change, "fp8_inputs": fp8_inputs}
    return mlp_in_slots(*operands, gates_all=gates, **options)


def mlp_in_slots(
    multiply: Callable[..., jax.Array],
    x: jax.Array,
    slots: Mapping[str, jax.Array],
    slot_E: jax.Array,
    *,
    activation: str,
    gates_all: bool,
    change: ProductChange | None = None,
    fp8_inputs: bool = False,
) -> jax.Array:
    """Return rows in x's dtype: the MLP of the experts' weights in slots, by two products.

    multiply: multiply(x, w, slots=, epilogue=), which knows the rows of each expert. slots: arrays
    [M, ...] of M slots by name; bfloat16 may be stored as uint16 bits, matrices may be compressed,
    with their scales beside them (`kernels_pallas.compressed`). slot_E: of each expert. gates_all:
    whether a gated epilogue takes any width and format. change: added to both products; the
    activation then runs in a pass of its own. fp8_inputs: see `WeightSlots`. Not differentiable.
    Raises NotImplementedError for operands that `multiply` does not support.
    """

    def project_rows(
        x: jax.Array, name: str, activate: Callable[..., jax.Array] | None = None
    ) -> jax.Array:
        w, scales, bias = slots[name], slots.get(f"{name}{SCALES}"), slots.get(f"b{name[1:]}")
        epilogue = Epilogue(uint16_as_bfloat16(bias), activate, activate is not None)
        places = WeightSlots(slot_E, scales, fp8_inputs)
        y = multiply(x, uint16_as_bfloat16(w), slots=places, epilogue=epilogue)
        return _add_change(y, change, name, x)

    is_plain = "w_up" + SCALES not in slots and slots["w_up"].shape[2] % 256 == 0
    if activation != "gelu" and (is_plain or gates_all) and change is None:
        a_NF = project_rows(x, "w_up", partial(activate_gated, activation=activation))
    else:
        a_NF = activate(project_rows(x, "w_up").astype(jnp.float32), activation).astype(x.dtype)
    return project_rows(a_NF, "w_down")


_Gradient: TypeAlias = Callable[[jax.Array], tuple[_Operands]]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped_mlp(
    operands: _Operands,
    group_sizes_L: jax.Array,
    rows: RowMap | None,
    activation: str,
    matmul: Implementation,
) -> jax.Array:
    candidates = [
        (name, partial(body, operands, group_sizes_L, rows, activation, matmul))
        for name, body in (
            ("fused activation", _fused_mlp),
            ("activation in a pass of its own", _mlp_with_saved_preactivations),
        )
    ]
    return first_supported("grouped_mlp", candidates)


def _grouped_mlp_fwd(
    operands: _Operands,
    group_sizes_L: jax.Array,
    rows: RowMap | None,
    activation: str,
    matmul: Implementation,
) -> tuple[jax.Array, _Gradient]:
    return jax.vjp(
        lambda operands: _mlp_with_saved_preactivations(
            operands, group_sizes_L, rows, activation, matmul
        ),
        operands,
    )


def _grouped_mlp_bwd(
    activation: str, matmul: Implementation, vjp: _Gradient, dy_ND: jax.Array
) -> tuple[_Operands, None, None]:
    return *vjp(dy_ND), None, None


_grouped_mlp.defvjp(_grouped_mlp_fwd, _grouped_mlp_bwd)


def grouped_mlp_by_matmul(
    matmul: Implementation,
    x_ND: jax.Array,
    group_sizes_L: jax.Array,
    weights: MLPWeights,
    *,
    activation: str,
    rows: RowMap | None = None,
    scale_N: jax.Array | None = None,
) -> jax.Array:
    """Return `grouped_mlp.api`'s result by two products of `matmul`, which reads the rows of a row
    map by index.
    """
    operands = _Operands(x_ND, weights, scale_N)
    return _grouped_mlp(operands, group_sizes_L, rows, activation, matmul)
