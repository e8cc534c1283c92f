"""Native operations on many rows, and their gradients, against plain JAX in float32."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.layers.attention import causal_attention
from kernels_pallas import native
from kernels_pallas.grouped_mlp import MLPWeights, grouped_mlp, reference
from kernels_pallas.token_permute import RowMap, sort_by_expert


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    try:
        if not native.multiplies_many_rows():
            pytest.skip("no native operations here: the processor has no AVX512-BF16")
    except native.NotBuiltError as error:
        pytest.skip(f"no native operations here: {error}")


def drawn(shapes: list[tuple[int, ...]]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]


def assert_near(got: Any, want: Any, tolerance: float = 6e-3) -> None:
    """Equal but for rounding to bfloat16, by the largest value of each array."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max() + 1e-4)


def wide_attention(
    q_BSHd: jax.Array, k_BSGd: jax.Array, v_BSGd: jax.Array, scale: float
) -> jax.Array:
    group, s = q_BSHd.shape[2] // k_BSGd.shape[2], q_BSHd.shape[1]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k_BSGd, v_BSGd))
    scores_BHST = jnp.einsum("bshd,bthd->bhst", q_BSHd, k) * scale
    scores_BHST = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores_BHST, -jnp.inf)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores_BHST, axis=-1), v)


@pytest.mark.parametrize(
    ("s", "heads", "groups", "d", "e"),
    [
        (128, 4, 4, 64, 64),
        (100, 4, 2, 32, 48),
        (33, 2, 1, 16, 16),
        (1, 2, 2, 128, 128),
        (65, 3, 1, 80, 112),
        (40, 2, 2, 192, 128),  # DeepSeek's
    ],
)
def test_causal_attention_and_its_gradient(s: int, heads: int, groups: int, d: int, e: int) -> None:
    """Sequences of whole blocks and of parts, grouped heads, and columns that do not fill a
    panel.
    """
    q, k, v, do = drawn([(2, s, heads, d), (2, s, groups, d), (2, s, groups, e), (2, s, heads, e)])
    o, lse = native.causal_attention(q, k, v, scale=0.2)
    gradients = native.causal_attention_gradient((q, k, v), (o, lse), do, scale=0.2)
    wide, vjp = jax.vjp(
        lambda *x: wide_attention(*x, scale=0.2), *(x.astype(jnp.float32) for x in (q, k, v))
    )
    assert_near((o, gradients), (wide, vjp(do.astype(jnp.float32))))


def test_attention_takes_it_while_a_native_step_is_traced() -> None:
    """And not for float32, nor for dimensions that it does not know."""
    q, k, v = drawn([(2, 64, 4, 32), (2, 64, 2, 32), (2, 64, 2, 32)])

    def gradients(*x: jax.Array) -> Any:
        return jax.grad(
            lambda *x: (causal_attention(*x).astype(jnp.float32) ** 2).sum(), argnums=(0, 1, 2)
        )(*x)

    def compiled(wanted: bool, *x: jax.Array) -> Any:
        with native.allow_native_training(wanted):
            return jax.jit(lambda *x: gradients(*x)).lower(*x).compile()

    ours, plain = compiled(True, q, k, v), compiled(False, q, k, v)
    assert "jmoe_causal_attention_gradient" in ours.as_text()
    assert "jmoe_causal" not in plain.as_text()
    assert_near(ours(q, k, v), plain(q, k, v), 1e-2)
    assert (
        "jmoe_causal" not in compiled(True, *(x.astype(jnp.float32) for x in (q, k, v))).as_text()
    )
    assert "jmoe_causal" not in compiled(True, *(x[..., :24] for x in (q, k, v))).as_text()


def drawn_mlp(
    sizes: list[int], d: int, f: int, activation: str, *, bias: bool
) -> tuple[jax.Array, MLPWeights]:
    """(x [300, D], weights that bfloat16 holds exactly)."""
    up, groups = f if activation == "gelu" else 2 * f, len(sizes)
    x, w_up, w_down, b_up, b_down = drawn(
        [(300, d), (groups, d, up), (groups, f, d), (groups, up), (groups, d)]
    )
    weights = [w.astype(jnp.float32) for w in (w_up / 8, w_down / 8, b_up, b_down)]
    return x, MLPWeights(*weights[:2], *(weights[2:] if bias else ()))


@pytest.mark.parametrize(
    ("activation", "bias", "scaled", "sizes", "d", "f"),
    [
        ("gelu", True, False, [7, 0, 191, 96], 64, 96),
        ("gelu", False, True, [300], 80, 64),
        ("swiglu", False, False, [100, 200], 64, 80),
        ("swiglu", True, True, [1, 128, 0], 32, 48),
    ],
)
def test_experts_and_their_gradients(
    activation: str, bias: bool, scaled: bool, sizes: list[int], d: int, f: int
) -> None:
    """Groups of any size, none or one row or an odd number; what lies beyond them has no part in
    it.
    """
    (scale,) = drawn([(300,)])
    scale_N = scale.astype(jnp.float32) if scaled else None
    x, weights = drawn_mlp(sizes, d, f, activation, bias=bias)
    dy, used = x[::-1], sum(sizes)
    sizes_L = jnp.asarray(sizes, jnp.int32)

    def both(form: Any, x: jax.Array, dy: jax.Array) -> Any:
        def f(x: jax.Array, weights: MLPWeights, scale_N: jax.Array | None) -> jax.Array:
            y_ND: jax.Array = form(x, sizes_L, weights, activation=activation, scale_N=scale_N)
            return y_ND

        y, vjp = jax.vjp(f, x, weights, scale_N)
        dx, dweights, dscale = vjp(dy)
        return y[:used], dx[:used], dweights, dscale

    with native.allow_native_training(True):
        ours = both(partial(grouped_mlp, batched_rows_per_group=32), x, dy)
    wide = x.astype(jnp.float32), dy.at[used:].set(0).astype(jnp.float32)
    assert_near(ours, both(reference.grouped_mlp, *wide), 1.5e-2)
    assert [w.dtype for w in jax.tree.leaves(ours[2])] == [jnp.float32] * (4 if bias else 2)


@pytest.mark.parametrize("rows", [1, 6, 16, 17, 32, 49])
def test_a_row_does_not_depend_on_how_many_there_are(rows: int) -> None:
    """Whichever instructions a processor has for many rows, sums over inner dimensions of any
    size have one order.
    """
    x, weights = drawn_mlp([300], 80, 48, "swiglu", bias=False)

    def first_rows(sizes: int) -> jax.Array:
        with native.allow_native_training(True):
            return grouped_mlp(
                x,
                jnp.full(1, sizes, jnp.int32),
                weights,
                activation="swiglu",
                batched_rows_per_group=32,
            )[:rows]

    np.testing.assert_array_equal(first_rows(rows), first_rows(300))


def test_experts_read_the_rows_of_tokens() -> None:
    """A map of rows gives what the rows that it names give, and the gradient goes to their
    tokens.
    """
    x, weights = drawn_mlp([150, 146], 32, 48, "swiglu", bias=False)
    x_TD, dy = x[:148], x[4:]
    idx_TK = jnp.asarray(
        np.random.default_rng(1).permuted(np.tile([0, 1], (148, 1)), axis=1), jnp.int32
    )
    order_N, rank_N = sort_by_expert(idx_TK.reshape(-1), 2)
    src_M, row_TK, sizes_L = order_N // 2, rank_N.reshape(-1, 2), jnp.full(2, 148, jnp.int32)

    def of(x_TD: jax.Array, weights: MLPWeights, rows: RowMap | None) -> jax.Array:
        x = x_TD if rows else jnp.take(x_TD, src_M, axis=0)
        return grouped_mlp(
            x, sizes_L, weights, activation="swiglu", batched_rows_per_group=32, rows=rows
        )

    with native.allow_native_training(True):
        mapped, taken = (
            jax.vjp(partial(of, rows=rows), x_TD, weights) for rows in (RowMap(src_M, row_TK), None)
        )
    np.testing.assert_array_equal(mapped[0], taken[0])
    assert_near(mapped[1](dy), taken[1](dy), 1e-2)


def test_in_the_background_they_compute_the_same_and_say_how_long_it_took() -> None:
    """Each in a program of several operations, all of which wait for what they read."""
    q, k, v, do = drawn([(2, 65, 4, 32), (2, 65, 2, 32), (2, 65, 2, 48), (2, 65, 4, 48)])
    x, weights = drawn_mlp([100, 60], 32, 48, "swiglu", bias=True)
    sizes_L = jnp.asarray([100, 60], jnp.int32)
    rows, arrays = native.GroupedRows(x, None, sizes_L), tuple(weights)

    def program(q: jax.Array, x: jax.Array) -> Any:
        o, lse = native.causal_attention(q * 2, k, v, scale=0.2)
        y, h = native.grouped_mlp(rows._replace(x_TD=x * 2), arrays)
        dq, dk, dv = native.causal_attention_gradient((q * 2, k, v), (o, lse), do + o, scale=0.2)
        return dq + q, dk + k, dv + v, native.grouped_mlp_gradient(rows, arrays, h, y + 1)

    def compiled(background: bool) -> Any:
        with native.allow_native_training(True, background=background):
            # a function of its own, or JAX takes the first trace
            return jax.jit(lambda q, x: program(q, x))(q, x)

    plain = compiled(background=False)
    native.start_recording_background()
    for got, want in zip(
        jax.tree.leaves(compiled(background=True)), jax.tree.leaves(plain), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    seconds = native.stop_recording_background()
    assert len(seconds) == 4 and all(0 <= waited < 60 and 0 < ran < 60 for waited, ran in seconds)
    native.start_recording_background()
    compiled(background=False)
    assert native.stop_recording_background() == []
