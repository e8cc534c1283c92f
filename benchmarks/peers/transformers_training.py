"""Train with transformers; run by the Python of its environment.

    ENVIRONMENT/bin/python benchmarks/peers/transformers_training.py \
        --config benchmarks/peers/qwen3moe_64e.json

A step is forward, backward, clipping and AdamW of the model that the configuration describes, on
one batch of random tokens, as `benchmarks/train/step.py --hf-config` trains it. Its bfloat16 has no
float32 masters.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import json

from benchmarks.lib import report
from benchmarks.lib.transformers_runs import (
    add_training_options,
    time_training_steps,
    use_all_cores,
)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--config", required=True, help="config.json of a model")
    parser.add_argument("--lr", type=float, default=1e-4)
    add_training_options(parser, warmup=1)
    a = parser.parse_args()
    use_all_cores()
    import torch
    import transformers

    with open(a.config) as f:
        values = json.load(f)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    kinds = {"dtype": getattr(torch, a.dtype), "attn_implementation": "sdpa"}
    model = transformers.AutoModelForCausalLM.from_config(config, **kinds).train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation(a.experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.lr, foreach=True)
    balanced = {"output_router_logits": True} if hasattr(config, "output_router_logits") else {}
    report.finish(
        {
            "system": "transformers",
            "args": report.options(a),
            **time_training_steps(a, model, model.parameters(), optimizer, **balanced),
            "versions": report.versions("transformers") | {"torch": torch.__version__},
        }
    )


if __name__ == "__main__":
    main()
