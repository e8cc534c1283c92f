"""Measure Lina's inference scheduling on two processes and a slow link (its section 7.3).

    sudo python benchmarks/paper/lina_inference.py --folder DIR
        everything; DIR keeps models and programs
    sudo python benchmarks/paper/lina_inference.py --folder DIR --prepare
        only trains and profiles the models
    python benchmarks/paper/lina_inference.py --rate 0 --quick           a smoke test

Two models: `trained` learns Python source here and is asked to read more of it (and English, the
second kind of text); `fixture` has 16 experts, random weights and routers whose biases make experts
popular by Zipf's law. A batch is the prefill of a whole batch of prompts; contestants share an
engine, and take turns from the even placement:

even: experts in order, for good. ideal: the same, with choices dealt out evenly to all experts.
lina, l = 1, 3, 6: the estimate by paths of so many layers, with the likeliest two experts of a
path, or with all; without_estimate: every layer is placed after its gate; without_phase_two: no
layer is. batch_ms: from the requests to their tokens. ratio: median, round by round, of `even` to
this one, and the quartiles of the rounds.

table_5: of a batch and layer, whether the 2 K most popular experts are those estimated
(`sets_equal`), and how many of them are (`share_right`). layers: with a wait after each layer,
which batches do not have otherwise; all_to_all_ms: a layer's exchange and experts without what the
experts of the least busy device take, that is what it waits.
simulated: batches from the choices recorded here, the engine's own planner, and costs: a batch's
fixed part and a row of an expert from `even` and `ideal` of every second round, copies and plans as
timed. Its prediction of `lina` stands beside the measurement of the other rounds; the row of 16
devices is no measurement.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import ROOT
from benchmarks.lib import report
from benchmarks.lib.engine_ranks import EngineRank, pin_to_one_core, run_rank
from benchmarks.lib.lina import (
    LENGTHS,
    LINA,
    TABLES,
    ReplayTotals,
    WeightlessPlacedExperts,
    count_path_tables,
    make_contestant_planner,
    measure_estimate_accuracy,
    measure_layer_rows,
    measure_planning_ms,
    replay_choices,
)
from benchmarks.lib.ranks import add_rank_options, run_ranks
from benchmarks.lib.report import JsonObject
from benchmarks.lib.skewed_model import write_skewed_checkpoint, zipf_shares
from jmoe.config import ModelConfig
from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.inference.engine import Engine
from jmoe.inference.mesh.expert_placer import PlacementStats, SwapCosts

NUM_RANKS = 2
SIMULATED_DEVICES = 16
# the most popular of 16 experts has 5.56 times the tokens of the least popular, as in Lina's figure
# 6
ZIPF = 0.62
TRAINED = {  # the preset, but for
    # a tenth of the preset's, which makes experts nearly equally popular
    "model.router.aux-loss-coef": 0.004,
    "batch-size": 4,
    "sequence-length": 256,
    "optimizer.warmup-steps": 40,
}
QUICK_TRAINED = TRAINED | {
    "model.num-hidden-layers": 3,
    "model.hidden-size": 32,
    "model.moe-intermediate-size": 32,
    "model.vocab-size": 512,
    "model.num-attention-heads": 2,
    "model.num-key-value-heads": 1,
    "sequence-length": 64,
    "evaluation.sample-tokens": 4,
}
FIXTURE = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}
QUICK_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
QUICK_FIXTURE = FIXTURE | {"hidden_size": 32, "intermediate_size": 32} | QUICK_HEADS
SIZES = {
    "prompts": 16,
    "prompt_tokens": 128,
    "batches": 6,
    "rounds": 9,
    "profile_tokens": 100_000,
    "layers": 6,
}
QUICK_SIZES = {
    "prompts": 4,
    "prompt_tokens": 16,
    "batches": 2,
    "rounds": 2,
    "profile_tokens": 500,
    "layers": 3,
}
WITHOUT = ("without_estimate", "without_phase_two")
CONTESTANTS = ("even", "ideal", *TABLES, *WITHOUT)
PAPER = {
    "batch": {"median_ratio": "1.36 to 1.54", "p95_ratio_16_experts": [1.82, 1.68]},
    "replans_l_3": [0.257, 0.322],
    "plan_ms": 6.2,
    "nothing_changes_ms": 1.45,
    "most_over_least_popular": {"4 experts": 4.02, "16 experts": 5.56},
}


class Texts(NamedTuple):
    """Prompts of one kind: batches of token ids."""

    kind: str
    batches: list[list[list[int]]]


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--rate", type=float, default=1000, help="of the link, Mbit/s, both ways; 0: no link"
    )
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="after which no round of a model begins"
    )
    parser.add_argument("--train-steps", type=int, default=300)
    parser.add_argument("--models", nargs="+", default=["trained", "fixture"])
    parser.add_argument(
        "--folder", type=Path, help="keep models, profiles and compiled programs here"
    )
    parser.add_argument(
        "--prepare", action="store_true", help="make what is missing in --folder, and end"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small models, one round: is all there?"
    )
    add_rank_options(parser)
    a = parser.parse_args()
    a.train_steps = 4 if a.quick else a.train_steps
    return a


# Models


def sources(count: int | None) -> list[Path]:
    """Return modules of Python's standard library, in an order that mixes them."""
    modules = sorted(
        Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.stem[::-1]
    )
    return modules[:count]


def train(a: argparse.Namespace, folder: Path) -> None:
    """Train a model on Python source; write it as a Hugging Face folder."""
    text, run = folder.with_name("source"), folder.with_name("run")
    text.mkdir(exist_ok=True)
    for module in sources(8 if a.quick else None):
        (text / module.name).write_bytes(module.read_bytes())
    options = dict[str, Any](QUICK_TRAINED if a.quick else TRAINED)
    options |= {"num-steps": a.train_steps, "data.path": text, "output-dir": run}
    options["evaluation.every-steps"] = a.train_steps
    command = [sys.executable, "train.py", "tiny" if a.quick else "small"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    merge = [sys.executable, "-m", "jmoe.deploy.merge", run, folder]
    subprocess.run(merge, cwd=ROOT, check=True, stdout=sys.stderr)


def texts(
    a: argparse.Namespace, name: str, folder: Path, sizes: dict[str, int]
) -> tuple[list[list[int]], list[Texts]]:
    """Return prompts to count paths on and others to measure with: random pieces of each text."""
    from jmoe.models.tokenizer_file import open_tokenizer

    rows, length = sizes["prompts"], sizes["prompt_tokens"]
    count = rows * (sizes["batches"] + 1)
    counted = max(1, sizes["profile_tokens"] // length)

    def batches(pieces: Sequence[list[int]]) -> list[list[list[int]]]:
        return [list(pieces[n : n + rows]) for n in range(0, len(pieces) - rows + 1, rows)]

    if name == "fixture":
        tokens = (
            np.random.default_rng(1)
            .integers(1, FIXTURE["vocab_size"], (counted + count, length))
            .tolist()
        )
        return tokens[:counted], [Texts("random tokens", batches(tokens[counted:]))]
    tokenizer = open_tokenizer(folder / "tokenizer.json")

    def pieces(paths: Sequence[Path], seed: int) -> list[list[int]]:
        ids = tokenizer.encode("\n".join(path.read_text(errors="replace") for path in paths)).ids
        whole = [ids[n : n + length] for n in range(0, len(ids) - length + 1, length)]
        return [whole[n] for n in np.random.default_rng(seed).permutation(len(whole))]

    python = pieces(sources(8 if a.quick else None), 0)[: counted + count]
    english = pieces([Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"], 0)[:count]
    counted = min(counted, len(python) - count)
    return python[:counted], [
        Texts("Python", batches(python[counted:])),
        Texts("English", batches(english)),
    ]


def prepare(a: argparse.Namespace, name: str, sizes: dict[str, int]) -> None:
    """Make a model and its path tables, unless they are there."""
    from jmoe.inference.engine import Engine

    folder = a.folder / name
    if not (folder / "config.json").is_file():
        if name == "trained":
            train(a, folder)
        else:
            shares = zipf_shares(sizes["layers"], 16, ZIPF, 0)
            write_skewed_checkpoint(folder, shares, **(QUICK_FIXTURE if a.quick else FIXTURE))
    if all((folder / f"l{length}").is_dir() for length in LENGTHS):
        return
    counted, _ = texts(a, name, folder, sizes)
    length = sizes["prompt_tokens"]
    options = EngineConfig(
        max_batch=8, max_seq_len=length + 2, prefill_chunk_tokens=length, estimator=None
    )
    with Engine(folder, options) as engine:
        for path_length, table in count_path_tables(engine, folder, counted).items():
            (folder / f"l{path_length}").mkdir(exist_ok=True)
            table.save(folder / f"l{path_length}")


# Measurement, on rank 0


class Turns:
    """An engine, the contestants that share it, and the seconds of their batches."""

    def __init__(self, engine: Engine, folder: Path, kind: Texts) -> None:
        self.engine, self.folder, self.kind = engine, folder, kind
        self.seconds: dict[str, list[list[float]]] = {}  # rounds of batches
        self.stats: dict[str, list[PlacementStats]] = {}
        self.choices: list[list[np.ndarray]] = []  # of every batch but the first, layers

    def __call__(self, name: str) -> None:
        """Run all batches from the even placement; the first one is not timed."""
        self.engine._runner.start_contestant(name, str(self.folder))
        seconds = []
        for number, prompts in enumerate(self.kind.batches):
            if number == 1:
                self.engine.reset_stats()
            begun = time.perf_counter()
            self.engine.generate(prompts, max_new_tokens=1, ignore_eos=True)
            seconds.append(time.perf_counter() - begun)
            if name == "even" and not self.seconds.get(name) and number:
                self.choices.append(self.engine.last_expert_choices())
        self.seconds.setdefault(name, []).append(seconds[1:])
        self.stats.setdefault(name, []).append(self.engine.stats().placement)

    def all_ms(self, name: str) -> np.ndarray:
        return 1e3 * np.ravel(self.seconds[name])

    def rows(self) -> list[JsonObject]:
        even = np.asarray(self.seconds["even"])
        rows = []
        for name, rounds in self.seconds.items():
            placed = self.stats[name]
            steps = sum(map(len, rounds))
            ratios = [float(np.median(x) / np.median(y)) for x, y in zip(even, rounds, strict=True)]
            p95_ms = [float(np.percentile(self.all_ms(x), 95)) for x in (name, "even")]
            estimates = sum(stats.estimates for stats in placed)
            replans = sum(stats.replans for stats in placed)
            row = {
                "contestant": name,
                "batch_ms_median": report.median(self.all_ms(name), 2),
                "batch_ms_p95": round(p95_ms[0], 2),
                "ratio": report.median(ratios),
                "ratio_quartiles": [round(x, 3) for x in np.percentile(ratios, (25, 75)).tolist()],
                "ratio_p95": round(p95_ms[1] / p95_ms[0], 3),
                "replanned": round(replans / estimates, 3) if estimates else None,
                "max_over_mean": round(
                    float(np.mean([1 / np.asarray(s.balancedness) for s in placed])), 3
                ),
                "swaps_per_batch": round(sum(s.swaps for s in placed) / steps, 2),
                "copy_ms_per_batch": round(1e3 * sum(s.swap_s for s in placed) / steps, 2),
                "planning_ms_per_batch": round(1e3 * sum(s.planning_s for s in placed) / steps, 2),
                "round_ms": [round(1e3 * float(np.median(batches)), 1) for batches in rounds],
            }
            rows.append(report.progress({"text": self.kind.kind, **row}))
        return rows


def measure(a: argparse.Namespace, sizes: dict[str, int], engines: dict[str, Engine]) -> JsonObject:
    """Return the figures of every model."""
    return {name: measure_model(a, name, engine, sizes) for name, engine in engines.items()}


def measure_model(
    a: argparse.Namespace, name: str, engine: Engine, sizes: dict[str, int]
) -> JsonObject:
    folder, config = a.folder / name, engine.config
    _, kinds = texts(a, name, folder, sizes)
    turns = [Turns(engine, folder, kind) for kind in kinds]
    engine._runner.enable_swaps(*engine._runner.measure_swap_costs())
    costs = engine._runner.placer.costs
    begun = time.monotonic()
    for number in range(a.rounds or sizes["rounds"]):
        if number >= 2 and time.monotonic() - begun > 60 * a.minutes:
            break
        for contestant in CONTESTANTS:
            turns[0](contestant)
        for other in turns[1:]:
            for contestant in ("even", "ideal", LINA):
                other(contestant)
    first = turns[0]
    layers = measure_layer_rows(
        engine, folder, first.kind.batches, ("even", "ideal", LINA, *WITHOUT)
    )
    use_LE = counts_of(first.choices, config.num_experts)
    plan = measure_planning_ms(folder, first.choices, engine, SIMULATED_DEVICES)
    placement = engine.residency.placements[0]
    return {
        "experts": config.num_experts,
        "experts_per_token": config.num_experts_per_tok,
        "layers_with_experts": config.num_moe_layers,
        "tokens_of_a_batch": len(first.kind.batches[0]) * sizes["prompt_tokens"],
        "slots_per_device": placement.slots_per_device,
        "costs_us": {
            "row": round(1e6 * costs.row_s, 3),
            "copy_of_an_expert": round(1e6 * costs.copy_s, 1),
        },
        "most_over_least_popular": [
            round(float(use_E.max() / max(1, use_E.min())), 2) for use_E in use_LE
        ],
        "most_over_mean_popular": [round(float(use_E.max() / use_E.mean()), 2) for use_E in use_LE],
        "batches": [row for turn in turns for row in turn.rows()],
        "table_5": table_5(first, folder, config),
        "accuracy_by_layer": [
            row
            for turn in turns
            for row in measure_estimate_accuracy(turn.kind.kind, turn.choices, folder, config)
        ],
        "layers": layers,
        "overhead_ms": plan,
        "simulated": simulated(first, folder, engine, plan),
    }


def counts_of(steps: list[list[np.ndarray]], num_experts: int) -> np.ndarray:
    """Return [L, E]: choices summed over all steps."""
    layers = [np.concatenate(choices).ravel() for choices in zip(*steps, strict=True)]
    return np.array([np.bincount(chosen, minlength=num_experts + 1)[:-1] for chosen in layers])


def table_5(turn: Turns, folder: Path, config: ModelConfig) -> list[JsonObject]:
    """Return a row for each path length and kind of table."""
    rows = {
        (row["path_length"], row["kept"]): row
        for row in measure_estimate_accuracy("", turn.choices, folder, config)
    }
    ideal = [np.median(seconds) for seconds in turn.seconds["ideal"]]
    found = []
    for name, (length, whole) in TABLES.items():
        kept = "all" if whole else "top k"
        stats, own = turn.stats[name], [np.median(seconds) for seconds in turn.seconds[name]]
        found.append(
            {
                "path_length": length,
                "kept": kept,
                "sets_equal": round(float(np.mean(rows[length, kept]["sets_equal"])), 3),
                "share_right": round(float(np.mean(rows[length, kept]["share_right"])), 3),
                "replanned": round(
                    sum(s.replans for s in stats) / sum(s.estimates for s in stats), 3
                ),
                "time_over_ideal": report.ratio(own, ideal),
                "paper_replanned": PAPER["replans_l_3"] if length == 3 else None,
            }
        )
    return [report.progress(row) for row in found]


class Simulator(NamedTuple):
    """A batch's seconds as a function of the busiest device's rows, fitted to measured batches."""

    turn: Turns
    folder: Path
    engine: Engine
    fixed_s: float
    row_s: float

    @property
    def costs(self) -> SwapCosts:
        """The costs that the engine measured."""
        costs: SwapCosts = self.engine._runner.placer.costs
        return costs

    @property
    def fair(self) -> np.ndarray:
        """The rows of each device in each batch, if all devices have the same."""
        num_tokens, k = self.turn.choices[0][0].shape
        layers = self.engine.config.num_moe_layers
        return np.full(len(self.turn.choices), num_tokens * k / NUM_RANKS * layers)

    def busiest(
        self, name: str, devices: int, slots: int, steps: list[list[np.ndarray]]
    ) -> ReplayTotals:
        """Replay a contestant's planner on recorded choices."""
        config = self.engine.config
        places = WeightlessPlacedExperts(config, devices, slots)
        return replay_choices(
            make_contestant_planner(name, self.folder, places, self.costs, config), steps
        )

    def seconds(self, found: ReplayTotals, per_plan_s: float) -> np.ndarray:
        """Return the seconds of each batch."""
        taken: np.ndarray = (
            self.fixed_s
            + self.row_s * found.busiest
            + self.costs.copy_s * found.copies
            + per_plan_s * found.plans
        )
        return taken

    def fitted(self, slots: int) -> "Simulator":
        """Return this simulator, fitted to the measured batches of `even` and `ideal`."""
        even = self.busiest("even", NUM_RANKS, slots, self.turn.choices)
        even_s, ideal_s = (
            np.median(self.turn.seconds[name][::2], axis=0) for name in ("even", "ideal")
        )
        rows = np.concatenate([even.busiest, self.fair])
        row_s, fixed_s = np.polyfit(rows, np.concatenate([even_s, ideal_s]), 1)
        return self._replace(row_s=row_s, fixed_s=fixed_s)


def simulated(turn: Turns, folder: Path, engine: Engine, plan: JsonObject) -> JsonObject:
    """Return the simulated figures of `lina` here, their error, and a row for 16 devices."""
    slots = engine.residency.placements[0].slots_per_device
    here = Simulator(turn, folder, engine, 0.0, 0.0).fitted(slots)
    if here.row_s <= 0 or here.fixed_s <= 0:
        return {
            "within_10_percent": False,
            "note": "batches of even and ideal do not differ as their rows do",
        }
    plan_s = 1e-3 * (plan["plan_2_devices"] + plan["lookup"])
    lina = here.busiest(LINA, NUM_RANKS, slots, turn.choices)
    predicted = 1e3 * np.median(here.seconds(lina, plan_s))
    found_ms = 1e3 * np.median(turn.seconds[LINA][1::2])
    error = float(predicted / found_ms - 1)
    result: JsonObject = {
        "fixed_ms": round(1e3 * here.fixed_s, 2),
        "row_us": round(1e6 * here.row_s, 3),
        "row_us_timed_alone": round(1e6 * here.costs.row_s, 3),
        "lina_ms_predicted": round(float(predicted), 2),
        "lina_ms_measured": round(float(found_ms), 2),
        "error": round(error, 4),
        "within_10_percent": abs(error) <= 0.1,
    }
    if engine.config.num_experts < SIMULATED_DEVICES:
        return result | {
            "note": f"{engine.config.num_experts} experts leave some of {SIMULATED_DEVICES} "
            "devices without one"
        }
    assumed = "a batch's fixed part, its exchange included, takes 16 devices what it takes 2"
    return result | {"assumed": assumed, "rows": [report.progress(many_devices(here, plan))]}


def many_devices(here: Simulator, plan: JsonObject) -> JsonObject:
    """Return the row for SIMULATED_DEVICES devices, each with as many tokens as here."""
    choices, many = here.turn.choices, SIMULATED_DEVICES // NUM_RANKS
    steps = [
        [
            np.concatenate(chosen)
            for chosen in zip(*(choices[(n + m) % len(choices)] for m in range(many)))
        ]
        for n in range(len(choices))
    ]
    wide_s = 1e-3 * (plan[f"plan_{SIMULATED_DEVICES}_devices"] + plan["lookup"])
    even = here.busiest("even", SIMULATED_DEVICES, 4, steps)
    lina = here.busiest(LINA, SIMULATED_DEVICES, 4, steps)
    ideal = even._replace(busiest=here.fair)
    times = {
        name: 1e3 * here.seconds(x, wide_s * (name == "lina"))
        for name, x in (("even", even), ("ideal", ideal), ("lina", lina))
    }
    return {
        "devices": f"{SIMULATED_DEVICES} (simulated)",
        **{f"{name}_ms": round(float(np.median(x)), 2) for name, x in times.items()},
        "ratio": round(float(np.median(times["even"] / times["lina"])), 3),
        "ratio_of_ideal": round(float(np.median(times["even"] / times["ideal"])), 3),
        "even_max_over_mean": round(float(np.mean(even.busiest / here.fair)), 3),
        "lina_max_over_mean": round(float(np.mean(lina.busiest / here.fair)), 3),
        "lina_replanned": round(lina.replanned, 3),
        "copies_per_batch": round(float(np.mean(lina.copies)), 2),
    }


def notes(found: JsonObject) -> list[str]:
    """Return sentences on the limits of these figures."""
    said = [
        "tail of the all-to-all: an exchange and the experts between its two halves are one "
        "program, so its time is"
        " what a layer's exchange and experts take but for the rows of the least busy device, "
        "which are timed alone",
        "the paper's figures are of 4 and 16 GPUs; here two processes have a core each, and at "
        "1000 Mbit/s a link",
        "the simulated row is no measurement and satisfies no criterion",
    ]
    for name, model in found.items():
        if not model["simulated"]["within_10_percent"]:
            error = model["simulated"].get("error")
            why = (
                "could not be fitted" if error is None else f"is {error:+.1%} off what was measured"
            )
            said.append(f"{name}: the simulator {why}: its rows say nothing")
    return said


def main() -> None:
    a = parse()
    sizes = QUICK_SIZES if a.quick else SIZES
    if a.quick:
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # a third of the time to compile
    if a.rank is not None:
        pin_to_one_core(a.rank)
        load = {name: (a.folder / name, engine_config(a.folder / name, sizes)) for name in a.models}
        place = EngineRank(a.rank, NUM_RANKS, a.port, a.rate)
        run_rank(place, a.folder, load, partial(measure, a, sizes))
        return
    with tempfile.TemporaryDirectory(prefix="jmoe-lina-") as temporary:
        a.folder = a.folder or Path(temporary)
        a.folder.mkdir(parents=True, exist_ok=True)
        for name in a.models:
            prepare(a, name, sizes)
        if a.prepare:
            return
        found = run_ranks(NUM_RANKS, a.rate, "--folder", str(a.folder))
    options = (
        report.options(a, "rank", "port", "folder", "quick", "prepare", "rounds", "minutes") | sizes
    )
    options["rounds"] = {
        name: len(model["batches"][0]["round_ms"]) for name, model in found.items()
    }
    result = {
        "benchmark": "Lina's scheduling in inference",
        "options": options,
        "paper": PAPER,
        "notes": notes(found),
    }
    report.finish(result | found | {"versions": report.versions("jax", "jaxlib")})


def engine_config(folder: Path, sizes: dict[str, int]) -> EngineConfig:
    """Return both processes' config: slots for three quarters of a layer's experts each."""
    from jmoe.models.lazy_checkpoint import LazyCheckpoint

    with LazyCheckpoint(folder) as checkpoint:
        slots = max(1, 3 * checkpoint.config.num_experts // 4)
    tokens = sizes["prompt_tokens"]
    return EngineConfig(
        max_batch=sizes["prompts"],
        max_seq_len=tokens + 2,
        prefill_chunk_tokens=tokens,
        max_prefill_tokens=sizes["prompts"] * tokens,
        estimator="counts",
        mesh=EngineMesh(devices=NUM_RANKS, placement="lina", slots_per_device=slots),
    )


if __name__ == "__main__":
    main()
