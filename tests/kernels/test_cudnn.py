"""cuDNN's attention as custom calls: they are those of JAX, and those that JAX refuses."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import cudnn
from kernels_pallas.implementations import trace_for_device

B, S, H, G = 2, 256, 8, 2


def operands(d: int, e: int, keys: int = S) -> tuple[jax.ShapeDtypeStruct, ...]:
    """(q, k, v, gradient of the output)."""
    sizes = ((S, H, d), (keys, G, d), (keys, G, e), (S, H, e))
    return tuple(jax.ShapeDtypeStruct((B, *size), jnp.bfloat16) for size in sizes)


def custom_calls(
    function: Any, d: int, e: int, keys: int = S
) -> list[tuple[str, dict[str, Any], str]]:
    """[(target, description for XLA, all else)] of a function's custom calls, lowered for a GPU."""
    lowered = jax.jit(function).trace(*operands(d, e, keys)).lower(lowering_platforms=("cuda",))
    found = []
    for line in lowered.as_text().splitlines():
        if match := re.search(
            r"custom_call @(__cudnn\S+?)\((.*?)\) .*backend_config = \"(.*?)\", ", line
        ):
            target, _, config = match.groups()
            description = json.loads(config.replace("\\22", '"'))
            found.append((target, description["cudnn_fmha_backend_config"], line.split('", ')[-1]))
    return found


def with_gradients(window: int | None, causal: bool = True) -> Any:
    def run(q: Any, k: Any, v: Any, do: Any) -> Any:
        options: dict[str, Any] = {"scale": 0.125, "window": window, "causal": causal}
        results = cudnn.attention(q, k, v, **options)
        return *results, cudnn.attention_gradient((q, k, v), results, do, **options)

    return run


def said(of_jax: Any, ours: Any) -> Any:
    """What JAX says of the fields that jmoe sets too; a field that only JAX sets is a default."""
    if not isinstance(ours, dict):
        return of_jax
    for name in of_jax.keys() - ours.keys():
        unset = (
            name == "seed" or not of_jax[name] or of_jax[name] == "0" or "INVALID" in of_jax[name]
        )
        assert unset, name
    return {name: said(of_jax[name], ours[name]) for name in ours}


@pytest.mark.parametrize(
    ("window", "causal", "keys"), [(None, True, S), (128, True, S), (None, False, 2 * S)]
)
def test_calls_are_those_of_jax(
    window: int | None, causal: bool, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Targets, operands, layouts and every field of the description; without a mask there may be
    more keys than queries.
    """
    from jax._src.cudnn import fused_attention_stablehlo as of_jax

    monkeypatch.setattr(of_jax, "check_cudnn_version", lambda: 91000)  # no cuDNN is needed to lower

    def by_jax(q: Any, k: Any, v: Any, do: Any) -> Any:
        attend = lambda *x: jax.nn.dot_product_attention(  # noqa: E731
            *x,
            scale=0.125,
            is_causal=causal,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )
        o, vjp = jax.vjp(attend, q, k, v)
        return o, vjp(do)

    functions = with_gradients(window, causal), by_jax
    ours, theirs = (custom_calls(f, 64, 64, keys) for f in functions)
    assert [call[0] for call in ours] == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    for (target, config, rest), (same_target, of_them, same_rest) in zip(ours, theirs, strict=True):
        assert (target, rest) == (same_target, same_rest)
        assert said(of_them, config) == config


def test_values_smaller_than_keys() -> None:
    """DeepSeek's heads, which `jax.nn.dot_product_attention` refuses."""
    forward, backward = custom_calls(with_gradients(None), 192, 128)
    assert f"tensor<{B}x{H}x{S}x128xbf16>" in forward[2]
    assert f"tensor<{B}x{G}x{S}x192xbf16>, tensor<{B}x{G}x{S}x128xbf16>" in backward[2]


def test_under_vmap() -> None:
    """One call after another: cuDNN's kernel has no further batch dimension."""
    run = jax.vmap(lambda q, k, v: cudnn.attention(q, k, v, scale=1.0, window=None)[0])
    q, k, v, _ = (jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in operands(64, 64))
    assert jax.eval_shape(run, q, k, v).shape == q.shape


@pytest.mark.parametrize(
    ("dims", "capability", "supported"),
    [
        ((64, 64), "8.0", True),
        ((128, 128), "12.0", True),
        ((256, 256), "9.0", True),
        ((256, 256), "8.9", False),
        ((256, 256), "10.0", False),
        ((192, 128), "9.0", True),
        ((192, 128), "10.0", True),
        ((192, 128), "12.0", False),
        ((192, 64), "9.0", False),
        ((60, 60), "9.0", False),
        ((64, 64), "7.5", False),
    ],
)
def test_head_sizes_by_gpu(dims: tuple[int, int], capability: str, supported: bool) -> None:
    q, k, v, _ = operands(*dims)
    device: Any = SimpleNamespace(platform="gpu", compute_capability=capability)
    with trace_for_device(device):
        if supported:
            cudnn.check_attention_supported(q, k, v)  # type: ignore[arg-type]
        else:
            with pytest.raises(NotImplementedError, match=r"heads of|below 8\.0"):
                cudnn.check_attention_supported(q, k, v)  # type: ignore[arg-type]
