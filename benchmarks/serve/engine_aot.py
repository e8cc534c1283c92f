"""Compile the engine programs that `lib/gpu` times, on a machine without a GPU.

    python benchmarks/serve/engine_aot.py

OLMoE's shape in bfloat16, with as many layers and sequences as there. Resident experts, a ring of
layers, experts by choice and the hybrid of these and the CPU run the same programs of a layer over
more or fewer slots. What the CPU computes of a hybrid step is its own, and compiled on it.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import argparse
import os
from collections.abc import Sequence
from typing import NamedTuple

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from benchmarks.lib import ahead_of_time, gpu, report
from benchmarks.lib.published import LAYERS, published_config
from jmoe.config import ModelConfig
from jmoe.inference import layer_programs, popularity, sampler
from jmoe.inference.cached_layers import Arrays, CachePlaces, Hidden
from jmoe.inference.kv_cache import BLOCK, KVCache, empty_caches, table_width
from jmoe.inference.runner_protocol import TokenBatch
from jmoe.layers.slot_experts import ExpertProducts
from jmoe.models.block import Block
from jmoe.models.decoder import Decoder
from jmoe.models.functional import ModuleStructure, split_arrays
from jmoe.models.huggingface import model_config
from jmoe.models.lazy_checkpoint import EmbedAndHead, split_decoder
from jmoe.offload import host_experts, slots
from jmoe.offload.slot_arrays import Arrays as SlotArrays
from jmoe.offload.slot_arrays import put_record

MODEL = "olmoe"
DTYPE = jnp.dtype(jnp.bfloat16)


def options() -> argparse.Namespace:
    """Return the options of the engines that `lib/gpu` times."""
    parser = argparse.ArgumentParser()
    for name in ("prompt", "rounds", "ring-slots"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--batch", type=int, nargs="+")
    return parser.parse_args(f"{gpu.FULL['decode']} {gpu.FULL['ring']}".split())


def modules(config: ModelConfig) -> tuple[EmbedAndHead, Block]:
    """Return the shapes of all weights outside the layers, and of one layer without its experts."""

    def made() -> tuple[EmbedAndHead, Block]:
        decoder = Decoder(config, rngs=nnx.Rngs(0))
        narrow = lambda w: w.astype(DTYPE) if w.dtype == jnp.float32 else w  # noqa: E731
        nnx.update(decoder, jax.tree.map(narrow, nnx.state(decoder)))
        ends, layers = split_decoder(decoder)
        return ends, layers[0]

    found: tuple[EmbedAndHead, Block] = nnx.eval_shape(made)
    return found


class EngineShapes(NamedTuple):
    """Shapes that an engine's programs take, on the device.

    outside, layer, router: (structure, arrays) of the weights outside the layers, of a layer
    without its experts, and of its router. slots: of each policy by name. record: one expert.
    """

    outside: tuple[ModuleStructure, Arrays]
    layer: tuple[ModuleStructure, Arrays]
    router: tuple[ModuleStructure, Arrays]
    caches: Sequence[KVCache]
    slots: dict[str, SlotArrays]
    record: SlotArrays


def shapes_of(
    programs: ahead_of_time.Programs, config: ModelConfig, sizes: argparse.Namespace
) -> EngineShapes:
    """Return the shapes of the engines that `options` describes."""
    ends, block = modules(config)
    assert block.moe is not None
    outside, layer, router = (
        (structure, programs.abstract_tree(arrays))
        for structure, arrays in map(split_arrays, (ends, block, block.moe.router))
    )
    num_blocks = max(sizes.batch) * table_width(2 * sizes.prompt)
    caches = programs.abstract_tree(jax.eval_shape(lambda: empty_caches(config, num_blocks, DTYPE)))
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    every = config.num_moe_layers * config.num_experts
    num_slots = {
        "resident": every,
        "ring": sizes.ring_slots * config.num_experts,
        "experts and hybrid": every // 2,
    }
    record = {
        "w_up": programs.abstract_array(jnp.uint16, hidden, 2 * inner),
        "w_down": programs.abstract_array(jnp.uint16, inner, hidden),
    }
    kept = {
        name: {
            key: programs.abstract_array(jnp.uint16, number, *a.shape) for key, a in record.items()
        }
        for name, number in num_slots.items()
    }
    return EngineShapes(outside, layer, router, caches, kept, record)


def engine_programs(
    programs: ahead_of_time.Programs, config: ModelConfig, sizes: argparse.Namespace
) -> None:
    """Compile steps of a prompt and of every batch, then the programs of some policies alone."""
    shapes = shapes_of(programs, config, sizes)
    for rows, width in ((batch, width) for width in (sizes.prompt, 1) for batch in sizes.batch):
        step_programs(programs, config, shapes, (rows, width), table_width(2 * sizes.prompt))
    for name, arrays in shapes.slots.items():
        what = f"expert into a slot, {name}"
        programs.compile(
            what, put_record, arrays, shapes.record, programs.abstract_array(jnp.int32)
        )


def step_programs(
    programs: ahead_of_time.Programs,
    config: ModelConfig,
    shapes: EngineShapes,
    sizes: tuple[int, int],
    num_blocks: int,
) -> None:
    """Compile the programs of a step.

    sizes: (sequences, tokens of each). num_blocks: of a sequence's table.
    """
    rows, width = sizes
    of, do = programs.abstract_array, programs.compile
    outside, layer, router, caches, kept, _ = shapes
    what, tokens = f"{rows} x {width} tokens", rows * width
    context = layer_programs.context_bucket(1, num_blocks * BLOCK) if width == 1 else None
    batch = TokenBatch(
        of(jnp.int32, tokens), of(jnp.int32, rows, num_blocks), of(jnp.int32, rows, width)
    )
    positions_PC = batch.positions_PC
    x = do(
        f"embedding, {what}", layer_programs.embed, *outside, batch.tokens_T, positions_PC, DTYPE
    )
    variant = layer_programs.LayerProgramOptions(False, context)
    places = CachePlaces(batch.blocks_PW, positions_PC, None)
    inputs = *layer, caches[0], x, places
    x_PCD, _, routed = do(
        f"layer but for experts, {what}", layer_programs.attend_and_route_program, variant, *inputs
    )
    for name, arrays in kept.items():
        table_E = of(jnp.int32, config.num_experts)
        operands = ExpertProducts(config.hidden_act), routed, arrays, table_E
        y_TD = do(f"experts, {name}, {what}", slots.expert_outputs_in_tiles, *operands)
    do(f"next layer's router, {what}", popularity._route_other_layer, *router, routed.h_TD)
    cold_TD = of(jnp.float32, tokens, config.hidden_size)
    do(f"sum with the CPU's part, {what}", host_experts._sum, y_TD, cold_TD)
    x_PCD = do(f"sum, {what}", layer_programs.add_alone, Hidden(x_PCD, y_TD))
    last_P = of(jnp.int32, rows)
    logits_PV = do(f"head, {what}", layer_programs.logits_at_tokens, *outside, x_PCD, last_P, False)
    do(f"draw, {what}", sampler._greedy, logits_PV)
    if width == 1:
        decode_program(programs, config, shapes, batch, context)


def decode_program(
    programs: ahead_of_time.Programs,
    config: ModelConfig,
    shapes: EngineShapes,
    batch: TokenBatch,
    context: int | None,
) -> None:
    """Compile the decode step with all experts resident, which is one program."""
    count = config.num_hidden_layers
    structure, arrays = shapes.layer
    static = layer_programs.LayerGroupOptions(
        (structure,) * count,
        None,
        ExpertProducts(config.hidden_act),
        DTYPE,
        shapes.outside[0],
        True,
        True,
        0,
        context,
    )
    programs.compile(
        f"all layers, resident, {batch.blocks_PW.shape[0]} x 1 tokens",
        layer_programs.apply_layers,
        static,
        (layer_programs.LayerOperands(arrays, None, None),) * count,
        (shapes.caches[0],) * count,
        shapes.outside[1],
        None,
        batch,
        (
            shapes.slots["resident"],
            (programs.abstract_array(jnp.int32, config.num_experts),) * config.num_moe_layers,
        ),
    )


def main() -> None:
    report.parser(__doc__).parse_args()
    if ahead_of_time.skip_without_cuda_libraries():
        return
    (device,) = ahead_of_time.abstract_gpu_devices("h200")
    programs = ahead_of_time.Programs(device)
    engine_programs(programs, model_config(published_config(MODEL, LAYERS[MODEL])), options())
    result = {
        "benchmark": "programs of engines, compiled ahead of time for an H200",
        "model": MODEL,
    }
    result |= {
        "layers": LAYERS[MODEL],
        "rows": programs.rows,
        "versions": report.versions("jax", "jaxlib"),
    }
    report.finish(result)


if __name__ == "__main__":
    main()
