"""Experts' weights in slots, of the CPU and of an accelerator, against matrix products one token
at a time.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.layers.slot_experts import ExpertInputs
from jmoe.offload.slots import DeviceSlots, HostSlots
from kernels_pallas.grouped_mlp.reference import activate


# all tokens through every expert in use, tiles of sorted rows
@pytest.mark.parametrize("num_tokens", [5, 70])
@pytest.mark.parametrize("num_experts", [3, 13])
def test_device_slots_hold_what_is_written(num_tokens: int, num_experts: int) -> None:
    """Slots of an accelerator and those of the CPU give the same result, whatever order experts
    lie in.
    """
    rng = np.random.default_rng(0)
    e, d, f, t, k = num_experts, 8, 6, num_tokens, 2
    fields = {"w_up": ((d, 2 * f), np.dtype(np.float32)), "w_down": ((f, d), np.dtype(np.float32))}
    records = [
        {n: rng.standard_normal(shape).astype(dtype) for n, (shape, dtype) in fields.items()}
        for _ in range(e)
    ]
    places = rng.permutation(e + 1)[:e].astype(np.int32)
    x_TD = rng.standard_normal((t, d)).astype(np.float32)
    # e: no choice
    idx_TK = np.stack([rng.permutation(e + 1)[:k] for _ in range(t)]).astype(np.int32)
    idx_TK[-1] = e
    weights_TK = rng.random((t, k)).astype(np.float32)
    y_TD = rng.standard_normal((t, d)).astype(np.float32)
    expected = y_TD.copy()
    for token, choice in np.argwhere(idx_TK < e):
        r = records[idx_TK[token, choice]]
        h = np.asarray(activate(jnp.asarray(x_TD[token] @ r["w_up"]), "swiglu"))
        expected[token] += weights_TK[token, choice] * (h @ r["w_down"])
    for slots in (HostSlots(e + 1, fields), DeviceSlots(e + 1, fields, jax.devices()[0])):
        for record, place in zip(records, places.tolist(), strict=True):
            slots.write(place, record)
        got = slots.add_expert_outputs(
            ExpertInputs(*map(jnp.asarray, (x_TD, idx_TK, weights_TK, y_TD))), places, "swiglu"
        )
        np.testing.assert_allclose(got, expected, atol=1e-4)
