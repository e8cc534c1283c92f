"""Decode with accelerate, weights on disk; run by the Python of its environment.

    ENVIRONMENT/bin/python benchmarks/peers/accelerate_decoding.py --model DIR --memory-mb 400

The way that accelerate documents: transformers loads a Hugging Face folder with
`device_map="auto"`, a `max_memory` for the CPU and an `offload_folder`. Accelerate fills that
memory with the first parts of the model, but for the room of the largest layer (bytes_in_memory:
what it kept; with 0 MB nothing), and maps the rest from files anew in every step. The experts of a
layer it writes to a temporary folder first, stacked: as many bytes as they have. Each round begins
with the files dropped from the page cache and is a prompt, not measured, and --new-tokens steps of
one sequence, greedy or along a text: the bare loop over the model's forward.
disk_read_bytes_per_token has what the kernel reads ahead, too. Under a memory limit that counts the
page cache: `oversized.py --accelerate` of this folder.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import argparse
import json
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib import report
from benchmarks.lib.page_cache import disk_read_bytes, evict_from_page_cache
from benchmarks.lib.report import JsonObject

SHOWN = 16  # tokens in the result


def options() -> argparse.ArgumentParser:
    parser = report.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--memory-mb", type=int, default=0, help="of weights that may stay in memory, in 10^6 bytes"
    )
    parser.add_argument(
        "--offload-folder",
        type=Path,
        help="where the temporary folder is made; default: beside DIR",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument(
        "--experts",
        choices=("grouped_mm", "batched_mm", "eager"),
        help="how it computes them; default: as it chooses",
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--prompt", type=int, default=8, help="tokens of a random prompt, or of the prompt in --ids"
    )
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--prompt-ids", type=int, nargs="+", metavar="ID", help="the prompt")
    given.add_argument(
        "--ids",
        type=Path,
        help="JSON list of a text's tokens: the prompt, then what is fed in place of what is drawn",
    )
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=1)
    return parser


def vocab_size_of(a: argparse.Namespace) -> int:
    """Return the model's vocabulary size; `ValueError` if the folder is not a model."""
    try:
        config: Any = json.loads((a.model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {a.model}: config.json cannot be read: {error}") from None
    size = config.get("text_config", config).get("vocab_size") if isinstance(config, dict) else None
    if not isinstance(size, int) or size < 1:
        raise ValueError(
            f"--model {a.model}: config.json: vocab_size = {size!r}: must be at least 1"
        )
    if not any(a.model.glob("*.safetensors")):
        raise ValueError(f"--model {a.model}: has no .safetensors files")
    if a.offload_folder is not None and not a.offload_folder.is_dir():
        raise ValueError(f"--offload-folder {a.offload_folder}: is not a folder")
    return size


def prompt_and_text(a: argparse.Namespace, vocab_size: int) -> tuple[list[int], list[int]]:
    """Return the prompt and the text after it, [] if the model continues by itself.

    `ValueError` for bad ids.
    """
    if a.ids is not None:
        try:
            ids = json.loads(a.ids.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"--ids {a.ids}: cannot be read: {error}") from None
        needed = a.prompt + a.new_tokens
        if not isinstance(ids, list) or len(ids) < needed:
            raise ValueError(
                f"--ids {a.ids}: must be a list of --prompt + --new-tokens = {needed} ids"
            )
        ids = ids[:needed]
    else:
        drawn = random.Random(0)
        ids = a.prompt_ids or [drawn.randrange(vocab_size) for _ in range(a.prompt)]
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ValueError(
                f"token {token!r}: must be an id below the model's vocab_size = {vocab_size}"
            )
    return (ids[: a.prompt], ids[a.prompt :]) if a.ids is not None else (ids, [])


def decode(
    model: Any, prompt: Sequence[int], text: Sequence[int], steps: int
) -> tuple[list[int], JsonObject]:
    """Return the model's tokens, the first after the prompt, and the figures of the steps."""
    import torch

    out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    tokens, seconds, read_bytes = [int(out.logits[0, -1].argmax())], [], disk_read_bytes()
    for step in range(steps):
        token, begun = torch.tensor([[text[step] if text else tokens[-1]]]), time.perf_counter()
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        tokens.append(int(out.logits[0, -1].argmax()))
        seconds.append(time.perf_counter() - begun)
    figures = {
        "tokens_per_s": round(steps / sum(seconds), 3),
        "median_step_tokens_per_s": round(1 / statistics.median(seconds), 3),
        "disk_read_bytes_per_token": round((disk_read_bytes() - read_bytes) / steps),
        "seconds": [round(s, 4) for s in seconds],
    }
    return tokens, figures


def main() -> None:
    parser = options()
    a = parser.parse_args()
    for name, least in (
        ("memory_mb", 0),
        ("threads", 1),
        ("prompt", 1),
        ("new_tokens", 1),
        ("rounds", 1),
    ):
        if getattr(a, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(a, name)}: must be at least {least}")
    try:
        prompt, text = prompt_and_text(a, vocab_size_of(a))
    except ValueError as error:
        parser.error(str(error))
    os.environ["OMP_NUM_THREADS"] = str(a.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import accelerate  # noqa: F401
        import torch
        import transformers
    except ImportError as error:
        parser.error(
            f"{error}: run this by the Python of an environment that `setup.py transformers` has "
            f"made"
        )
    torch.set_num_threads(a.threads)
    beside = a.offload_folder or a.model.resolve().parent
    rounds = []
    with (
        tempfile.TemporaryDirectory(prefix="accelerate-", dir=beside) as scratch,
        torch.inference_mode(),
    ):
        begun = time.perf_counter()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            a.model,
            dtype=getattr(torch, a.dtype),
            device_map="auto",
            max_memory={"cpu": a.memory_mb * 10**6},
            offload_folder=scratch,
        ).eval()
        load_s = time.perf_counter() - begun
        if a.experts:
            model.set_experts_implementation(a.experts)
        weights = list(model.parameters())
        for _ in range(a.rounds):
            evict_from_page_cache(a.model)
            evict_from_page_cache(Path(scratch))
            tokens, figures = decode(model, prompt, text, a.new_tokens)
            rounds.append(report.progress(figures))
    result = {
        "tokens_per_s": report.median((one["tokens_per_s"] for one in rounds), 3),
        "bytes_in_memory": sum(weight.nbytes for weight in weights if weight.device.type != "meta"),
        "bytes_of_weights": sum(weight.nbytes for weight in weights),
        "load_s": round(load_s, 2),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "experts": model.config._experts_implementation,
        "prompt_ids": prompt[:SHOWN],
        "tokens": tokens[:SHOWN],
        "rounds": rounds,
        "args": report.options(a),
        "versions": report.versions("accelerate", "safetensors", "torch", "transformers"),
    }
    report.finish(result)


if __name__ == "__main__":
    main()
