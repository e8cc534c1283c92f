"""The tables and figures of SE-MoE, MoESys and Lina: what shows each here, what they have and what
is measured here.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any

from benchmarks import RESULTS
from benchmarks.lib.report import JsonObject
from benchmarks.paper.simulator import check

Result = JsonObject


@dataclass(frozen=True)
class Place:
    """A table, figure or section of a paper.

    paper_has: its figures, with their machines. ours: a function from the committed `result` to
    ours, in words. command: makes the result, from the repository's root. quick: Python's arguments
    for a smoke test within `limit_s`; None if that needs root, a model or hours. lacking: what was
    not measured here, and why.
    """

    name: str
    paper: str
    place: str
    shows: str
    paper_has: str
    command: str
    result: str | None
    ours: Callable[[Result], str]
    quick: str | None = None
    limit_s: int = 120
    lacking: str = ""

    def committed(self) -> Result | None:
        """Return the committed result."""
        if self.result is None:
            return None
        loaded: Result = json.loads((RESULTS / self.result).read_text())
        return loaded

    def here(self) -> str:
        """Return our figures in words."""
        result = self.committed()
        return "-" if result is None else self.ours(result)


def _first_matching_row(rows: list[Result], **wanted: Any) -> Result:
    return next(
        row for row in rows if all(row.get(name) == value for name, value in wanted.items())
    )


def _orders(result: Result, rate: float, figure: str) -> dict[str, float]:
    return {row["variant"]: row[figure] for row in result["rows"] if row["mbit_per_s"] == rate}


def _shares_text(result: Result) -> str:
    rates = sorted({row["mbit_per_s"] for row in result["rows"]})
    parts = []
    for rate in rates:
        row = _first_matching_row(result["rows"], mbit_per_s=rate, variant="none")
        parts.append(f"{row['all_to_alls_s'] / row['seconds']:.0%} at {rate:g} Mbit/s")
    among, ahead = (
        _first_matching_row(result["ddp"]["rows"], variant=name) for name in ("ready", "fixed")
    )
    return (
        f"the backward pass waits for all-to-alls {', '.join(parts)} of a step's time; among "
        f"all-reduces of dense "
        f"gradients (`ready`) an all-to-all takes "
        f"{among['all_to_all_s'] / ahead['all_to_all_s']:.1f} times as long as "
        f"ahead of them (`fixed`), at {among['mbit_per_s']:g} Mbit/s"
    )


def _step_times_text(result: Result) -> str:
    rates = sorted({row["mbit_per_s"] for row in result["rows"]})
    newest = _first_matching_row(result["layers"]["rows"], variant="chunks")
    slower = [
        row["ratio_to_ready"]
        for row in result["slower_processor"]["rows"]
        if row["variant"] == "chunks"
    ]
    steps = [_orders(result, rate, "ratio_to_ready")["chunks"] for rate in rates] + [
        newest["ratio_to_ready"]
    ]
    sooner = [_orders(result, rate, "ratio_all_to_alls_to_ready")["chunks"] for rate in rates]
    sooner.append(newest["ratio_all_to_alls_to_ready"])
    return (
        f"{min(steps):.2f} to {max(steps):.2f} times, the backward pass has its all-to-alls "
        f"{min(sooner):.1f} to "
        f"{max(sooner):.1f} times sooner; on a slower processor {min(slower):.2f} to "
        f"{max(slower):.2f} times"
    )


def _ablation_text(result: Result) -> str:
    return ", ".join(
        f"{name} {ratio:.2f}" for name, ratio in _orders(result, 200.0, "ratio_to_ready").items()
    )


def _ddp_text(result: Result) -> str:
    rows = [row for row in result["ddp"]["rows"] if row["variant"] != "ready"]
    parts = [
        f"{row['variant']} {row['ratio_to_ready']:.2f} ({row['ratio_all_to_alls_to_ready']:.1f} "
        f"sooner)"
        for row in rows
    ]
    slower = _first_matching_row(result["ddp"]["slower_processor"]["rows"], variant="chunks")[
        "ratio_to_ready"
    ]
    return (
        f"{rows[0]['mbit_per_s']:g} Mbit/s: {', '.join(parts)}; on a slower processor chunks "
        f"{slower:.2f}"
    )


def _gradient_cutting_text(result: Result) -> str:
    rows = result["overhead_of_cutting"]["rows"]
    chunks, whole = (
        mean(_first_matching_row(rows, variant=name)["all_seconds"])
        for name in ("chunks", "priority")
    )
    return (
        f"without a link: a step with chunks takes {chunks / whole:.2f} of one with whole "
        f"ones, on average"
    )


def _partition_sizes_text(result: Result) -> str:
    parts = []
    for name in ("chunk_sweep_50", "chunk_sweep"):
        rows = [row for row in result[name]["rows"] if row["variant"] == "chunks"]
        sizes = ", ".join(
            f"{row['chunk_bytes'] / 1e6:g} MB {row['ratio_to_ready']:.2f}" for row in rows
        )
        parts.append(f"{rows[0]['mbit_per_s']:g} Mbit/s: {sizes}")
    return "; ".join(parts)


def _simulated_text(result: Result) -> str:
    rows = check(result)
    return f"{len(rows)} exchanges, off by {max(abs(row['error']) for row in rows):.1%} at most"


SOURCES = {"ready": "a step of the same session", "no link": "a step without a link"}


def _simulated_steps_text(result: Result) -> str:
    parts = {
        f"orders from {words}": [row for row in result["orders"] if row["compute"] == source]
        for source, words in SOURCES.items()
    }
    parts["four nodes from two"] = result["four_nodes"]
    shown = [
        f"{name} {sum(abs(row['error']) <= 0.1 for row in rows)} of {len(rows)}, off by "
        f"{max(abs(row['error']) for row in rows):.0%} at most"
        for name, rows in parts.items()
    ]
    nodes = max(row["nodes"] for row in result["simulated"])
    steps = [row["simulated_s"] for row in result["simulated"] if row["nodes"] == nodes]
    return (
        f"steps within 10 % of measured ones: {'; '.join(shown)}. {nodes} nodes of two ranks, "
        f"simulated, not measured: "
        f"{min(steps):.1f} to {max(steps):.1f} s a step"
    )


def _many_nodes_text(result: Result) -> str:
    parts = []
    numbers = {row["nodes"] for row in result["rows"]}
    for nodes in (min(numbers), max(numbers)):
        flat, dedup = (
            _first_matching_row(result["rows"], what="exchange", kind=kind, nodes=nodes)
            for kind in ("flat", "dedup")
        )
        part = dedup["across_bytes"] / flat["across_bytes"]
        times = f"{1e3 * dedup['seconds']:.0f} ms (flat {1e3 * flat['seconds']:.0f})"
        parts.append(f"{nodes:,} nodes: dedup sends {part:.2f} of flat's bytes across, {times}")
    return f"simulated, not measured, an exchange of a layer; {'; '.join(parts)}"


def _expert_packing_text(result: Result) -> str:
    parts = []
    for row in (row for row in result["rows"] if row["controller"]):
        same = {name: row[name] for name in ("mbit_per_s", "tokens_per_rank", "intermediate_size")}
        unpacked = _first_matching_row(
            result["rows"], experts_per_device=1, controller=False, **same
        )
        parts.append(
            f"{row['experts_per_device']} a device: a step takes {row['ratio_to_unpacked']:.2f} "
            f"of unpacked, "
            f"{100 * row['off_best']:+.1f} % off the best; efficiency "
            f"{unpacked['pipelining_efficiency']:.1%} to "
            f"{row['pipelining_efficiency']:.1%}, utilisation of processors "
            f"{unpacked['utilisation']:.1%} to "
            f"{row['utilisation']:.1%}"
        )
    return "; ".join(parts)


def _inference_text(result: Result) -> str:
    parts = []
    for name in ("trained", "fixture"):
        rows = result[name]["batches"]
        lina, ideal = (
            _first_matching_row(rows, contestant=contestant)
            for contestant in ("lina, l = 3", "ideal")
        )
        parts.append(
            f"{name}: median {lina['ratio']:.2f}, 95th percentile {lina['ratio_p95']:.2f}, "
        )
        parts[-1] += (
            f"of {ideal['ratio']:.2f} and {ideal['ratio_p95']:.2f} that are possible on two devices"
        )
    simulated = result["fixture"]["simulated"]["rows"][0]
    return "; ".join(parts) + f"; 16 devices, simulated: {simulated['ratio']:.2f}"


def _popularity_spread_text(result: Result) -> str:
    parts = []
    for name in ("trained", "fixture"):
        layers = result[name]["most_over_least_popular"]
        parts.append(
            f"{result[name]['experts']} experts: {min(layers):.1f} to {max(layers):.1f} by layer"
        )
    return "; ".join(parts)


def _planning_time_text(result: Result) -> str:
    took = result["trained"]["overhead_ms"]
    return (
        f"plan {took['plan_16_devices']:.2f} ms for 16 devices, {took['nothing_changes']:.2f} "
        f"ms where nothing changes"
    )


def _path_guesses_text(result: Result) -> str:
    rows = result["text"]["accuracy"]
    return ", ".join(f"{row['estimator']} {row['among_2']:.0%}" for row in rows)


def _exchange_levels_text(result: Result) -> str:
    parts = []
    for nodes, rows in ((2, result["rows"]), (4, result["four_nodes"]["rows"])):
        for row in (
            row for row in rows if row["variant"] == "hierarchical" and row["mbit_per_s"] == 100.0
        ):
            same = {name: row[name] for name in ("experts", "mbit_per_s")}
            flat = _first_matching_row(rows, variant="flat", **same)["parts_s"]["all_to_all"]
            shorter = 1 - row["parts_s"]["all_to_all"] / flat
            parts.append(
                f"{nodes} nodes, top-{row['top_k']} of {row['experts']}: "
                f"{row['ratio_to_flat']:.2f} times end to end, "
                f"all-to-alls {abs(shorter):.0%} {'shorter' if shorter >= 0 else 'longer'}"
            )
    return "; ".join(parts)


def _layer_times_text(result: Result) -> str:
    parts = []
    rows = result["layers"]["rows"]
    for rate in sorted({row["mbit_per_s"] for row in rows}):
        ready, chunks = (
            _first_matching_row(rows, mbit_per_s=rate, variant=name) for name in ("ready", "chunks")
        )
        ways = [
            f"{way} {ready[f'{way}_layer_s'] / chunks[f'{way}_layer_s']:.2f}"
            for way in ("forward", "backward")
        ]
        parts.append(f"{rate:g} Mbit/s: {', '.join(ways)}")
    return "; ".join(parts)


def _embedding_text(result: Result) -> str:
    parts = []
    for row in result["rows"]:
        if row["mbit_per_s"] > 0 and row["embedding"] != "replicated":
            speed, part = 1 / row["ratio_to_replicated"], row["table_part_of_replicated"]
            name = f"hidden {row['hidden_size']}, {row['embedding']}"
            parts.append(f"{name}: {speed:.1f} times as fast with {part:.2f} of the bytes")
    return "; ".join(parts)


def _expert_memory_text(result: Result) -> str:
    room = result["room"]
    slots, device, step = (
        room[f"{name}_against_all"] for name in ("slot_bytes", "device_bytes", "step_s")
    )
    return (
        f"steps of {room['tokens']} tokens choose {room['chosen_share']:.2f} of a layer's "
        f"experts, at most "
        f"{room['most_chosen_share']:.2f}: slots take {slots:.2f} of room for all, the device "
        f"{device:.2f}, a step "
        f"{step:.2f} of the time, with the same losses to the bit"
    )


def _cache_text(result: Result) -> str:
    rows = {row["policy"]: row for row in result["training"]}
    ours, off = rows["lfu"], rows["off"]
    papers = max(
        (row for row in result["training"] if row["policy"].startswith("moesys")),
        key=lambda row: row["hit_rate"],
    )
    moved = (
        (row["read_bytes_a_step"] + row["written_bytes_a_step"]) / 1e6
        for row in (off, papers, ours)
    )
    return (
        f"hit rates in training {off['hit_rate']:.2f} with the least cache, "
        f"{papers['hit_rate']:.2f} with the algorithm as printed ({papers['policy']}), "
        f"{ours['hit_rate']:.2f} with ours; "
        "{:.1f}, {:.1f} and {:.1f} MB a step, the same losses to the bit".format(*moved)
    )


def _second_expert_text(result: Result) -> str:
    curves = result["second_expert"]
    return (
        f"means of {result['losses_of_a_mean']} losses differ by "
        f"{curves['random_differs_at_most_percent']:.2g} % at "
        f"most; {curves['steps']} steps of `tiny`"
    )


def _float16_text(result: Result) -> str:
    curves = result["float16"]
    differ = [curves[f"{name}_differs_at_most_percent"] for name in ("float16", "bfloat16")]
    return (
        f"means of {result['losses_of_a_mean']} losses differ by {differ[0]:.2g} % at most "
        f"(bfloat16: {differ[1]:.2g}),"
        f" with {curves['float16_overflows']} overflows; {curves['steps']} steps of `tiny`"
    )


def _fusion_text(result: Result) -> str:
    cells = {"fused_flat": "fused", "one_by_one": "two levels", "fused": "fused in two levels"}
    parts = []
    for one in (row for row in result["rows"] if row["variant"] == "one_by_one_flat"):
        same = [
            row
            for row in result["rows"]
            if all(row[name] == one[name] for name in ("experts", "mbit_per_s"))
        ]
        rows = {row["variant"]: row for row in same}
        shown = [
            f"{words} {rows[name]['ratio_to_one_by_one_flat']:.2f} times"
            for name, words in cells.items()
            if name in rows
        ]
        if one["experts"]:
            shorter = 1 - rows["fused"]["parts_s"]["all_to_all"] / one["parts_s"]["all_to_all"]
            shown.append(
                f"its all-to-alls {abs(shorter):.0%} {'shorter' if shorter >= 0 else 'longer'}"
            )
        model = f"top-{one['top_k']} of {one['experts']} experts" if one["experts"] else "dense"
        parts.append(f"{model}, {one['mbit_per_s']:g} Mbit/s: {', '.join(shown)}")
    return "; ".join(parts)


def _deepspeed_ratio_text(result: Result, model: str) -> str:
    rows = [row for row in result[model] if row["system"] == "jmoe"]
    return ", ".join(f"{row['ratio']:.2f} times in {row['processes']}" for row in rows)


def _dense_training_text(result: Result) -> str:
    return f"tokens/s over DeepSpeed's best, by processes: {_deepspeed_ratio_text(result, 'dense')}"


def _gpt_moe_text(result: Result) -> str:
    models = [name for name in result if name.endswith(" experts")]
    parts = [
        f"{model}: {_deepspeed_ratio_text(result, model)}"
        for model in sorted(models, key=lambda m: int(m.split()[0]))
    ]
    return f"tokens/s over DeepSpeed's best, by processes: {'; '.join(parts)}"


def _ring_text(result: Result) -> str:
    wide, compressed = (row["speed_of_resident"]["ring"] for row in result["rows"])
    return f"{wide:.2f} of resident with half of the layers; compressed experts {compressed:.2f}"


def _table3_text(result: Result) -> str:
    imbalanced, elastic, even = (
        _first_matching_row(result["rows"], layout=name)
        for name in ("imbalanced", "elastic", "even")
    )
    eight = _first_matching_row(result["simulated"], devices=8)["compared_to_4_devices"]
    before, after = (max(row["traced_idle_by_device"]) for row in (imbalanced, elastic))
    return (
        f"{elastic['speed_up']:.2f} times on two devices (even shares: {even['speed_up']:.2f}), "
        f"idle in the trace, of "
        f"the idlest device, {before:.0%} to {after:.0%}; 4/2/1/1 simulated {eight:.2f} times a "
        f"device"
    )


def _table6_text(result: Result) -> str:
    rows = [row for row in result["rows"] if row["model"] == "grown"]
    return ", ".join(f"{row['place']}: {row['tokens_per_s']:g} tokens/s" for row in rows)


def _table6_one_device_text(result: Result) -> str:
    rows = [row for row in result["rows"] if row["dtype"] == "bfloat16"]
    parts = [
        f"{row['model']} {row['one']['ratio']:.2f} (1 sequence), {row['eight']['ratio']:.2f} (8)"
        for row in rows
    ]
    return f"tokens/s over transformers' in bfloat16: {'; '.join(parts)}"


def _ufo_text(result: Result) -> str:
    names = ("super-network", "imbalanced", "dense")
    own, imbalanced, dense = (
        _first_matching_row(result["rows"], contestant=name) for name in names
    )
    peak, state = (
        [max(row[f"{what}_bytes_by_device"]) / 1e6 for row in (own, dense)]
        for what in ("peak", "state")
    )
    return (
        f"{imbalanced['speed_up_of_super_network']:.2f} times imbalanced tasks, "
        f"{dense['speed_up_of_super_network']:.2f} of a dense model a task; peak of the fuller "
        f"device "
        f"{peak[0]:.1f} MB against {peak[1]:.1f}, state {state[0]:.1f} against {state[1]:.1f}"
    )


def _served_text(result: Result) -> str:
    rows = [row for row in result["stages"] if row["path"]]
    first, small, last = rows[0], _first_matching_row(rows, stage="compressed to mxfp4"), rows[-1]
    return (
        f"{first['mb']:g} to {small['mb']:g} MB of weights, {first['bits_per_byte']:.3f} to "
        f"{last['bits_per_byte']:.3f}"
        " bits a byte where it is served"
    )


def _deployment_text(result: Result) -> str:
    rows = result["stages"]
    whole, narrow, student = (
        _first_matching_row(rows, stage=stage) for stage in ("whole", "whole, mxfp4", "distilled")
    )
    usage, reap = (
        _first_matching_row(rows, stage=f"pruned by {score}", experts=student["experts"])
        for score in ("usage", "reap")
    )
    return (
        f"{whole['mb']:g} MB, {whole['bits_per_byte']:.3f} bits a byte; in MXFP4 {narrow['mb']:g} "
        f"MB, "
        f"{narrow['lost']:+.3f}; half of the experts: chosen by usage {usage['lost']:+.3f}, by "
        f"REAP's score "
        f"{reap['lost']:+.3f}, distilled {student['lost']:+.3f}"
    )


ROOM = (
    "python benchmarks/offload/training.py room --hidden-size 256 --intermediate-size 256 "
    "--experts 64 --top-k 1 "
    "--batch-size 1 --sequence-length 64 --rounds 9"
)
NO_INFERENCE = "DeepSpeed was not measured: its inference operators need a CUDA GPU"
AGAINST_READY = "against our own step in the order of data-parallel frameworks (`ready`)"
ORDER = (
    "sudo NPROC=4 python benchmarks/comm/slow_link.py order --rates 50 100 200 --chunk-bytes "
    "1500000 --rounds 9"
)
LAYERS = (
    "sudo NPROC=4 python benchmarks/comm/slow_link.py order --rates 200 --variants ready none "
    "chunks pipelined "
    "--rounds 5 --chunk-bytes 1500000"
)
ORDER_QUICK = "benchmarks/comm/slow_link.py order --rates 0 --rounds 1 --variants ready chunks"
ORDER_FILE = "order_two_nodes_cpu.json"
PLACES = (
    Place(
        "moesys-table-1",
        "MoESys",
        "Table 1",
        "a dense model against a peer",
        "tokens/s over Megatron-LM's: 1.142 (0.35 billion parameters, 8 GPUs), 1.056 (1.3, 8), "
        "1.117 (6.7, 16), 1.004 (175, 128)",
        "python benchmarks/peers/training.py --deepspeed ENVIRONMENT/bin/python --dtypes bfloat16 "
        "--experts 0",
        "training_peers_cpu.json",
        _dense_training_text,
        quick="benchmarks/train/step.py --experts 0 --layers 2 --batch 2 --warmup 1 --steps 3",
        lacking="Megatron-Core was not measured: it needs an NVIDIA GPU to start; DeepSpeed is in "
        "its place",
    ),
    Place(
        "moesys-table-2",
        "MoESys (SE-MoE Table 1)",
        "Table 2",
        "GPT-MoE training against DeepSpeed-MoE",
        "1.28 times on one node, 1.33 on several; about 12 GB less a GPU",
        "python benchmarks/peers/training.py --deepspeed ENVIRONMENT/bin/python --dtypes bfloat16 "
        "--experts 8 16 32",
        "training_peers_cpu.json",
        _gpt_moe_text,
        quick="benchmarks/train/step.py --layers 2 --batch 2 --warmup 1 --steps 3",
        lacking="shapes scaled down, two processes at most",
    ),
    Place(
        "moesys-table-3",
        "MoESys",
        "Table 3",
        "elastic multi-task training",
        "1.182 times a GPU: 62.6 to 74.0 samples/s, 4 GPUs 1/1/1/1 to 8 GPUs 4/2/1/1",
        "python benchmarks/paper/moesys_table3.py",
        "moesys_table3_cpu.json",
        _table3_text,
        quick="benchmarks/paper/moesys_table3.py --quick",
        limit_s=240,
    ),
    Place(
        "moesys-table-4",
        "MoESys",
        "Table 4",
        "embedding partition",
        "10.9 to 48.1 % less memory, 1.038 to 1.156 times the tokens/s",
        "sudo python benchmarks/comm/slow_link.py embedding --rates 1000 --kinds replicated "
        "columns rows",
        "embedding_two_nodes_cpu.json",
        _embedding_text,
        quick="benchmarks/comm/slow_link.py embedding --rates 0 --rounds 1 --vocab-size 4096 "
        "--hidden-sizes 64 "
        "--tokens 128",
        limit_s=240,
    ),
    Place(
        "moesys-fusion",
        "MoESys",
        "section 3.2, fused communication",
        "communication fused and in two levels, against a collective for each parameter in one",
        "none of fusion alone; Table 5, resource-aware communication: 1.10 times the tokens/s",
        "sudo python benchmarks/comm/slow_link.py fusion --rates 0 200 --rounds 5",
        "fusion_two_nodes_cpu.json",
        _fusion_text,
        quick="benchmarks/comm/slow_link.py fusion --rates 0 --rounds 1 --shapes experts "
        "--variants one_by_one_flat "
        "fused",
        limit_s=240,
        lacking="small layers, two nodes of two ranks; parameters one by one cross in one level "
        "always, so that two "
        "levels without fusion are those of the all-to-alls",
    ),
    Place(
        "moesys-table-6",
        "MoESys",
        "Table 6",
        "decoding on several devices",
        "10.0 to 209.6 billion parameters on 1 to 16 GPUs; 1.058 to 1.13 times DeepSpeed's "
        "tokens/s",
        "sudo python benchmarks/paper/moesys_table6.py",
        "moesys_table6_cpu.json",
        _table6_text,
        quick="benchmarks/paper/moesys_table6.py --quick --places 1 2",
        limit_s=300,
        lacking=NO_INFERENCE,
    ),
    Place(
        "moesys-table-6-one-device",
        "MoESys",
        "Table 6, one device",
        "decoding on one device against another program",
        "1.058 to 1.13 times DeepSpeed's tokens/s",
        "python benchmarks/peers/transformers_decoding.py --python ENVIRONMENT/bin/python "
        "--models MIXTRAL QWEN3",
        "decoding_cpu.json",
        _table6_one_device_text,
        quick="benchmarks/paper/moesys_table6.py --one-device",
        lacking=f"{NO_INFERENCE}; transformers is in its place",
    ),
    Place(
        "moesys-figure-10",
        "MoESys",
        "Figure 10",
        "two levels, each token sent once to a node (dedup), against flat; forward, backward and "
        "optimizer beside it",
        "15.5 % less communication, 1.103 times end to end on 4 nodes",
        "sudo python benchmarks/comm/slow_link.py levels --rates 100 --rounds 5 --nodes 4",
        "levels_cpu.json",
        _exchange_levels_text,
        quick="benchmarks/comm/slow_link.py levels --rates 0 --rounds 1 --shapes top-2",
        limit_s=240,
        lacking="two ranks a node; two nodes: the same without --nodes; two levels alone send as "
        "much as flat",
    ),
    Place(
        "moesys-figure-12",
        "MoESys",
        "Figure 12",
        "prefill through a ring of slots",
        "nearly the speed of resident weights with about 30 % less GPU memory (58.2 billion "
        "parameters, 16 A100)",
        "python benchmarks/paper/fig12.py --model DIR --batch 8 --prompt 512 --compressed int4",
        "ring_prefill_cpu.json",
        _ring_text,
    ),
    Place(
        "moesys-alpha",
        "MoESys",
        "section 3.2, bytes of the device",
        "slots for the share of a layer's experts that a step activates (4 alpha S / L), against "
        "slots for all",
        "no figures",
        ROOM,
        "training_tiers_cpu.json",
        _expert_memory_text,
        quick="benchmarks/offload/training.py room --hidden-size 64 --intermediate-size 64 "
        "--layers 2 --top-k 1 "
        "--batch-size 1 --sequence-length 16 --rounds 1",
    ),
    Place(
        "moesys-cache",
        "MoESys (SE-MoE Algorithm 1)",
        "section 3.2, Algorithm 2",
        "the host cache's policy: the algorithm as printed (`--tiers.cache-policy moesys`), ours, "
        "and almost no cache",
        "no figures; no values of threshold, beta and K",
        "python benchmarks/paper/moesys_cache.py",
        "moesys_cache_cpu.json",
        _cache_text,
        quick="benchmarks/paper/moesys_cache.py --quick",
        limit_s=420,
        lacking="the hits are counted on the host, which is told the chosen experts by the numbers "
        "that came with the all-to-all, not on the device",
    ),
    Place(
        "second-expert",
        "SE-MoE, MoESys",
        "GShard's gating, with which both train",
        "a token goes to its second expert as often as that one's weight says, against always",
        "no figures",
        "python benchmarks/train/curves.py second_expert",
        "curves_cpu.json",
        _second_expert_text,
        quick="benchmarks/train/curves.py second_expert --steps 4 --mean 2",
        limit_s=240,
    ),
    Place(
        "float16",
        "SE-MoE, MoESys",
        "training in float16",
        "losses in float16 with a dynamic loss scale beside float32's",
        "no figures",
        "python benchmarks/train/curves.py float16",
        "curves_cpu.json",
        _float16_text,
        lacking="smoke test: second-expert",
    ),
    Place(
        "moesys-ufo",
        "MoESys",
        "section 5.3",
        "a super-network of image tasks (UFO)",
        "697 against 425 images/s of PyTorch 1.10, 18 % less memory (32 A100)",
        "python benchmarks/paper/ufo.py",
        "ufo_cpu.json",
        _ufo_text,
        quick="benchmarks/paper/ufo.py --quick",
        limit_s=480,
        lacking="PyTorch 1.10 was not measured: it does not exist for Python 3.11; the baselines "
        "are dense models here",
    ),
    Place(
        "moesys-deployment",
        "MoESys (SE-MoE section 3.1)",
        "section 3.3.1, Figure 3",
        "from a trained model to a deployed one: formats, and which experts are kept",
        "no figures",
        "python benchmarks/paper/deploy_path.py --folder DIR --preset small --steps 300 "
        "--student-steps 120",
        "deploy_path_small_cpu.json",
        _deployment_text,
    ),
    Place(
        "moesys-deployment-served",
        "MoESys (SE-MoE section 3.1)",
        "section 3.3.1, Figure 3, every stage",
        "one model from its training to two processes that serve it without the repository",
        "no figures",
        "python benchmarks/paper/deploy_path.py --folder DIR --preset small --steps 300 "
        "--student-steps 100 "
        "--batch-size 4 --unseen-tokens 17000 --calibration-tokens 32768 --path-only --plot "
        "docs/deploy_path.png",
        "deploy_path_served_small_cpu.json",
        _served_text,
    ),
    Place(
        "lina-share",
        "Lina",
        "Table 1, Figures 2 to 5",
        "the all-to-all's share of a step; its contention with the all-reduce",
        "all-to-alls take 35.4 to 39.5 % of a training step; beside an all-reduce they take "
        "more than 1.83 times as long in the median, at most 4.14 times",
        ORDER,
        ORDER_FILE,
        _shares_text,
        quick=ORDER_QUICK,
        limit_s=420,
        lacking="two nodes, one shape",
    ),
    Place(
        "lina-step",
        "Lina",
        "section 7.2, step time and all-to-all time",
        "all-to-alls before all-reduces, in chunks",
        "1.37 to 1.73 times the step time of DeepSpeed, all-to-alls at least 2.21 times",
        ORDER,
        ORDER_FILE,
        _step_times_text,
        lacking=f"{AGAINST_READY}; smoke test: lina-share",
    ),
    Place(
        "lina-layer",
        "Lina",
        "section 7.2, forward and backward time of a layer",
        "time of a layer in the order `ready` over its in chunks",
        "forward 1.84 times with 2 experts and 1.89 with 8, backward 2.41 and 2.32",
        LAYERS,
        ORDER_FILE,
        _layer_times_text,
        lacking="smoke test: lina-share",
    ),
    Place(
        "lina-ablation",
        "Lina",
        "section 7.2, ablation",
        "each of Lina's means by itself, 200 Mbit/s, step time of `ready` over its",
        "priority alone: 10 to 30 %, 24 % on average; with partition 1.36 to 1.42 times at 2 to 16 "
        "experts",
        ORDER,
        ORDER_FILE,
        _ablation_text,
        lacking="smoke test: lina-share",
    ),
    Place(
        "lina-ddp",
        "Lina",
        "section 7.2 in Lina's own setting, dense gradients all-reduced",
        "step time of `ready` over that of each order, and how many times sooner all-to-alls are "
        "done",
        "1.37 to 1.73 times the step time of DeepSpeed, all-to-alls at least 2.21 times",
        "sudo NPROC=4 python benchmarks/comm/slow_link.py ddp --rates 200 --rounds 5 "
        "--chunk-bytes 1500000",
        ORDER_FILE,
        _ddp_text,
        quick="benchmarks/comm/slow_link.py ddp --rates 0 --rounds 1 --variants ready chunks",
        limit_s=240,
        lacking=AGAINST_READY,
    ),
    Place(
        "lina-partition-size",
        "Lina",
        "section 7.2, partition size",
        "speed of a step over that of `ready` by the size of a chunk",
        "30 MB chosen; chunks of more than 50 MB slow two models, chunks below 10 MB may lose "
        "to their overhead",
        "sudo NPROC=4 python benchmarks/comm/slow_link.py order --rates 50 --variants ready "
        "chunks --rounds 5 "
        "--chunk-bytes 1500000",
        ORDER_FILE,
        _partition_sizes_text,
        lacking="one command for each size and rate; smoke test: lina-share",
    ),
    Place(
        "lina-overhead",
        "Lina",
        "section 7.2, overheads",
        "what cutting collectives into chunks costs",
        "1.02 % and 1.7 %",
        "NPROC=4 python benchmarks/comm/slow_link.py order --rates 0 --variants priority chunks "
        "pipelined --rounds 15 "
        "--chunk-bytes 1500000",
        ORDER_FILE,
        _gradient_cutting_text,
        lacking="each chunk wakes four threads on two cores; steps alternate between 1.4 and 2.2 "
        "s, more than it costs",
    ),
    Place(
        "lina-packing",
        "Lina",
        "Tables 3 and 4",
        "expert packing",
        "pipelining efficiency from 33 to 86 %, GPU utilisation from 66.2 to 83.4 %",
        "sudo python benchmarks/paper/lina_packing.py",
        "lina_packing_two_nodes_cpu.json",
        _expert_packing_text,
        quick="benchmarks/paper/lina_packing.py --rates 0 --rounds 1 --shapes 1",
        limit_s=240,
        lacking="utilisation: processor time over wall time and cores, in place of GPUs",
    ),
    Place(
        "lina-skew",
        "Lina",
        "Figures of section 2 on inference",
        "tokens of the most popular expert over those of the least popular one",
        "4.02 with 4 experts, 5.56 with 16",
        "sudo python benchmarks/paper/lina_inference.py --folder DIR",
        "lina_inference_two_nodes_cpu.json",
        _popularity_spread_text,
        lacking="smoke test: lina-inference",
    ),
    Place(
        "lina-planning",
        "Lina",
        "section 7.3, overheads",
        "what planning a batch's experts costs",
        "6.2 ms; 1.45 ms where nothing changes",
        "sudo python benchmarks/paper/lina_inference.py --folder DIR",
        "lina_inference_two_nodes_cpu.json",
        _planning_time_text,
        lacking="smoke test: lina-inference",
    ),
    Place(
        "lina-popularity",
        "Lina",
        "Table 5, Figure 9",
        "experts of the next layer, guessed from a token's path",
        "54 to 58 %; paths of three layers 60 to 64 %",
        "python -m benchmarks.paper.popularity --model DIR --text FILE --other OTHER",
        "popularity_cpu.json",
        _path_guesses_text,
    ),
    Place(
        "lina-inference",
        "Lina",
        "section 7.3, Figures 16 to 19",
        "experts where the tokens are, planned for each batch",
        "median 1.36 to 1.54 times, 95th percentile 1.68 and 1.82 (abstract: 1.63 on average)",
        "sudo python benchmarks/paper/lina_inference.py --folder DIR",
        "lina_inference_two_nodes_cpu.json",
        _inference_text,
        quick="benchmarks/paper/lina_inference.py --rate 0 --quick",
        limit_s=300,
        lacking="Table 6, 95th percentile over the ideal time: BERT 1.08 and 1.11, T5 1.04 and "
        "1.08; encoder and encoder-decoder models are not among ours",
    ),
    Place(
        "simulator",
        "all",
        "rows of more nodes than two",
        "the simulator against exchanges that were measured",
        "-",
        "python -m benchmarks.paper.simulator",
        "exchange_two_nodes_cpu.json",
        _simulated_text,
        quick="-m benchmarks.paper.simulator",
    ),
    Place(
        "step-simulator",
        "all",
        "rows of more nodes than two",
        "simulated steps: against measured ones, and on 4 to 64 nodes",
        "-",
        "python -m benchmarks.paper.step_simulator",
        "steps_simulated.json",
        _simulated_steps_text,
        quick="-m benchmarks.paper.step_simulator --result ''",
        lacking="computing changes from session to session; four nodes share one link and the "
        "cores of two",
    ),
    Place(
        "communication-simulated",
        "all",
        "rows of more nodes than two, the papers' scale",
        "simulated exchanges and embeddings on 8 to 1,024 nodes of 8 GPUs",
        "-",
        "python benchmarks/comm/simulate.py",
        "communication_simulated.json",
        _many_nodes_text,
        quick="benchmarks/comm/simulate.py --nodes 8 --result '' --plot ''",
        lacking="formulas alone: nothing of it is measured",
    ),
)
