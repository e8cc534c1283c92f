"""Measure how well the next layer's experts are guessed, and the stalls that guesses save.

    python -m benchmarks.paper.popularity --model DIR --text FILE

Lina, section 5.1 and Table 5: experts of layer i + 1 from a token's path through the l layers
before (l = 1, 3, 6), beside the next layer's router applied to this layer's input and the experts
used most lately. A text is cut into pieces of the model's length; the tables are counted on some,
drawn at random, everything is measured on others; --other FILE: accuracy and popularity on another
kind of text too, by the same tables. The last line is one JSON object:

- accuracy: share of the experts that tokens chose (top-k) among the k and the 2k guessed for each
  token, means over layers; prefilled text. counts: of tokens one by one, as a decoder sees them.
- popularity: of steps of prefilled text, layer by layer: distance of the estimated popularity from
  the actual one (half the sum of absolute differences over all tokens), and share of steps whose 2k
  most popular experts are not the estimated ones (which makes Lina plan anew), also for a table of
  top-k experts.
- most_popular: of each layer, the four experts that most tokens chose, and their share of all
  choices (Lina, Table 2).
- decoding (not with --rounds 0): the streaming engine with part of the experts on the device and a
  slow link, each estimator in turn in every round; medians.
- lookup_ms: of a table, for all of a step's tokens and one layer.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np

from benchmarks.lib import report
from benchmarks.lib.engines import run_description
from benchmarks.lib.report import JsonObject
from benchmarks.serve.decoding import measure
from jmoe.config.engine import EngineConfig
from jmoe.inference.engine import Engine
from jmoe.inference.path_table import PathCounter, PathTable
from jmoe.inference.popularity import Estimator, RouterEstimator
from jmoe.inference.sampling_params import SamplingParams
from jmoe.layers.router import Router
from jmoe.memory.slot_table import HitCounts
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.models.tokenizer_file import open_tokenizer

LENGTHS = (1, 3, 6)
ONE_BY_ONE = 2000  # tokens


def arguments() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--model", type=Path, required=True, help="a Hugging Face folder with a tokenizer.json"
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--other", type=Path, help="another kind of text")
    parser.add_argument("--profile-tokens", type=int, default=100_000)
    parser.add_argument("--test-tokens", type=int, default=20_000)
    parser.add_argument(
        "--device-fraction", type=float, default=0.5, help="of the experts, on the device"
    )
    parser.add_argument("--host-bytes-per-s", type=float, default=3e8)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="of decoding; 0: none")
    return parser.parse_args()


class Listener(Estimator):
    """Records each layer's chosen experts, and the 2k that the next layer's router would choose."""

    def __init__(self, folder: Path) -> None:
        with LazyCheckpoint(folder) as checkpoint:
            self.config, layers = checkpoint.config, checkpoint.load_dense_modules()[1]
        routers = []
        for layer in layers:
            if layer.moe is not None:
                assert isinstance(layer.moe.router, Router)
                layer.moe.router.num_experts_per_tok *= 2
                routers.append(layer.moe.router)
        self._router = RouterEstimator(routers, self.config.num_experts)
        self.guesses: list[list[np.ndarray]] = []  # of steps, of layers from the second on: [T, 2K]
        self.choices: list[list[np.ndarray]] = []  # of steps, of layers: [T, K]

    def start_next_estimate(self, moe_layer: int, hidden: Sequence[jax.Array]) -> None:
        self._router.start_next_estimate(moe_layer, hidden)

    def estimate_next_experts(self, path: Sequence[np.ndarray]) -> np.ndarray:
        if len(path) == 1:
            self.guesses.append([])
            self.choices.append([])
        self.choices[-1].append(path[-1][path[-1][:, 0] < self.config.num_experts])
        if len(path) < self.config.num_moe_layers:
            self.guesses[-1].append(self._router.estimate_next_experts(path))
        return np.zeros(0, np.int32)


def draw(tokens: list[int], size: int, seed: int = 0) -> list[list[int]]:
    """Return the whole pieces of a text, in random order."""
    pieces = [tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size)]
    return [pieces[n] for n in np.random.default_rng(seed).permutation(len(pieces))]


def listen(folder: Path, prompts: list[list[int]]) -> Listener:
    """Return what a listener recorded while an engine prefilled the prompts."""
    listener = Listener(folder)
    with LazyCheckpoint(folder) as checkpoint:
        device_bytes = (
            checkpoint.expert_bytes
            * checkpoint.config.num_moe_layers
            * checkpoint.config.num_experts
        )
    config = EngineConfig(
        max_batch=1, prefill_chunk_tokens=2048, policy="experts", device_bytes=device_bytes
    )
    with Engine(folder, config) as engine:
        engine._runner.estimator = listener
        for prompt in prompts:
            engine.add_request(prompt, SamplingParams(max_new_tokens=1, ignore_eos=True))
        while engine.has_unfinished:
            engine.step()
    return listener


def hits(guessed_TG: np.ndarray, chosen_TK: np.ndarray) -> float:
    """Return the share of chosen experts that were guessed."""
    return float((guessed_TG[:, :, None] == chosen_TK[:, None, :]).any(axis=1).mean())


def ranked_by_path(table: PathTable, path: Sequence[np.ndarray]) -> np.ndarray:
    """Return int [T, 2K]: the next layer's likeliest experts by each token's path; -1 for none."""
    last, most = path[-1], 2 * table.header.num_experts_per_tok
    seen: dict[bytes, np.ndarray] = {}
    ranked = np.full((len(last), most), -1)
    for token in range(len(last)):
        own = [choices[token : token + 1] for choices in path]
        key = np.concatenate(own[-table.header.path_length :]).tobytes()
        if key not in seen:
            popularity_E = table.estimate_popularity(own).popularity_E
            order = np.argsort(-popularity_E, kind="stable")[:most]
            seen[key] = np.where(popularity_E[order] > 0, order, -1)
        ranked[token] = seen[key]
    return ranked


def ranked_by_counts(
    steps: list[list[np.ndarray]], layer: int, num_experts: int, most: int
) -> np.ndarray:
    """Return int [T, 2K]: a layer's most used experts before each token, by an engine's counts."""
    counts, ranked = HitCounts(num_experts), []
    for choices in steps:
        for own_K in choices[layer]:
            ranked.append(np.argsort(-counts.scores, kind="stable")[:most])
            counts.count_step(own_K)
            if len(ranked) == ONE_BY_ONE:
                return np.array(ranked)
    return np.array(ranked)


def accuracy(listener: Listener, tables: dict[int, PathTable]) -> list[JsonObject]:
    """Return rows: estimator, share of right guesses."""
    config, layers = listener.config, range(listener.config.num_moe_layers - 1)
    k = config.num_experts_per_tok
    chosen = [
        np.concatenate([step[layer] for step in listener.choices])
        for layer in range(config.num_moe_layers)
    ]
    guesses = {
        "router": [np.concatenate([step[layer] for step in listener.guesses]) for layer in layers]
    }
    guesses["counts"] = [
        ranked_by_counts(listener.choices, n + 1, config.num_experts, 2 * k) for n in layers
    ]
    for length, table in tables.items():
        guesses[f"paths, l = {length}"] = [ranked_by_path(table, chosen[: n + 1]) for n in layers]
    rows = []
    for name, by_layer in guesses.items():
        share = {
            f"among_{most}": [
                hits(guess[:, :most], chosen[n + 1][: len(guess)])
                for n, guess in enumerate(by_layer)
            ]
            for most in (k, 2 * k)
        }
        means = {key: round(statistics.mean(values), 4) for key, values in share.items()}
        rows.append(
            report.progress(
                {"estimator": name}
                | means
                | {"by_layer": [round(x, 3) for x in share[f"among_{k}"]]}
            )
        )
    return rows


def popularity(listener: Listener, counters: dict[int, PathCounter]) -> list[JsonObject]:
    """Return rows: distance of the summed estimates from the actual choices of a step."""
    config, rows = listener.config, []
    k, experts = config.num_experts_per_tok, config.num_experts
    for length, counter in counters.items():
        for kept in (k, experts):
            table, far, other, without = counter.make_table("", kept), [], [], []
            for step in listener.choices:
                for layer in range(config.num_moe_layers - 1):
                    estimate = table.estimate_popularity(step[: layer + 1])
                    actual_E = np.bincount(step[layer + 1].ravel(), minlength=experts)
                    far.append(np.abs(estimate.popularity_E - actual_E).sum() / 2 / actual_E.sum())
                    most = [
                        set(np.argsort(-x, kind="stable")[: 2 * k])
                        for x in (estimate.popularity_E, actual_E)
                    ]
                    other.append(most[0] != most[1])
                    without.append(estimate.without_share)
            means = {"distance": far, "plans_anew": other, "tokens_without_estimate": without}
            row = {"path_length": length, "kept": kept, "paths": len(table.keys)}
            rows.append(
                report.progress(
                    row | {key: round(float(np.mean(x)), 4) for key, x in means.items()}
                )
            )
    return rows


def lookup_ms(
    listener: Listener, tables: dict[int, PathTable], tokens: int = 4096
) -> list[JsonObject]:
    """Return rows: median milliseconds of looking up a step's tokens, at the deepest layer."""
    whole = [
        np.concatenate([step[n] for step in listener.choices])
        for n in range(listener.config.num_moe_layers)
    ]
    path, rows = [np.resize(choices, (tokens, choices.shape[1])) for choices in whole[:-1]], []
    for length, table in tables.items():
        lookups = {"popularity": table.estimate_popularity, "likely": table.most_frequent_experts}
        taken: dict[str, list[float]] = {name: [] for name in lookups}
        for _ in range(50):
            for name, seconds in taken.items():
                begun = time.perf_counter()
                lookups[name](path)
                seconds.append(1e3 * (time.perf_counter() - begun))
        rows.append(
            {"path_length": length, "tokens": tokens}
            | {name: report.median(s, 3) for name, s in taken.items()}
        )
    return rows


def decoding(a: argparse.Namespace, folder: Path, tables: dict[int, PathTable]) -> list[JsonObject]:
    """Return rows: an estimator and a batch, with the streaming engine's counters."""
    with LazyCheckpoint(folder) as checkpoint:
        config = checkpoint.config
        experts_bytes = checkpoint.expert_bytes * config.num_moe_layers * config.num_experts
    sizes = {
        "max_batch": max(a.batch),
        "max_seq_len": a.prompt + a.new_tokens + 1,
        "policy": "experts",
    }
    sizes |= {"device_bytes": int(a.device_fraction * experts_bytes), "expert_tier": "host"}
    rows = []
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name in (None, "router", "counts", *tables):
            if isinstance(name, int):
                tables[name].save(folder)
            options = EngineConfig(**sizes, estimator="paths" if isinstance(name, int) else name)
            engine = Engine(
                folder, options, bandwidth_limit_bytes_per_s={"host": a.host_bytes_per_s}
            )
            engines[f"paths, l = {name}" if isinstance(name, int) else str(name)] = (
                stack.enter_context(engine)
            )
        for batch in a.batch:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
            for number in range(a.rounds + 1):
                for name, engine in engines.items():
                    found[name].append(measure(a, engine, batch, number))
            for name, rounds in found.items():
                keys = (
                    "decode_tokens_per_s",
                    "hit_rate",
                    "guessed_right_fraction",
                    "waited_fraction",
                )
                row = {
                    key: report.median(r[key] for r in rounds[1:])
                    for key in (*keys, "estimate_fraction")
                }
                ratios = report.ratio(
                    *([r[keys[0]] for r in x[1:]] for x in (rounds, found["None"]))
                )
                row |= {
                    "against_no_guess": ratios,
                    "bytes_per_token": report.median(r["bytes_per_token"] for r in rounds[1:]),
                }
                rows.append(report.progress({"estimator": name, "batch": batch} | row))
    return rows


def most_popular(use_NE: np.ndarray) -> list[JsonObject]:
    """Return rows: a layer's four most used experts."""
    order_NE = np.argsort(-use_NE, axis=1, kind="stable")[:, :4]
    return [
        {
            "layer": layer,
            "experts": order_E.tolist(),
            "share_of_choices": round(float(use_E[order_E].sum() / use_E.sum()), 3),
        }
        for layer, (use_E, order_E) in enumerate(zip(use_NE, order_NE, strict=True), 1)
    ]


def measured(heard: Listener, counters: dict[int, PathCounter]) -> JsonObject:
    """Return skew, accuracy and popularity of one kind of text."""
    experts = heard.config.num_experts
    tables = {length: counter.make_table("", experts) for length, counter in counters.items()}
    layers = [np.concatenate(steps).ravel() for steps in zip(*heard.choices, strict=True)]
    use_NE = np.array([np.bincount(chosen, minlength=experts) for chosen in layers])
    return {
        "most_popular": most_popular(use_NE),
        "most_over_mean_popular": [round(float(use_E.max() / use_E.mean()), 2) for use_E in use_NE],
        "accuracy": accuracy(heard, tables),
        "popularity": popularity(heard, counters),
        "lookup_ms": lookup_ms(heard, tables),
    }


def main() -> None:
    a = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(shutil.copytree(a.model, Path(scratch) / "model"))
        with LazyCheckpoint(folder) as checkpoint:
            config, fingerprint = checkpoint.config, checkpoint.routing_fingerprint
            size = checkpoint.choose_sequence_length(None) - 1
        tokenizer = open_tokenizer(folder / "tokenizer.json")
        num_counted, num_tested = a.profile_tokens // size, a.test_tokens // size
        pieces = draw(tokenizer.encode(a.text.read_text()).ids, size)
        assert len(pieces) >= num_counted + num_tested, (
            f"{a.text} has {len(pieces)} pieces of {size} tokens"
        )
        counted, tested = pieces[:num_counted], pieces[num_counted : num_counted + num_tested]
        sizes = (config.num_moe_layers, config.num_experts, config.num_experts_per_tok)
        counters = {length: PathCounter(*sizes, length) for length in LENGTHS}
        for step in listen(folder, counted).choices:
            for counter in counters.values():
                counter.count_step(step)
        result: JsonObject = dict(
            zip(("layers", "experts", "experts_per_token"), sizes, strict=True)
        )
        result["text"] = measured(listen(folder, tested), counters)
        if a.other is not None:
            others = draw(tokenizer.encode(a.other.read_text()).ids, size)[:num_tested]
            result["other_text"] = measured(listen(folder, others), counters)
        options = run_description(a)
        a.text = Path(scratch) / "text"
        a.text.write_text("\n".join(map(tokenizer.decode, tested)))
        top = {length: counter.make_table(fingerprint) for length, counter in counters.items()}
        if a.rounds:
            result["decoding"] = decoding(a, folder, top)
        report.finish(result | options)


if __name__ == "__main__":
    main()
