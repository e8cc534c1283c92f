"""LoRA over experts in host memory or on NVMe: against the same run with them on the device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import LoraConfig, TiersConfig
from jmoe.models.lora import AdapterApplier
from jmoe.offload.slot_arrays import Arrays
from jmoe.training.frozen_experts import MATRICES, open_frozen_experts, stored_shapes
from jmoe.training.fused.adapting import ADAPTERS, STORED, AdaptedDecoder, AdapterTrainer
from jmoe.training.streamed.adapting import StreamedAdapterTrainer
from tests.model_configs import mesh_of
from tests.training.test_frozen_experts import (
    BASE,
    LORA,
    SMALL,
    config_of,
    small_base,
    train,
)

COMPRESSED = dataclasses.replace(LORA, expert_dtype="mxfp4")


def streamed(base: Path, lora: LoraConfig, tier: str, folder: Path, **options: Any):  # type: ignore[no-untyped-def]
    place = {"path": str(folder)} if tier == "nvme" else {}
    tiers = TiersConfig(experts=tier, optimizer=tier, **place)  # type: ignore[arg-type]
    return StreamedAdapterTrainer(config_of(base, lora, tiers=tiers, **options), mesh_of(1, 1, 1))


def assert_equal(one: Any, other: Any) -> None:
    for own, its in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_array_equal(own, its)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "tiers"),
    [
        ("small", "float32", ["nvme"]),
        ("small", "float32", ["host"]),
        ("small", "bfloat16", ["host", "nvme"]),
        ("gpt_oss", "float32", ["host", "nvme"]),
    ],
)
def test_streamed_experts_train_as_on_the_device(
    name: str, dtype: str, tiers: list[str], tmp_path: Path
) -> None:
    """Losses, adapters, moments and the held-out loss agree bit for bit."""
    base = BASE if name == "gpt_oss" else small_base(tmp_path / "base")
    options: Any = {"compute_dtype": dtype, "native": "off", "gradient_accumulation_steps": 2}
    on_device = AdapterTrainer(config_of(base, COMPRESSED, **options), mesh_of(1, 1, 1))
    state, losses = train(on_device)
    tokens = jnp.asarray(np.random.default_rng(9).integers(0, 64, (2, 17), np.int32))
    batch = tokens, jnp.ones((2, 16), jnp.float32)
    held_out = [float(x) for x in on_device.evaluate_batches(state, [batch])]
    logits = on_device.next_logits(state, tokens[:, :-1], jnp.int32(3))
    for tier in tiers:
        with_tier = streamed(base, COMPRESSED, tier, tmp_path, **options)
        own, own_losses = train(with_tier)
        assert own_losses == losses
        assert STORED not in own.frozen
        stored = state.frozen[STORED]["moe_layers"]["experts"]
        of_layer = sum(w.nbytes for w in stored.values()) // SMALL.num_hidden_layers
        assert with_tier.ring.num_bytes == with_tier.config.tiers.device_layers * of_layer
        for part in ("params", "m", "v"):
            assert_equal(getattr(own, part), getattr(state, part))
        assert [float(x) for x in with_tier.evaluate_batches(own, [batch])] == held_out
        assert_equal(with_tier.next_logits(own, tokens[:, :-1], jnp.int32(3)), logits)
        with_tier.close()


def test_a_layer_is_decoded_into_the_memory_of_the_one_before(tmp_path: Path) -> None:
    """Once forwards and once backwards, for all micro-batches together."""
    base = small_base(tmp_path / "base")
    options: Any = {"native": "off", "gradient_accumulation_steps": 2}
    trainer = streamed(base, COMPRESSED, "host", tmp_path, **options)
    decode, seen = trainer._decode, []

    def noted(stored: Arrays, memory: Arrays) -> Arrays:
        seen.append([memory[name].unsafe_buffer_pointer() for name in MATRICES])
        decoded: Arrays = decode(stored, memory)
        assert [decoded[name].unsafe_buffer_pointer() for name in MATRICES] == seen[0]
        return decoded

    trainer._decode = noted
    train(trainer, 1)
    trainer.close()
    assert seen == [seen[0]] * (2 * SMALL.num_hidden_layers)


class _StoredDecoder(AdaptedDecoder):
    """Keeps wide experts as they are stored, beside which their adapters' products are added."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.keeps_stored = True
        summed = [p for p in self.adapted if not p.experts]
        self._applied = AdapterApplier.make(summed, self.config.lora.scale)
        with open_frozen_experts(self.config) as checkpoint:
            shapes = stored_shapes(checkpoint.expert_fields, self.config)
        self._stored_shapes = {STORED: shapes}


class _StoredTrainer(AdapterTrainer):
    decoder = _StoredDecoder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "loss_tolerance", "tolerance"), [("float32", 1e-5, 1e-5), ("bfloat16", 2e-3, 0.02)]
)
def test_wide_experts_train_as_on_the_device(
    dtype: str, loss_tolerance: float, tolerance: float, tmp_path: Path
) -> None:
    """Bit for bit as the same form on the device. Its own form there, W + scale x A B rounded to
    the compute dtype, differs by this rounding: in bfloat16 an update of AdamW (0.01) may go the
    other way where a gradient is nearly 0.
    """
    base = small_base(tmp_path / "base")
    options: Any = {"compute_dtype": dtype, "native": "off", "gradient_accumulation_steps": 2}
    with_tier = streamed(base, LORA, "nvme", tmp_path, **options)
    own, own_losses = train(with_tier)
    with_tier.close()
    config = config_of(base, LORA, **options)
    state, losses = train(_StoredTrainer(config, mesh_of(1, 1, 1)))
    assert STORED in state.frozen and own_losses == losses
    for part in ("params", "m", "v"):
        assert_equal(getattr(own, part), getattr(state, part))
    state, losses = train(AdapterTrainer(config, mesh_of(1, 1, 1)))
    assert STORED not in state.frozen
    np.testing.assert_allclose(own_losses, losses, atol=loss_tolerance, rtol=0)
    trees = own.params[ADAPTERS], state.params[ADAPTERS]
    for one, other in zip(*map(jax.tree.leaves, trees), strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=0)
        assert np.abs(one - other).mean() < tolerance / 10
