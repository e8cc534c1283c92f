"""LoRA training steps with transformers and PEFT; run by the Python of their environment.

    ENVIRONMENT/bin/python benchmarks/peers/peft_training.py --model DIR

A step is forward, backward, clipping and AdamW of the adapters, on one batch of random tokens, as
`benchmarks/train/lora_step.py` trains them: attention's projections as modules, the experts'
matrices as `target_parameters`.
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
    parser.add_argument("--model", required=True, help="folder of a model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument(
        "--experts", default="grouped_mm", help="how it computes experts: grouped_mm or eager"
    )
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    a = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import peft
    import torch
    import transformers

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        a.model, dtype=getattr(torch, a.dtype), attn_implementation="sdpa"
    )
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation(a.experts)
    lora = peft.LoraConfig(
        r=a.rank,
        lora_alpha=2 * a.rank,
        target_modules=[f"self_attn.{part}_proj" for part in "qkvo"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model = peft.get_peft_model(model, lora).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, foreach=True)
    ids = torch.randint(3, model.config.vocab_size, (a.batch, a.seq))
    seconds, losses = [], []
    for step in range(a.warmup + a.steps):
        begun = time.perf_counter()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step >= a.warmup:
            seconds.append(time.perf_counter() - begun)
        losses.append(float(loss.detach()))
    result = {
        "system": "transformers + PEFT",
        "args": {name: value for name, value in vars(a).items() if name != "model"},
        "tokens_per_s": round(ids.numel() / statistics.median(seconds), 2),
        "seconds": [round(s, 5) for s in seconds],
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
        "trained_parameters": sum(p.numel() for p in trained),
        "peak_rss_bytes": [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024],
        "versions": {
            "transformers": transformers.__version__,
            "peft": peft.__version__,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        },
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
