"""Train with transformers; run by the Python of its environment.

    ENVIRONMENT/bin/python benchmarks/peers/transformers_training.py \
        --config benchmarks/peers/qwen3moe_64e.json

A step is forward, backward, clipping and AdamW of the model that the configuration describes, on
one batch of random tokens, as `benchmarks/train/step.py --hf-config` trains it. Its bfloat16 has no
float32 masters.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="config.json of a model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument(
        "--experts", default="grouped_mm", help="how it computes experts: grouped_mm or eager"
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    a = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    with open(a.config) as f:
        values = json.load(f)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    kinds = {"dtype": getattr(torch, a.dtype), "attn_implementation": "sdpa"}
    model = transformers.AutoModelForCausalLM.from_config(config, **kinds).train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation(a.experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.lr, foreach=True)
    ids = torch.randint(3, config.vocab_size, (a.batch, a.seq))
    balanced = {"output_router_logits": True} if hasattr(config, "output_router_logits") else {}
    seconds, losses = [], []
    for step in range(a.warmup + a.steps):
        begun = time.perf_counter()
        loss = model(ids, labels=ids, use_cache=False, **balanced).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step >= a.warmup:
            seconds.append(time.perf_counter() - begun)
        losses.append(float(loss.detach()))
    result = {
        "system": "transformers",
        "args": vars(a),
        "tokens_per_s": round(ids.numel() / statistics.median(seconds), 2),
        "seconds": [round(s, 5) for s in seconds],
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
        "peak_rss_bytes": [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024],
        "versions": {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        },
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
