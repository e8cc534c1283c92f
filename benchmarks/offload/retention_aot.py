"""Compile the offloaded training steps that `lib/gpu` times, on a machine without a GPU.

    python benchmarks/offload/retention_aot.py --tokens 8192

With all experts on the device a step is one program; with experts in host memory it is a program
for each part of a layer, run layer by layer, and one that brings an expert up to date. argument and
temporary bytes: of a program by itself. Memory kinds are not modelled: what is in host memory is no
argument.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import argparse
import os
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax
import jax.numpy as jnp

from benchmarks.lib import ahead_of_time, gpu, report
from benchmarks.offload.session import add_model_options, config_of
from jmoe.config import STACKS, TrainConfig
from jmoe.mesh import make_mesh
from jmoe.offload import training_slots
from jmoe.offload.lazy_adamw import WINDOW_STEPS, MissedSteps
from jmoe.offload.slot_arrays import put_record
from jmoe.training.fused.step import FusedTrainer
from jmoe.training.state import without_experts
from jmoe.training.streamed.model import (
    BackwardInputs,
    FinishStepInputs,
    GradAccumulator,
    LayerOptions,
    LayerParams,
    NeighborLayerCollectives,
)
from jmoe.training.streamed.programs import make_step_programs
from jmoe.training.streamed.step import make_text_programs
from jmoe.training.streamed.text import StreamedDecoder


def parse() -> argparse.Namespace:
    """Return the options; the defaults are what `lib/gpu` gives to `offload/training retention`."""
    parser = report.parser(__doc__)
    add_model_options(parser, layers=6)
    parser.add_argument("--tokens", type=int, nargs="+", help="of a step")
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(cache=0.25)
    given = parser.parse_args(gpu.FULL["retention"].split())
    return parser.parse_args(namespace=given)


def on_device(programs: ahead_of_time.Programs, config: TrainConfig, device: jax.Device) -> None:
    """Compile the step that is one program."""
    trainer = FusedTrainer(config, make_mesh((1, 1, 1), [device]))
    shape = (1, config.batch_size, config.sequence_length + 1)
    tokens = programs.abstract_tree(jax.ShapeDtypeStruct(shape, jnp.int32))
    programs.compile("step", trainer.step, programs.abstract_tree(trainer.state_shape), tokens)


def in_host_memory(
    programs: ahead_of_time.Programs, config: TrainConfig, device: jax.Device
) -> None:
    """Compile the programs of a streamed step in their order; all layers run the same ones."""
    model = StreamedDecoder(config, make_mesh((1, 1, 1), [device]))
    parts, text, do = make_step_programs(model), make_text_programs(model), programs.compile
    state = programs.abstract_tree(
        model.sharded.state_shape.map_params_and_moments(without_experts)
    )
    tokens = programs.abstract_tree(
        jax.ShapeDtypeStruct((1, config.batch_size, config.sequence_length + 1), jnp.int32)
    )
    number = programs.abstract_tree(jax.ShapeDtypeStruct((), jnp.int32))
    (tokens_BS,) = do("unstack", text.unstack, tokens)
    part = do("split", text.split, tokens_BS)
    outside, _, _, unsharded_RC = do(
        "unsharded", parts.gather_first_params, state.params, first_kind="moe"
    )
    x_BSD, _ = do("embed", parts.embed, outside, part)
    stacks = {STACKS["moe"]: state.params[STACKS["moe"]]}
    params = LayerParams(stacks[STACKS["moe"]], unsharded_RC, state.router_bias)
    layer, nothing = (
        LayerOptions(number, step=number, accumulation=number),
        NeighborLayerCollectives(),
    )
    options = {"kind": "moe", "train": True, "full_capacity": False, "saves_residuals": True}
    routed, of_route, _ = do("route", parts.route, params, layer, x_BSD, nothing, **options)
    experts = programs.abstract_tree(
        {
            name: jax.ShapeDtypeStruct(w.shape[1:], jnp.float32)
            for name, w in model.modules.experts["moe"].params.items()
        }
    )
    params = params._replace(experts=experts)
    y_BSD, of_experts, _ = do(
        "add_experts",
        parts.apply_experts,
        params,
        routed,
        layer,
        nothing,
        kind="moe",
        saves_residuals=True,
    )
    stats = [[routed.stats]] * config.model.num_moe_layers
    totals = do("totals", parts.routing_totals, stats)
    grads = do("zeros", parts.zero_gradients, stacks, outside)
    scale = state.loss_scale
    loss, dx_BSD, doutside = do(
        "loss_gradients", parts.loss_gradients, outside, y_BSD, part, grads.outside, scale
    )
    kept, choices = (routed, of_route, of_experts), {"topk_idx_TK": routed.topk_idx_TK}
    backward = BackwardInputs(x_BSD, dx_BSD, choices, kept, scale, totals.loss_tokens)
    sums = GradAccumulator(None, grads.outside_buffer["moe"])
    dx_BSD, sums, _, square, _ = do(
        "moe_gradients",
        *(parts.moe_gradients, params, layer, backward, sums, nothing),
        kind="moe",
        full_capacity=False,
        is_last_micro_batch=True,
    )
    doutside = do("embed_gradients", parts.embed_gradients, outside, part, dx_BSD, doutside, [])
    grads = grads._replace(
        outside=doutside, outside_buffer=grads.outside_buffer | {"moe": sums.outside_buffer}
    )
    squares = {"moe": [square] * config.model.num_moe_layers}
    results = FinishStepInputs(grads, squares, [loss], stats, totals)
    do("finish", parts.finish_step, state, results)
    one = programs.abstract_tree(
        {name: jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for name, w in experts.items()}
    )
    do("expert into a slot", put_record, experts, one, number)
    gradient = {
        name: jax.ShapeDtypeStruct(w.shape, config.tiers.gradient_dtype) for name, w in one.items()
    }
    real = programs.abstract_tree(jax.ShapeDtypeStruct((), jnp.float32))
    rates = programs.abstract_tree(jax.ShapeDtypeStruct((WINDOW_STEPS,), jnp.float32))
    missed = MissedSteps(real, number, rates, number, number)
    do(
        "expert brought up to date",
        training_slots._catch_up_row,
        config.optimizer,
        experts,
        number,
        one,
        one,
        programs.abstract_tree(gradient),
        missed,
    )


def main() -> None:
    a = parse()
    if ahead_of_time.skip_without_cuda_libraries():
        return
    (device,) = ahead_of_time.abstract_gpu_devices("h200")
    rows = []
    for tokens in a.tokens:
        a.batch_size = tokens // a.sequence_length
        for where, run in (("device", on_device), ("host", in_host_memory)):
            programs = ahead_of_time.Programs(device)
            run(
                programs,
                config_of(a, Path("records"), experts=where, optimizer=where, gradients="host"),
                device,
            )
            rows += [{"experts": where, "tokens": tokens} | row for row in programs.rows]
    result = {
        "benchmark": "training with experts off the device, compiled ahead of time for an H200",
        "rows": rows,
    }
    report.finish(result | {"versions": report.versions("jax", "jaxlib")})


if __name__ == "__main__":
    main()
