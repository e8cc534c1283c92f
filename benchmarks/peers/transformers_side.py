"""Decode and prefill with transformers; run by the Python of its environment.

    ENVIRONMENT/bin/python benchmarks/peers/transformers_side.py --model DIR --dtype bfloat16

Each way that transformers has of computing experts is tried, and the fastest counts, figure by
figure. Decoding is the bare loop over the model's forward, without `generate` around it. A first
visit of each is not measured.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import statistics
import time

from benchmarks.lib import report
from benchmarks.lib.transformers_runs import use_all_cores

PROMPT = 32


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--experts", nargs="+", default=["grouped_mm", "batched_mm", "eager"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--long-prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    use_all_cores()
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        a.model, dtype=getattr(torch, a.dtype)
    ).eval()

    def drawn(batch: int, length: int) -> torch.Tensor:
        return torch.randint(3, model.config.vocab_size, (batch, length))

    def prefill_s() -> float:
        tokens, begun = drawn(1, a.long_prompt), time.perf_counter()
        model(tokens, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - begun

    def step_s(batch: int) -> float:
        out = model(drawn(batch, PROMPT), use_cache=True, logits_to_keep=1)
        seconds = []
        for _ in range(a.new_tokens):
            token, begun = out.logits[:, -1].argmax(-1, keepdim=True), time.perf_counter()
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            seconds.append(time.perf_counter() - begun)
        return statistics.median(seconds)

    decoded, prefilled = dict.fromkeys(map(str, a.batch), 0.0), 0.0
    with torch.inference_mode():
        for experts in a.experts:
            model.set_experts_implementation(experts)
            for batch in a.batch:
                seconds = [step_s(batch) for _ in range(a.rounds + 1)][1:]
                decoded[str(batch)] = max(decoded[str(batch)], batch / statistics.median(seconds))
            if experts != "batched_mm":  # copies an expert's weights for every token
                seconds = [prefill_s() for _ in range(a.rounds + 1)][1:]
                prefilled = max(prefilled, a.long_prompt / statistics.median(seconds))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    report.finish(
        {
            "decode_tokens_per_s": decoded,
            "long_prefill_tokens_per_s": prefilled,
            "versions": versions,
        }
    )


if __name__ == "__main__":
    main()
