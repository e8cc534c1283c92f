"""Train a GPT-MoE with DeepSpeed-MoE; run by the Python of its environment.

    ENVIRONMENT/bin/python benchmarks/peers/deepspeed_training.py --dtype bfloat16 --zero 1
    ENVIRONMENT/bin/python benchmarks/peers/deepspeed_training.py --experts 0 --dtype float32 \
        --zero 3 --offload FOLDER

As many gloo processes as `--processes`, on their shares of the cores. The shape, the tokens and the
optimizer are those of `benchmarks/train/step.py --init torch`; --batch is per process. bfloat16 has
float32 masters (ZeRO-1). --offload: parameters and optimizer are on NVMe in this folder, beside
--buffers buffers of the largest parameter's size in memory.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import sys
import time
from contextlib import nullcontext
from typing import Any


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--ep", type=int, default=2, help="processes that share one set of experts")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8, help="of a layer; 0: dense layers")
    parser.add_argument("--top-k", type=int, default=1, choices=(1, 2))
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--capacity-factor", type=float, default=1.25)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=0)
    parser.add_argument("--intermediate-size", type=int, help="default: four times the hidden size")
    parser.add_argument("--offload", metavar="FOLDER", help="needs --zero 3")
    parser.add_argument("--buffers", type=int, default=16, help="of parameters, in host memory")
    parser.add_argument(
        "--optimizer-buffers", type=int, help="of the optimizer, default: as many as --buffers"
    )
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    a = parser.parse_args()
    if a.offload and a.zero != 3:
        parser.error("--offload: needs --zero 3")
    if a.zero == 3 and a.experts:
        parser.error("--zero 3: needs --experts 0, DeepSpeed-MoE has no ZeRO-3")
    a.intermediate_size = a.intermediate_size or 4 * a.hidden_size
    return a


def build(a: argparse.Namespace) -> Any:
    """Return the model; its forward gives (loss, cross-entropy)."""
    import torch
    from deepspeed.moe.layer import MoE
    from torch import nn
    from torch.nn import functional

    hidden = a.hidden_size

    def mlp() -> nn.Module:
        inner = a.intermediate_size
        return nn.Sequential(nn.Linear(hidden, inner), nn.GELU(), nn.Linear(inner, hidden))

    def feed_forward() -> nn.Module:
        if not a.experts:
            return mlp()
        experts = {
            "num_experts": a.experts,
            "ep_size": a.ep,
            "k": a.top_k,
            "capacity_factor": a.capacity_factor,
        }
        return MoE(hidden, mlp(), **experts)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm, self.feed_forward_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
            self.qkv, self.out, self.feed_forward = (
                nn.Linear(hidden, 3 * hidden),
                nn.Linear(hidden, hidden),
                feed_forward(),
            )

        def forward(self, x: torch.Tensor) -> Any:
            batch, seq, _ = x.shape
            heads = (
                self.qkv(self.attention_norm(x))
                .view(batch, seq, 3, a.heads, -1)
                .permute(2, 0, 3, 1, 4)
            )
            attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, -1))
            y = self.feed_forward(self.feed_forward_norm(x))
            y, balance = y[:2] if a.experts else (y, x.new_zeros(()))
            return x + y, balance

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = (
                nn.Embedding(a.vocab_size, hidden),
                nn.Embedding(a.seq, hidden),
            )
            self.blocks = nn.ModuleList(Block() for _ in range(a.layers))
            self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, a.vocab_size, bias=False)

        def forward(self, ids: torch.Tensor) -> Any:
            x, balance = self.tokens(ids) + self.positions(torch.arange(ids.shape[1])), 0.0
            for block in self.blocks:
                x, of_block = block(x)
                balance = balance + of_block
            logits = self.head(self.norm(x))[:, :-1].flatten(0, 1).float()
            entropy = functional.cross_entropy(logits, ids[:, 1:].flatten())
            return entropy + 0.01 * balance, entropy

    return GPT()


def offloading(a: argparse.Namespace) -> dict[str, Any]:
    """Return ZeRO-3's settings: parameters sharded at rest, on NVMe if there is a folder."""
    largest = a.hidden_size * max(a.intermediate_size, a.vocab_size)
    if not a.offload:
        return {}
    place = {"device": "nvme", "nvme_path": a.offload, "buffer_count": a.buffers}
    of_optimizer = {"buffer_count": a.optimizer_buffers or a.buffers}
    return {
        "offload_param": place | {"buffer_size": largest},
        "offload_optimizer": place | of_optimizer,
    }


def engine(a: argparse.Namespace) -> Any:
    """Return DeepSpeed's engine of the model with AdamW."""
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    config = {
        "train_micro_batch_size_per_gpu": a.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": a.lr, "torch_adam": not a.offload}},
        "zero_optimization": {"stage": a.zero} | (offloading(a) if a.zero == 3 else {}),
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "thread_count": 1, "overlap_events": True},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": a.dtype == "bfloat16"},
        "steps_per_print": 10**9,
    }
    split = {"config_dict_or_path": config | {"train_batch_size": a.batch * a.processes}}
    with deepspeed.zero.Init(**split) if a.zero == 3 else nullcontext():
        model = build(a)
    params: Any = [p for p in model.parameters() if p.requires_grad]
    if a.experts:
        params = split_params_into_different_moe_groups_for_optimizer(
            [{"params": params, "name": "all"}]
        )
    return deepspeed.initialize(model=model, model_parameters=params, config=config)[0]


def worker(rank: int, a: argparse.Namespace, port: int) -> None:
    """Train on this rank; rank 0 prints the job's figures."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // a.processes)
    os.sched_setaffinity(0, {cores[(rank * share + i) % len(cores)] for i in range(share)})
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": a.processes, "LOCAL_SIZE": a.processes}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(share),
    }
    import deepspeed
    import torch

    torch.set_num_threads(share)
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    trained = engine(a)
    ids = torch.randint(
        0, a.vocab_size, (a.batch, a.seq), generator=torch.Generator().manual_seed(rank)
    )
    seconds, losses = [], []
    for step in range(a.warmup + a.steps):
        deepspeed.comm.barrier()
        begun = time.perf_counter()
        loss, entropy = trained(ids)
        trained.backward(loss)
        trained.step()
        deepspeed.comm.barrier()
        if step >= a.warmup:
            seconds.append(time.perf_counter() - begun)
        losses.append(float(entropy.detach()))
    peaks: list[Any] = [None] * a.processes
    torch.distributed.all_gather_object(
        peaks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    if rank == 0:
        tokens = a.processes * a.batch * a.seq
        result = {
            "system": "DeepSpeed-MoE",
            "args": vars(a),
            "tokens_per_s": round(tokens / statistics.median(seconds), 2),
            "seconds": [round(s, 5) for s in seconds],
            "first_loss": round(losses[0], 4),
            "last_loss": round(losses[-1], 4),
            "peak_rss_bytes": peaks,
            "versions": {
                "deepspeed": deepspeed.__version__,
                "torch": torch.__version__,
                "python": sys.version.split()[0],
            },
        }
        print(json.dumps(result), flush=True)
    deepspeed.comm.barrier()
    os._exit(0)  # threads of gloo and DeepSpeed sometimes abort an interpreter that ends in order


def main() -> None:
    a = parse()
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # ninja
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_LOG_LEVEL": "error"}
    import torch.multiprocessing

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(worker, (a, port), nprocs=a.processes)


if __name__ == "__main__":
    main()
