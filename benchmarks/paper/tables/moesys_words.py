"""Our figures beside those of SE-MoE and MoESys, in words, from the committed results."""

from benchmarks.paper.tables.row import Result, matching_row


def deepspeed_ratio_text(result: Result, model: str) -> str:
    rows = [row for row in result[model] if row["system"] == "jmoe"]
    return ", ".join(f"{row['ratio']:.2f} times in {row['processes']}" for row in rows)


def dense_training_text(result: Result) -> str:
    return f"tokens/s over DeepSpeed's best, by processes: {deepspeed_ratio_text(result, 'dense')}"


def gpt_moe_text(result: Result) -> str:
    models = [name for name in result if name.endswith(" experts")]
    parts = [
        f"{model}: {deepspeed_ratio_text(result, model)}"
        for model in sorted(models, key=lambda m: int(m.split()[0]))
    ]
    return f"tokens/s over DeepSpeed's best, by processes: {'; '.join(parts)}"


def table3_text(result: Result) -> str:
    imbalanced, elastic, even = (
        matching_row(result["rows"], layout=name) for name in ("imbalanced", "elastic", "even")
    )
    eight = matching_row(result["simulated"], devices=8)["compared_to_4_devices"]
    before, after = (max(row["traced_idle_by_device"]) for row in (imbalanced, elastic))
    return (
        f"{elastic['speed_up']:.2f} times on two devices (even shares: {even['speed_up']:.2f}), "
        f"idle in the trace, of "
        f"the idlest device, {before:.0%} to {after:.0%}; 4/2/1/1 simulated {eight:.2f} times a "
        f"device"
    )


def embedding_text(result: Result) -> str:
    parts = []
    for row in result["rows"]:
        if row["mbit_per_s"] > 0 and row["embedding"] != "replicated":
            speed, part = 1 / row["ratio_to_replicated"], row["table_part_of_replicated"]
            name = f"hidden {row['hidden_size']}, {row['embedding']}"
            parts.append(f"{name}: {speed:.1f} times as fast with {part:.2f} of the bytes")
    return "; ".join(parts)


def fusion_text(result: Result) -> str:
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


def table6_text(result: Result) -> str:
    rows = [row for row in result["rows"] if row["model"] == "grown"]
    return ", ".join(f"{row['place']}: {row['tokens_per_s']:g} tokens/s" for row in rows)


def table6_one_device_text(result: Result) -> str:
    rows = [row for row in result["rows"] if row["dtype"] == "bfloat16"]
    parts = [
        f"{row['model']} {row['one']['ratio']:.2f} (1 sequence), {row['eight']['ratio']:.2f} (8)"
        for row in rows
    ]
    return f"tokens/s over transformers' in bfloat16: {'; '.join(parts)}"


def exchange_levels_text(result: Result) -> str:
    parts = []
    for nodes, rows in ((2, result["rows"]), (4, result["four_nodes"]["rows"])):
        for row in (
            row for row in rows if row["variant"] == "hierarchical" and row["mbit_per_s"] == 100.0
        ):
            same = {name: row[name] for name in ("experts", "mbit_per_s")}
            flat = matching_row(rows, variant="flat", **same)["parts_s"]["all_to_all"]
            shorter = 1 - row["parts_s"]["all_to_all"] / flat
            parts.append(
                f"{nodes} nodes, top-{row['top_k']} of {row['experts']}: "
                f"{row['ratio_to_flat']:.2f} times end to end, "
                f"all-to-alls {abs(shorter):.0%} {'shorter' if shorter >= 0 else 'longer'}"
            )
    return "; ".join(parts)


def ring_text(result: Result) -> str:
    wide, compressed = (row["speed_of_resident"]["ring"] for row in result["rows"])
    return f"{wide:.2f} of resident with half of the layers; compressed experts {compressed:.2f}"


def expert_memory_text(result: Result) -> str:
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


def cache_text(result: Result) -> str:
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


def second_expert_text(result: Result) -> str:
    curves = result["second_expert"]
    return (
        f"means of {result['losses_of_a_mean']} losses differ by "
        f"{curves['random_differs_at_most_percent']:.2g} % at "
        f"most; {curves['steps']} steps of `tiny`"
    )


def float16_text(result: Result) -> str:
    curves = result["float16"]
    differ = [curves[f"{name}_differs_at_most_percent"] for name in ("float16", "bfloat16")]
    return (
        f"means of {result['losses_of_a_mean']} losses differ by {differ[0]:.2g} % at most "
        f"(bfloat16: {differ[1]:.2g}),"
        f" with {curves['float16_overflows']} overflows; {curves['steps']} steps of `tiny`"
    )


def ufo_text(result: Result) -> str:
    names = ("super-network", "imbalanced", "dense")
    own, imbalanced, dense = (matching_row(result["rows"], contestant=name) for name in names)
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


def served_text(result: Result) -> str:
    rows = [row for row in result["stages"] if row["path"]]
    first, small, last = rows[0], matching_row(rows, stage="compressed to mxfp4"), rows[-1]
    return (
        f"{first['mb']:g} to {small['mb']:g} MB of weights, {first['bits_per_byte']:.3f} to "
        f"{last['bits_per_byte']:.3f}"
        " bits a byte where it is served"
    )


def deployment_text(result: Result) -> str:
    rows = result["stages"]
    whole, narrow, student = (
        matching_row(rows, stage=stage) for stage in ("whole", "whole, mxfp4", "distilled")
    )
    usage, reap = (
        matching_row(rows, stage=f"pruned by {score}", experts=student["experts"])
        for score in ("usage", "reap")
    )
    return (
        f"{whole['mb']:g} MB, {whole['bits_per_byte']:.3f} bits a byte; in MXFP4 {narrow['mb']:g} "
        f"MB, "
        f"{narrow['lost']:+.3f}; half of the experts: chosen by usage {usage['lost']:+.3f}, by "
        f"REAP's score "
        f"{reap['lost']:+.3f}, distilled {student['lost']:+.3f}"
    )


def elastic_alone_text(result: Result) -> str:
    elastic = matching_row(result["rows"], layout="elastic")
    return (
        f"{elastic['speed_up']:.2f} times the images/s of the same two devices, every device with "
        "the whole model as before"
    )


def elastic_text_text(result: Result) -> str:
    rows = result["language"]["rows"]
    mixed, elastic = (matching_row(rows, layout=name) for name in ("mixed", "elastic"))
    read = ["+".join(names) for names in elastic["corpora_by_device"]]
    return (
        f"{elastic['speed_up']:.2f} times the tokens/s of whole corpora in their order on two "
        f"devices (plain mixture: {mixed['speed_up']:.2f}); devices read {' and '.join(read)}, "
        f"losses differ from the mixture's by {elastic['loss_error']:.1g} at most"
    )


def strategy_text(result: Result, variant: str) -> str:
    rows = result["strategies"]["rows"]
    alone, baseline = (matching_row(rows, variant=name) for name in (variant, "baseline"))
    memory = alone["device_bytes"] / baseline["device_bytes"]
    sent = alone["sent_bytes"] / baseline["sent_bytes"]
    return (
        f"{alone['ratio_to_baseline']:.2f} times the tokens/s, {memory:.2f} of the memory, "
        f"{sent:.2f} of the bytes that a node sends"
    )


def levels_alone_text(result: Result) -> str:
    return strategy_text(result, "resource_aware")


def embedding_alone_text(result: Result) -> str:
    return strategy_text(result, "embedding_partition")


def strategies_text(result: Result) -> str:
    return (
        f"two levels {levels_alone_text(result)}; embedding {embedding_alone_text(result)}; "
        "elastic training: the row of Table 5"
    )


def estimated_moe_text(result: Result) -> str:
    rows = [row for row in result["rows"] if row["place"] == "MoESys, Table 2"]
    parts = [
        f"{row['parameters_billions']:g} billion parameters on {row['devices']}: "
        f"{row['tokens_per_s']:,} tokens/s, "
        f"{row['tokens_per_s'] / row['paper']['tokens_per_s']:.2f} of the paper's, "
        f"{row['device_gb']:g} GB (paper: {row['paper']['gb']:g})"
        for row in rows
    ]
    return f"estimated, not measured: {'; '.join(parts)}"


def estimated_dense_text(result: Result) -> str:
    rows = [row for row in result["rows"] if row["place"] == "MoESys, Table 1"]
    parts = [
        f"{row['parameters_billions']:g} billion parameters on {row['devices']}: "
        f"{row['tokens_per_s']:,} tokens/s, "
        f"{row['tokens_per_s'] / row['paper']['tokens_per_s']:.2f} of the paper's, "
        f"{row['tokens_per_s'] / row['paper']['megatron']:.2f} of Megatron-LM's, "
        f"{row['device_gb']:g} GB"
        for row in rows
    ]
    return f"estimated, not measured: {'; '.join(parts)}"
