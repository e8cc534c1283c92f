"""Measure tokens a second of decoding on several devices (MoESys, Table 6).

    sudo python benchmarks/paper/moesys_table6.py               1, 2 and 4 processes, and 2 nodes
    python benchmarks/paper/moesys_table6.py --places 1 2       without a link
    python benchmarks/paper/moesys_table6.py --quick            a smoke test
    python benchmarks/paper/moesys_table6.py --one-device
        the paper's ratio on one device, nothing is run

A place is a number of processes, each a device with one core of this machine, or PROCESSES:MBIT, on
two nodes with a link between them, whose rate is that of both directions together. More processes
than cores share them: tokens a second and core are comparable then, those of a device are not. `1+`
is one process with every core.

same: one model and as many sequences everywhere, dealt out to the devices. grown: 8 experts and 8
sequences for each device, as the paper's models grow with their GPUs. A step gives every sequence a
token. compared_to_one: tokens a second of all devices to those of one process with one core.
link_ms: what the link alone takes for a step's bytes.
The paper (Table 6; A100s, against DeepSpeed) has 10.0, 106.5 and 209.6 billion parameters on 1, 8
and 16 GPUs, and is 5.8 to 13 % faster.

--one-device: decoding in bfloat16 against transformers, of the committed result of
`benchmarks/peers/transformers_decoding.py`, beside the paper's 1.058 to 1.13. DeepSpeed's inference
does not run here: its operators, kernel injection and MoE layers alike, are CUDA extensions, of
which there are none for a CPU.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import RESULTS
from benchmarks.lib import report
from benchmarks.lib.engine_ranks import EngineRank, pin_to_one_core, run_rank
from benchmarks.lib.linked_nodes import sent_bytes
from benchmarks.lib.ranks import add_rank_options, run_ranks
from benchmarks.lib.report import JsonObject
from benchmarks.lib.skewed_model import write_skewed_checkpoint, zipf_shares
from jmoe.config.engine import EngineConfig, EngineMesh

if TYPE_CHECKING:
    from jmoe.inference.engine import Engine

ALL_CORES = "1+"
PLACES, QUICK_PLACES = ("1", ALL_CORES, "2", "4", "2:200"), ("1", "2")
A_DEVICE = {"experts": 8, "sequences": 8}
SAME = {"experts": 16, "sequences": 16}
QUICK = {"experts": 4, "sequences": 4}
PAPER = [
    {"gpus": 1, "parameters_billions": 10.0},
    {"gpus": 8, "parameters_billions": 106.5},
    {"gpus": 16, "parameters_billions": 209.6},
]
PEER = RESULTS / "decoding_cpu.json"
PAPER_RATIOS = (1.058, 1.13)  # of tokens/s to DeepSpeed's, the least and the largest
MODEL = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}
SIZES = {"layers": 4, "prompt_tokens": 32, "new_tokens": 32}
QUICK_MODEL = MODEL | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
QUICK_SIZES = {"layers": 1, "prompt_tokens": 8, "new_tokens": 8}


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--places", nargs="+", help=f"PROCESSES[:MBIT]; default: {' '.join(PLACES)}"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="a small model and one round: is all there?"
    )
    parser.add_argument(
        "--one-device", action="store_true", help="against transformers, of the committed result"
    )
    parser.add_argument("--folder", type=Path, help="keep models and compiled programs here")
    add_rank_options(parser)
    a = parser.parse_args()
    a.places = a.places or (QUICK_PLACES if a.quick else PLACES)
    if a.quick:
        a.rounds = 1
    return a


def processes_and_rate(place: str) -> tuple[int, float]:
    count, _, rate = place.rstrip("+").partition(":")
    return int(count), float(rate or 0)


def name_of(experts: int) -> str:
    return f"experts-{experts}"


def engines(devices: int, sizes: dict[str, int]) -> dict[str, tuple[str, EngineConfig]]:
    """Return the models and configurations for this number of devices."""

    def one(experts: int, sequences: int) -> tuple[str, EngineConfig]:
        length = sizes["prompt_tokens"] + sizes["new_tokens"] + 1
        mesh = EngineMesh(devices) if devices > 1 else EngineMesh()
        chunk = sizes["prompt_tokens"]
        options: dict[str, Any] = {
            "max_batch": sequences,
            "prefill_chunk_tokens": chunk,
            "policy": "resident",
        }
        options["native"] = "off"  # as it is on several devices: like is compared with like
        return name_of(experts), EngineConfig(max_seq_len=length, mesh=mesh, **options)

    grown = {name: devices * count for name, count in A_DEVICE.items()}
    return (
        {"same": one(**QUICK)}
        if sizes == QUICK_SIZES
        else {"same": one(**SAME), "grown": one(**grown)}
    )


class Decoding:
    """An engine and the seconds of its decode steps."""

    def __init__(self, engine: "Engine", sizes: dict[str, int], rate: float) -> None:
        self.engine, self._sizes, self._rate = engine, sizes, rate
        self.step_s: list[float] = []
        self.sent: list[float] = []

    def run(self, seed: tuple[int, ...]) -> None:
        """Prefill a whole batch; time the steps in which every sequence gets a token."""
        from jmoe.inference.sampling_params import SamplingParams

        engine, batch = self.engine, self.engine.max_batch
        shape = batch, self._sizes["prompt_tokens"]
        sampling = SamplingParams(max_new_tokens=self._sizes["new_tokens"], ignore_eos=True)
        for prompt in (
            np.random.default_rng(seed).integers(1, engine.config.vocab_size, shape).tolist()
        ):
            engine.add_request(prompt, sampling)
        while len(engine.step()) < batch:
            pass
        engine.reset_stats()
        sent, seconds = self._sent_bytes(), list[float]()
        while engine.has_unfinished:
            begun = time.perf_counter()
            if len(engine.step()) == batch:
                seconds.append(time.perf_counter() - begun)
        self.step_s.append(report.median(seconds, 6))
        self.sent.append((self._sent_bytes() - sent) / engine.stats().steps)

    def row(self, place: str, model: str) -> JsonObject:
        """Return the figures of this engine."""
        devices, rate = processes_and_rate(place)
        cores = min(os.cpu_count() or 1, devices) if place != ALL_CORES else os.cpu_count() or 1
        stats, step_s = self.engine.stats(), report.median(self.step_s, 6)
        tokens_per_s = self.engine.max_batch / step_s
        sent = report.median(self.sent)
        return {
            "place": place,
            "model": model,
            "devices": devices,
            "mbit_per_s": rate,
            "experts": self.engine.config.num_experts,
            "sequences": self.engine.max_batch,
            "tokens_per_s": round(tokens_per_s, 1),
            "tokens_per_s_a_device": round(tokens_per_s / devices, 1),
            "tokens_per_s_a_core": round(tokens_per_s / cores, 1),
            "step_ms": round(1e3 * step_s, 3),
            "expert_mbytes_a_device": round(stats.device_expert_bytes / 1e6, 1),
            "sent_bytes_a_step": round(sent),
            "link_ms": round(sent * 8e-3 / rate, 3) if rate else 0.0,
            "readback_ms": round(1e3 * stats.readback_s / max(1, stats.steps), 3),
            "all_step_ms": [round(1e3 * s, 3) for s in self.step_s],
        }

    def _sent_bytes(self) -> int:
        """Return the bytes that both nodes have sent, twice those of one."""
        return 2 * sent_bytes() if self._rate else 0


def one_device() -> list[JsonObject]:
    """Return bfloat16 decoding rates on one device over transformers', by model and sequences."""
    peers = [row for row in json.loads(PEER.read_text())["rows"] if row["dtype"] == "bfloat16"]
    sequences = {"one": 1, "eight": 8}
    return [
        {
            "model": row["model"],
            "sequences": count,
            **{name: row[size][name] for name in ("jmoe", "transformers", "ratio")},
        }
        for row in peers
        for size, count in sequences.items()
    ]


def measure(a: argparse.Namespace, sizes: dict[str, int], found: JsonObject) -> list[JsonObject]:
    """Return a row for each model on one set of devices."""
    place = a.places[0]
    decodings = {
        name: Decoding(engine, sizes, processes_and_rate(place)[1])
        for name, engine in found.items()
    }
    for number in range(a.rounds + 1):
        for decoding in decodings.values():
            decoding.run((a.seed, number))
            if not number:
                decoding.step_s.clear()
                decoding.sent.clear()
    return [report.progress(decoding.row(place, name)) for name, decoding in decodings.items()]


def main() -> None:
    a = parse()
    if a.one_device:
        result = {"benchmark": "decoding on one device (MoESys, Table 6)", "rows": one_device()}
        report.finish(result | {"from": PEER.name, "paper_ratios": PAPER_RATIOS})
        return
    sizes, model = (QUICK_SIZES, QUICK_MODEL) if a.quick else (SIZES, MODEL)
    if a.rank is not None:
        devices, rate = processes_and_rate(a.places[0])
        if a.places[0] != ALL_CORES:
            pin_to_one_core(a.rank)
        load = {
            name: (a.folder / of, config) for name, (of, config) in engines(devices, sizes).items()
        }
        run_rank(
            EngineRank(a.rank, devices, a.port, rate), a.folder, load, partial(measure, a, sizes)
        )
        return
    with tempfile.TemporaryDirectory(prefix="jmoe-table6-") as temporary:
        folder, rows = a.folder or Path(temporary), []
        for place in a.places:
            devices, rate = processes_and_rate(place)
            for experts in (
                {QUICK["experts"]} if a.quick else {SAME["experts"], devices * A_DEVICE["experts"]}
            ):
                if not (folder / name_of(experts)).is_dir():
                    alike = zipf_shares(sizes["layers"], experts, 0.0, a.seed)
                    write_skewed_checkpoint(folder / name_of(experts), alike, a.seed, **model)
            rows += run_ranks(devices, rate, "--places", place, "--folder", str(folder))
    one = {row["model"]: row["tokens_per_s"] for row in rows if row["place"] == "1"}
    for row in rows:
        row["compared_to_one"] = round(row["tokens_per_s"] / one[row["model"]], 3) if one else None
    options = report.options(a, "rank", "port", "folder") | sizes | model
    result = {
        "benchmark": "decoding on several devices (MoESys, Table 6)",
        "options": options,
        "rows": rows,
    }
    report.finish(result | {"paper": PAPER, "versions": report.versions("jax", "jaxlib")})


if __name__ == "__main__":
    main()
