"""Our figures beside Lina's, in words, from the committed results."""

from statistics import mean

from benchmarks.paper.tables.row import Result, matching_row


def _orders(result: Result, rate: float, figure: str) -> dict[str, float]:
    return {row["variant"]: row[figure] for row in result["rows"] if row["mbit_per_s"] == rate}


def shares_text(result: Result) -> str:
    rates = sorted({row["mbit_per_s"] for row in result["rows"]})
    parts = []
    for rate in rates:
        row = matching_row(result["rows"], mbit_per_s=rate, variant="none")
        parts.append(f"{row['all_to_alls_s'] / row['seconds']:.0%} at {rate:g} Mbit/s")
    among, ahead = (
        matching_row(result["ddp"]["rows"], variant=name) for name in ("ready", "fixed")
    )
    return (
        f"the backward pass waits for all-to-alls {', '.join(parts)} of a step's time; among "
        f"all-reduces of dense "
        f"gradients (`ready`) an all-to-all takes "
        f"{among['all_to_all_s'] / ahead['all_to_all_s']:.1f} times as long as "
        f"ahead of them (`fixed`), at {among['mbit_per_s']:g} Mbit/s"
    )


def step_times_text(result: Result) -> str:
    rates = sorted({row["mbit_per_s"] for row in result["rows"]})
    newest = matching_row(result["layers"]["rows"], variant="chunks")
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


def layer_times_text(result: Result) -> str:
    parts = []
    rows = result["layers"]["rows"]
    for rate in sorted({row["mbit_per_s"] for row in rows}):
        ready, chunks = (
            matching_row(rows, mbit_per_s=rate, variant=name) for name in ("ready", "chunks")
        )
        ways = [
            f"{way} {ready[f'{way}_layer_s'] / chunks[f'{way}_layer_s']:.2f}"
            for way in ("forward", "backward")
        ]
        parts.append(f"{rate:g} Mbit/s: {', '.join(ways)}")
    return "; ".join(parts)


def ablation_text(result: Result) -> str:
    return ", ".join(
        f"{name} {ratio:.2f}" for name, ratio in _orders(result, 200.0, "ratio_to_ready").items()
    )


def ddp_text(result: Result) -> str:
    rows = [row for row in result["ddp"]["rows"] if row["variant"] != "ready"]
    parts = [
        f"{row['variant']} {row['ratio_to_ready']:.2f} ({row['ratio_all_to_alls_to_ready']:.1f} "
        f"sooner)"
        for row in rows
    ]
    slower = matching_row(result["ddp"]["slower_processor"]["rows"], variant="chunks")[
        "ratio_to_ready"
    ]
    return (
        f"{rows[0]['mbit_per_s']:g} Mbit/s: {', '.join(parts)}; on a slower processor chunks "
        f"{slower:.2f}"
    )


def queue_text(result: Result) -> str:
    parts = []
    for row in result["queue"]["rows"]:
        alone = min(row["queue_resting_s"], row["parts_s"]["other_collectives"])
        most = (alone + row["queue_inverted_s"]) / row["seconds"]
        behind = row["queue_inverted_s"] / row["seconds"]
        where = f"{row['variant']}, {row['mbit_per_s']:g} Mbit/s"
        parts.append(f"{where}: at most {most:.1%} of a step ({behind:.1%} by all-to-alls)")
    return "; ".join(parts)


def placed_in_training_text(result: Result) -> str:
    skewed, balanced = (
        matching_row(result["language"]["rows"], layout=name) for name in ("skewed", "balanced")
    )
    return (
        f"the busiest of two devices gets {skewed['busiest_device']:.2f} of the mean, with experts "
        f"by load {balanced['busiest_device']:.2f}; steps that overflow {skewed['overflowed']} and "
        f"{balanced['overflowed']}"
    )


def gradient_cutting_text(result: Result) -> str:
    rows = result["overhead_of_cutting"]["rows"]
    chunks, whole = (
        mean(matching_row(rows, variant=name)["all_seconds"]) for name in ("chunks", "priority")
    )
    return (
        f"without a link: a step with chunks takes {chunks / whole:.2f} of one with whole "
        f"ones, on average"
    )


def partition_sizes_text(result: Result) -> str:
    parts = []
    for name in ("chunk_sweep_50", "chunk_sweep"):
        rows = [row for row in result[name]["rows"] if row["variant"] == "chunks"]
        sizes = ", ".join(
            f"{row['chunk_bytes'] / 1e6:g} MB {row['ratio_to_ready']:.2f}" for row in rows
        )
        parts.append(f"{rows[0]['mbit_per_s']:g} Mbit/s: {sizes}")
    return "; ".join(parts)


def expert_packing_text(result: Result) -> str:
    parts = []
    for row in (row for row in result["rows"] if row["controller"]):
        same = {name: row[name] for name in ("mbit_per_s", "tokens_per_rank", "intermediate_size")}
        unpacked = matching_row(result["rows"], experts_per_device=1, controller=False, **same)
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


def inference_text(result: Result) -> str:
    parts = []
    for name in ("trained", "fixture"):
        rows = result[name]["batches"]
        lina, ideal = (
            matching_row(rows, contestant=contestant) for contestant in ("lina, l = 3", "ideal")
        )
        parts.append(
            f"{name}: median {lina['ratio']:.2f}, 95th percentile {lina['ratio_p95']:.2f}, "
        )
        parts[-1] += (
            f"of {ideal['ratio']:.2f} and {ideal['ratio_p95']:.2f} that are possible on two devices"
        )
    simulated = result["fixture"]["simulated"]["rows"][0]
    return "; ".join(parts) + f"; 16 devices, simulated: {simulated['ratio']:.2f}"


def popularity_spread_text(result: Result) -> str:
    parts = []
    for name in ("trained", "fixture"):
        layers = result[name]["most_over_least_popular"]
        parts.append(
            f"{result[name]['experts']} experts: {min(layers):.1f} to {max(layers):.1f} by layer"
        )
    return "; ".join(parts)


def planning_time_text(result: Result) -> str:
    took = result["trained"]["overhead_ms"]
    return (
        f"plan {took['plan_16_devices']:.2f} ms for 16 devices, {took['nothing_changes']:.2f} "
        f"ms where nothing changes"
    )


def path_guesses_text(result: Result) -> str:
    rows = result["text"]["accuracy"]
    return ", ".join(f"{row['estimator']} {row['among_2']:.0%}" for row in rows)


def layer_share_text(result: Result) -> str:
    parts = []
    for name in ("trained", "fixture"):
        rows = [
            row
            for row in result[name]["layers"]
            if row["contestant"] == "even" and row["layer_ms_median"]
        ]
        shares = [row["all_to_all_ms_median"] / row["layer_ms_median"] for row in rows]
        parts.append(f"{mean(shares):.0%} with {result[name]['experts']} experts")
    return f"all-to-alls and the wait for the busiest device in them: {', '.join(parts)}"


def contention_text(result: Result) -> str:
    rows = result["contention"]["rows"]
    alone, parts = matching_row(rows, variant="fixed"), []
    for name in ("ready", "chunks"):
        row = matching_row(rows, variant=name)
        mean_slowdown = row["all_to_all_s"] / alone["all_to_all_s"]
        slowdown = row["slowdown"]
        parts.append(
            f"`{name}` {mean_slowdown:.2f} times in the mean, {slowdown['0.5']:.2f} in the median, "
            f"{slowdown['0.9']:.2f} in the 90th percentile, at most {slowdown['1']:.2f}"
        )
    exchanges = 2 * rows[0]["layers"] * len(rows[0]["all_seconds"])
    return f"{exchanges} all-to-alls, {rows[0]['mbit_per_s']:g} Mbit/s: {'; '.join(parts)}"


def backward_all_to_alls_text(result: Result) -> str:
    rates = sorted({row["mbit_per_s"] for row in result["rows"]})
    sooner = [
        f"{_orders(result, rate, 'ratio_all_to_alls_to_ready')['chunks']:.1f} at {rate:g} Mbit/s"
        for rate in rates
    ]
    return f"all done {', '.join(sooner)} times sooner"


def layer_way_text(result: Result, way: str) -> str:
    rows = result["layers"]["rows"]
    ready, chunks = (
        matching_row(rows, mbit_per_s=200.0, variant=name)[f"{way}_layer_s"]
        for name in ("ready", "chunks")
    )
    return f"{ready / chunks:.2f} times, 200 Mbit/s"


def forward_layer_text(result: Result) -> str:
    return layer_way_text(result, "forward")


def backward_layer_text(result: Result) -> str:
    return layer_way_text(result, "backward")


def packing_rows(result: Result) -> list[tuple[Result, Result]]:
    """Return each of the controller's rows after that of one expert a device."""
    pairs = []
    for row in (row for row in result["rows"] if row["controller"]):
        same = {name: row[name] for name in ("mbit_per_s", "tokens_per_rank", "intermediate_size")}
        unpacked = matching_row(result["rows"], experts_per_device=1, controller=False, **same)
        pairs.append((unpacked, row))
    return pairs


def pipelining_text(result: Result) -> str:
    return "; ".join(
        f"{row['experts_per_device']} a device: {unpacked['pipelining_efficiency']:.1%} to "
        f"{row['pipelining_efficiency']:.1%}, a step {row['ratio_to_unpacked']:.2f} of unpacked"
        for unpacked, row in packing_rows(result)
    )


def utilisation_text(result: Result) -> str:
    return "; ".join(
        f"{row['experts_per_device']} a device: {unpacked['utilisation']:.1%} to "
        f"{row['utilisation']:.1%}"
        for unpacked, row in packing_rows(result)
    )


def path_lengths_text(result: Result) -> str:
    return "; ".join(
        f"l = {row['path_length']}: {row['time_over_ideal']:.2f}, planned anew "
        f"{row['replanned']:.0%}, most popular right {row['sets_equal']:.0%}"
        for row in result["trained"]["table_5"]
        if row["kept"] == "top k"
    )


def layer_tails_text(result: Result, figure: str) -> str:
    parts = []
    for name in ("trained", "fixture"):
        rows = result[name]["layers"]
        ratios = [
            row[figure] / matching_row(rows, contestant="lina, l = 3", layer=row["layer"])[figure]
            for row in rows
            if row["contestant"] == "even" and row[figure]
        ]
        parts.append(
            f"{result[name]['experts']} experts: mean {mean(ratios):.2f}, at most {max(ratios):.2f}"
        )
    return "; ".join(parts)


def layer_time_tail_text(result: Result) -> str:
    return layer_tails_text(result, "layer_ms_p95")


def all_to_all_tail_text(result: Result) -> str:
    return layer_tails_text(result, "all_to_all_ms_p95")


def accuracy_by_layer_text(result: Result) -> str:
    rows = result["trained"]["accuracy_by_layer"]
    row = matching_row(rows, text="Python", path_length=3, kept="top k")
    shares = ", ".join(f"{share:.0%}" for share in row["sets_equal"])
    return f"most popular experts right, by layer from the second: {shares}"


def generality_text(result: Result) -> str:
    rows = result["trained"]["batches"]
    parts = []
    for text in dict.fromkeys(row["text"] for row in rows):
        lina, ideal = (
            matching_row(rows, text=text, contestant=name) for name in ("lina, l = 3", "ideal")
        )
        parts.append(f"{text} {lina['batch_ms_p95'] / ideal['batch_ms_p95']:.2f}")
    return f"a decoder on texts of two kinds: {', '.join(parts)}"


def without_parts_text(result: Result) -> str:
    rows = result["trained"]["batches"]
    names = {"without_estimate": "estimation", "without_phase_two": "phase two"}
    lina = matching_row(rows, contestant="lina, l = 3")
    return ", ".join(
        f"without {words} a batch takes "
        f"{matching_row(rows, contestant=name)['batch_ms_median'] / lina['batch_ms_median']:.2f}"
        for name, words in names.items()
    )


def estimated_shares_text(result: Result) -> str:
    rows = [row for row in result["rows"] if row["place"] == "Lina, Table 1"]
    parts = [
        f"{row['step'].removeprefix('lina-').replace('-', ' ')}: {row['all_to_all_ms']:.0f} ms, "
        f"{row['all_to_all_share']:.0%} (paper: {row['paper']['all_to_all_ms']}, "
        f"{row['paper']['share']:.0%})"
        for row in rows
    ]
    return f"estimated, not measured: {'; '.join(parts)}"


def share_by_experts_text(result: Result) -> str:
    rows = [row for row in result["rows"] if row["step"].startswith("lina-12-layers")]
    shown = ", ".join(
        f"{row['all_to_all_share']:.0%} on {row['devices']} devices with an expert each"
        for row in rows
    )
    return f"estimated, not measured, 12 layers: {shown}"


def most_popular_text(result: Result) -> str:
    found = result["most_popular"]
    shown = "; ".join(
        f"layer {row['layer']}: {', '.join(map(str, row['experts']))} "
        f"({row['share_of_choices']:.0%})"
        for row in found["rows"]
        if row["layer"] % 2 == 0
    )
    return f"{shown} of the choices, of {result['experts']} experts"
