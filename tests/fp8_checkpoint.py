"""A checkpoint with matrices in FP8, and the one whose float32 weights are what its values and scales mean."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmoe.models.huggingface import model_config
from jmoe.models.pretrained import abstract_decoder
from jmoe.models.safetensors_io import NewTensor, write_safetensors
from jmoe.models.weights import parameters
from tests.model_configs import CHECKPOINTS

# More than one block of 128 in every direction, the last of them with fewer weights.
SIZES = {"hidden_size": 160, "moe_intermediate_size": 136, "intermediate_size": 136}
QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
WIDE = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "bias")  # what such checkpoints leave as it is


def write_fp8_checkpoint(name: str, fp8: Path, wide: Path) -> None:
    """Write both, with random weights, in the sizes above; name: the fixture with the rest of the configuration."""
    fields = json.loads((CHECKPOINTS / name / "config.json").read_text()) | SIZES
    for folder, more in ((fp8, {"quantization_config": QUANTIZATION}), (wide, {})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(fields | more))
    rng, config = np.random.default_rng(0), model_config(fields)
    kept: list[NewTensor] = []
    widened: list[NewTensor] = []
    for parameter in parameters(abstract_decoder(config)[2], config, name):
        for piece in parameter.pieces():
            if any(word in piece.name for word in WIDE):
                values = rng.normal(1.0 if "norm" in piece.name else 0.0, 0.1, piece.shape).astype(np.float32)
                kept.append(_tensor(piece.name, values))
                widened.append(_tensor(piece.name, values))
                continue
            blocks = tuple(-(-size // 128) for size in piece.shape)
            values = (30 * rng.normal(size=piece.shape)).astype(jnp.float8_e4m3fn)
            scales = rng.uniform(0.002, 0.004, blocks).astype(np.float32)
            kept += [_tensor(piece.name, values), _tensor(piece.name + "_scale_inv", scales)]
            widened.append(_tensor(piece.name, np.concatenate(list(_rows(values, scales)))))
    write_safetensors(fp8, kept, 1 << 30)
    write_safetensors(wide, widened, 1 << 30)


def _rows(values: np.ndarray, scales: np.ndarray) -> Iterator[np.ndarray]:
    """Yield weights [1, columns]: the value times the scale of its block."""
    for row in range(values.shape[0]):
        factors = np.array([scales[row // 128, column // 128] for column in range(values.shape[1])])
        yield (values[row].astype(np.float32) * factors)[None]


def _tensor(name: str, values: np.ndarray) -> NewTensor:
    data: Any = partial(np.asarray, values)
    return NewTensor(name, values.dtype, values.shape, data)
