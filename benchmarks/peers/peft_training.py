"""Fine-tuning steps with transformers and PEFT; run by the Python of their environment.

    ENVIRONMENT/bin/python benchmarks/peers/peft_training.py --model DIR
    ENVIRONMENT/bin/python benchmarks/peers/peft_training.py --model DIR --train all

A step is forward, backward, clipping and AdamW on one batch of random tokens, as
`benchmarks/train/lora_step.py` takes it. --train adapters: attention's projections as modules, the
experts' matrices as `target_parameters`. all: all parameters, by transformers alone.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

from benchmarks.lib import report
from benchmarks.lib.transformers_runs import (
    add_training_options,
    time_training_steps,
    use_all_cores,
)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--model", required=True, help="folder of a model")
    parser.add_argument("--train", choices=("adapters", "all"), default="adapters")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    add_training_options(parser, warmup=2)
    a = parser.parse_args()
    use_all_cores()
    import peft
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        a.model, dtype=getattr(torch, a.dtype), attn_implementation="sdpa"
    )
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation(a.experts)
    if a.train == "adapters":
        lora = peft.LoraConfig(
            r=a.rank,
            lora_alpha=2 * a.rank,
            target_modules=[f"self_attn.{part}_proj" for part in "qkvo"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
        model = peft.get_peft_model(model, lora)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, foreach=True)
    report.finish(
        {
            "system": "transformers + PEFT" if a.train == "adapters" else "transformers",
            "args": report.options(a, "model"),
            **time_training_steps(a, model, trained, optimizer),
            "trained_parameters": sum(p.numel() for p in trained),
            "versions": report.versions("transformers", "peft") | {"torch": torch.__version__},
        }
    )


if __name__ == "__main__":
    main()
