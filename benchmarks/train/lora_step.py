"""Time fine-tuning steps over a model's folder on this machine.

    python benchmarks/train/lora_step.py --model DIR
    python benchmarks/train/lora_step.py --model DIR --train all

--train adapters: the model is frozen, and adapters of --rank are on attention and every expert, as
`--lora.rank` has them. all: all parameters are trained. The same batch of random tokens is trained
on at every step. tokens_per_s is the median over the steps after the warm-up. Prints one JSON
object as its last line.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import resource
import time
from pathlib import Path

import numpy as np

from benchmarks.lib import report


def main() -> None:
    """Train the steps and print their speed."""
    import jax
    import jax.numpy as jnp

    from jmoe.config import LoraConfig, OptimizerConfig, TrainConfig
    from jmoe.mesh import make_mesh
    from jmoe.training.finetune import load_pretrained_state, with_pretrained_model
    from jmoe.training.fused.adapting import AdapterTrainer
    from jmoe.training.trainer import make_trainer

    parser = report.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--train", choices=("adapters", "all"), default="adapters")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    a = parser.parse_args()
    lora = LoraConfig()
    if a.train == "adapters":
        lora = LoraConfig(a.rank, 2.0 * a.rank, targets=("attention", "experts"))
    adamw = OptimizerConfig(1e-4, "constant", warmup_steps=0, beta2=0.999, weight_decay=0.0)
    config = with_pretrained_model(
        TrainConfig(
            init_from=str(a.model),
            lora=lora,
            optimizer=adamw,
            num_steps=a.warmup + a.steps,
            batch_size=a.batch,
            sequence_length=a.seq,
            compute_dtype=a.dtype,
        )
    )
    mesh, shape = make_mesh((1, 1, 1), jax.devices()[:1]), (1, a.batch, a.seq + 1)
    if a.train == "adapters":
        trainer = AdapterTrainer(config, mesh)
        state = trainer.init()
    else:
        trainer = make_trainer(config, mesh)
        state = load_pretrained_state(trainer, config)
    ids = np.random.default_rng(0).integers(3, config.model.vocab_size, shape, np.int32)
    batch, seconds, losses = jnp.asarray(ids), [], []
    for step in range(a.warmup + a.steps):
        begun = time.perf_counter()
        state, metrics = trainer.step(state, batch)
        losses.append(float(metrics["loss"]))  # waits for the step
        if step >= a.warmup:
            seconds.append(time.perf_counter() - begun)
    report.finish(
        {
            "system": "jmoe",
            "args": report.options(a, "model"),
            "tokens_per_s": round(a.batch * a.seq / report.median(seconds, 6), 2),
            "seconds": [round(s, 5) for s in seconds],
            "first_loss": round(losses[0], 4),
            "last_loss": round(losses[-1], 4),
            "trained_parameters": sum(x.size for x in jax.tree.leaves(state.params)),
            "peak_rss_bytes": [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024],
            **report.device_and_versions(),
        }
    )


if __name__ == "__main__":
    main()
