"""The table of layers, for the pattern of each model family."""

import dataclasses

import pytest
from flax import nnx

from jmoe.config import STACKS, ModelConfig, RouterConfig, VisionModelConfig
from jmoe.config.layers import Layer
from jmoe.config.model import NO_WINDOW
from jmoe.models.decoder import Decoder
from jmoe.models.huggingface import model_config
from jmoe.models.pretrained import read_config
from tests.model_configs import CHECKPOINTS

SMALL = ModelConfig(hidden_size=8, num_attention_heads=2, num_key_value_heads=2, num_experts=2)
IMAGES = VisionModelConfig(
    num_hidden_layers=5,
    num_experts=2,
    position="learned",
    mlp_only_layers=(0, 4),
    task_layers=(1, 3),
    router=RouterConfig(aux_loss_coef=0),
)


def described(layers: tuple[Layer, ...]) -> str:
    """Return kind, number in its stack and record of each layer, with its window if it has one."""
    rows = [f"{layer.kind[0]}{layer.number}/{layer.record}" for layer in layers]
    windows = ["" if layer.window is None else f":{layer.window}" for layer in layers]
    return " ".join(row + window for row, window in zip(rows, windows, strict=True))


TABLES = {
    "experts in all (Mixtral)": ({}, "m0/0 m1/1 m2/2 m3/3"),
    "dense first (DeepSeek)": ({"first_k_dense_replace": 2}, "d0/0 d1/0 m0/0 m1/1"),
    "every second (Qwen2-MoE)": ({"decoder_sparse_step": 2}, "d0/0 m0/0 d1/1 m1/1"),
    "named dense (Qwen3-MoE)": ({"mlp_only_layers": (1, 2)}, "m0/0 d0/1 d1/1 m1/1"),
    "one window for all": ({"sliding_window": 8}, "m0/0:8 m1/1:8 m2/2:8 m3/3:8"),
    "windows in turn (gpt-oss)": (
        {"sliding_window": 8, "layer_types": ("sliding_attention", "full_attention") * 2},
        f"m0/0:8 m1/1:{NO_WINDOW} m2/2:8 m3/3:{NO_WINDOW}",
    ),
    "no experts": ({"num_experts": 0}, "d0/0 d1/0 d2/0 d3/0"),
}


@pytest.mark.parametrize(("fields", "table"), TABLES.values(), ids=TABLES)
def test_table_of_a_decoder(fields: dict[str, object], table: str) -> None:
    config = dataclasses.replace(SMALL, **fields)  # type: ignore[arg-type]
    assert described(config.layers) == table
    assert len(config.expert_layers) == config.num_moe_layers


def test_table_of_image_tasks() -> None:
    """Layers by token and by task have stacks of their own, and one numbering of records."""
    assert described(IMAGES.layers) == "d0/0 t0/0 m0/1 t1/2 d1/3"
    assert [layer.stack_name for layer in IMAGES.expert_layers] == [
        "task_layers",
        "moe_layers",
        "task_layers",
    ]
    assert [layer.record for layer in IMAGES.expert_layers] == [0, 1, 2]


@pytest.mark.parametrize("family", sorted(path.name for path in CHECKPOINTS.iterdir()))
def test_every_entry_of_a_stack_is_one_layer(family: str) -> None:
    """The table numbers each entry of the decoder's stacks once, and in order."""
    config = model_config(read_config(CHECKPOINTS / family))
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    for kind, stack in STACKS.items():
        numbers = [layer.number for layer in config.layers if layer.kind == kind]
        module = getattr(decoder, stack, None)
        size = 0 if module is None else module.attention_norm.scale.shape[0]
        assert numbers == list(range(size))
