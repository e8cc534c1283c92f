"""The parts that programs share which run transformers with the Python of its environment."""

import argparse
import os
import resource
import statistics
import time
from collections.abc import Iterable
from typing import Any

from benchmarks.lib.report import JsonObject


def use_all_cores() -> None:
    """Let torch compute on all of this process's cores, seed it, and keep transformers from looking
    models up online. Must be called before torch is imported.
    """
    threads = len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)


def add_training_options(parser: argparse.ArgumentParser, *, warmup: int) -> None:
    """Add the options of training steps. warmup: the default of --warmup."""
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument(
        "--experts", default="grouped_mm", help="how it computes experts: grouped_mm or eager"
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--warmup", type=int, default=warmup)
    parser.add_argument("--steps", type=int, default=8)


def time_training_steps(
    a: argparse.Namespace, model: Any, parameters: Iterable[Any], optimizer: Any, **options: Any
) -> JsonObject:
    """Return the speed, losses and peak memory of steps on one batch of random tokens: forward,
    backward, clipping and the optimizer's update.

    a: the options of `add_training_options`. options: further arguments of the model.
    """
    import torch

    trained = list(parameters)
    ids = torch.randint(3, model.config.vocab_size, (a.batch, a.seq))
    seconds, losses = [], []
    for step in range(a.warmup + a.steps):
        begun = time.perf_counter()
        loss = model(ids, labels=ids, use_cache=False, **options).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step >= a.warmup:
            seconds.append(time.perf_counter() - begun)
        losses.append(float(loss.detach()))
    return {
        "tokens_per_s": round(ids.numel() / statistics.median(seconds), 2),
        "seconds": [round(s, 5) for s in seconds],
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
        "peak_rss_bytes": [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024],
    }
