"""Run every measurement that needs a GPU, in at most nine minutes.

    python benchmarks/lib/gpu.py    all parts, into benchmarks/results/gpu_<part>.json
    python benchmarks/lib/gpu.py --only decode_ring training_olmoe
    python benchmarks/lib/gpu.py --cpu
        the same parts at toy sizes on this machine, into a temporary folder

A part is one of the other benchmarks in a process of its own with a limit of its own. One that
fails or runs into its limit is named with its last lines and where it was, and the rest goes on:
with a smaller model if the model could not be written. What has a result already is not run again
(--fresh runs it). Each file says the date, the device, the versions and, in `limits`,
how near it came to what the part `floors` measured of the same device and to the data sheet: the
FLOP/s of a training step, the copies of a decode step over the link.
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
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from benchmarks import BENCHMARKS, RESULTS
from benchmarks.lib import report
from benchmarks.lib.parts import run_part
from benchmarks.lib.published import LAYERS, published_config, tiny_config
from benchmarks.lib.report import JsonObject
from jmoe.run.metrics import peak_flops_per_s

BUDGET_S = 9 * 60


@dataclass(frozen=True)
class Part:
    """A benchmark with its options and limit; skipped if the part that it `needs` failed."""

    name: str
    command: str
    seconds: int
    needs: str | None = None
    instead: str | None = None  # the command of something smaller, run if `command` failed


FULL = {
    "floors": "",
    "training": "--batch 4 --seq 2048",
    "decode": "--batch 1 8 64 --prompt 128 --rounds 3",
    "ring": "--ring-slots 2",
    "retention": "--hidden-size 2048 --intermediate-size 1024 --layers 4 --experts 64 --top-k 8 "
    "--rounds 5 "
    "--tokens 8192 16384 32768",
}
TOY = {
    "floors": "--toy",
    "training": "--batch 2 --seq 64 --steps 2",
    "decode": "--batch 1 8 --prompt 16 --new-tokens 4 --rounds 1",
    "ring": "--ring-slots 1",
    "retention": "--hidden-size 64 --intermediate-size 64 --layers 2 --experts 4 "
    "--sequence-length 64 --rounds 1 --micro-batch-tokens 128 "
    "--tokens 128 256",
}


def make_parts(scratch: Path, on_cpu: bool) -> list[Part]:
    """Return all parts, those with the quickest figures first."""
    sizes = TOY if on_cpu else FULL
    found = [Part("floors", f"kernels/floors.py floors {sizes['floors']}".strip(), 45)]
    if on_cpu:
        found.append(Part("kernels_tiny", "kernels/speed.py --gpu --toy", 100))
    else:
        shapes = ("olmoe", "qwen3-30b-a3b", "mixtral-8x7b")
        found += [
            Part(f"kernels_{shape}", f"kernels/speed.py --gpu --shapes {shape}", 75)
            for shape in shapes
        ]
    found.append(Part("slot_formats", f"kernels/slot_formats.py{' --toy' if on_cpu else ''}", 110))
    found.append(Part("triton_forms", f"kernels/triton_forms.py{' --toy' if on_cpu else ''}", 90))
    for dtype in ("float32", "bfloat16"):  # whose losses must be nearly the same
        small = f"--batch 2 --seq {64 if on_cpu else 1024} --steps 10 --lr 0.0003 --dtype {dtype}"
        found.append(
            Part(
                f"losses_{dtype}",
                f"train/step.py --hf-config {scratch / 'olmoe_small.json'} {small}",
                60,
            )
        )
    for name in LAYERS:
        command = f"train/step.py --hf-config {scratch / name}.json {sizes['training']}"
        found.append(Part(f"training_{name}", command, 75))
    write_model = f"serve/random_model.py {scratch}/%s.json {scratch / 'model'}"
    model, small = write_model % "olmoe", write_model % "olmoe_small"
    found.append(Part("model", model, 60, instead=small))
    decode = f"serve/decoding.py --model {scratch / 'model'} {sizes['decode']} --policy"
    below = " --expert-tier host"
    for policy in ("resident", f"ring{below} {sizes['ring']}", f"experts{below}", f"hybrid{below}"):
        found.append(Part(f"decode_{policy.split()[0]}", f"{decode} {policy}", 90, needs="model"))
    found.append(Part("retention", f"offload/training.py retention {sizes['retention']}", 130))
    found.append(
        Part("collectives", f"kernels/floors.py collectives {sizes['floors']}".strip(), 45)
    )
    slower = 2 if on_cpu else 1  # to compile
    return [replace(part, seconds=slower * part.seconds) for part in found]


def fractions_of_limits(result: JsonObject, floors: JsonObject) -> JsonObject:
    """Return how near a result came to its device's measured limits and to the data sheet.

    mfu: FLOP/s of a model's step over the data sheet's peak, None if that is unknown.
    of_dense_product: over the FLOP/s of one large product. of_link: copies of a decode step, by
    batch, over copies of pinned memory.
    """
    near: JsonObject = {}
    reached = floors.get("floors", {}) if floors.get("device") == result.get("device") else {}
    if flops_per_s := result.get("model_flops_per_s"):
        peak = peak_flops_per_s(str(result.get("device")))
        near["mfu"] = None if peak is None else round(flops_per_s / peak, 4)
        near["of_dense_product"] = (
            round(flops_per_s / reached["flops_per_s"], 4) if reached else None
        )
    if (copied := result.get("copied_bytes_per_s")) and any(copied.values()):
        link = reached.get("host_to_device_bytes_per_s")
        near["of_link"] = link and {batch: round(rate / link, 4) for batch, rate in copied.items()}
    return near


def write_fractions_of_limits(out: Path) -> JsonObject:
    """Write `fractions_of_limits` into every result that has any, and return them by name.

    Results and floors may be written in any order.
    """
    results = {path: json.loads(path.read_text()) for path in sorted(out.glob("gpu_*.json"))}
    floors, found = results.get(out / "gpu_floors.json", {}), {}
    for path, result in results.items():
        if near := fractions_of_limits(result, floors):
            found[path.stem.removeprefix("gpu_")] = near
            path.write_text(json.dumps(result | {"limits": near}, indent=1) + "\n")
    return found


def main() -> int:
    """Run the parts without a result; the exit status is 1 if a part failed."""
    parser = report.parser(__doc__)
    parser.add_argument("--cpu", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts alone")
    parser.add_argument("--fresh", action="store_true", help="also what has a result already")
    parser.add_argument(
        "--list", action="store_true", help="print the parts and their commands, and end"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of results; default: benchmarks/results, with --cpu a temporary one",
    )
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, help="seconds for all parts together"
    )
    a = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jmoe-gpu-") as folder:
        return run_chosen_parts(a, parser, Path(folder))


def run_chosen_parts(a: argparse.Namespace, parser: argparse.ArgumentParser, scratch: Path) -> int:
    """Run the chosen parts that have no result."""
    all_parts = make_parts(scratch, a.cpu)
    names = [part.name for part in all_parts]
    if unknown := set(a.only or ()) - set(names):
        parser.error(f"--only: {', '.join(sorted(unknown))}: must be among {', '.join(names)}")
    if a.list:
        for part in all_parts:
            print(part.name, part.command)
        return 0
    for name in LAYERS:
        config = tiny_config(name) if a.cpu else published_config(name, LAYERS[name])
        (scratch / f"{name}.json").write_text(json.dumps(config))
        (scratch / f"{name}_small.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    out: Path = a.out or (scratch / "results" if a.cpu else RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    environment = {"JAX_COMPILATION_CACHE_DIR": str(scratch / "compiled")} | os.environ
    if a.cpu:
        environment["JAX_PLATFORMS"] = "cpu"
    there = set() if a.fresh else {name for name in names if (out / f"gpu_{name}.json").exists()}
    wanted = set(a.only or names) - there - {"model"}
    wanted |= {part.needs for part in all_parts if part.needs and part.name in wanted}
    failed, ends = JsonObject(), time.perf_counter() + a.budget_s
    for part in all_parts:
        if part.name not in wanted:
            continue
        left_s = ends - time.perf_counter()
        if part.needs in failed:
            done = {"failed": f"not run, for {part.needs} failed"}
        elif left_s <= 0:
            done = {"failed": "no time left"}
        else:
            done, larger = run_part_or_fallback(part, left_s, environment)
            failed |= larger
        result = done.pop("result", None)
        report.progress({"part": part.name} | done)
        if result is None:
            failed[part.name] = done
        elif part.name != "model":
            text = json.dumps(result_file_content(part, result), indent=1).replace(
                str(scratch), "FOLDER"
            )
            (out / f"gpu_{part.name}.json").write_text(text + "\n")
            write_fractions_of_limits(out)
    report.finish(
        {
            "ran": sorted(wanted - set(failed)),
            "failed": failed,
            "limits": write_fractions_of_limits(out),
        }
    )
    return 1 if failed else 0


def run_part_or_fallback(
    part: Part, left_s: float, environment: dict[str, str]
) -> tuple[JsonObject, JsonObject]:
    """Run a part's command, or `instead` if it failed; return the outcome, and failures."""
    failed = JsonObject()
    for command in (part.command, part.instead):
        if command is not None:
            program, *options = command.split()
            done = run_part(
                [str(BENCHMARKS / program), *options], min(part.seconds, left_s), environment
            )
            if "result" in done or command == part.instead:
                break
            if part.instead:
                failed[f"{part.name}, as large as asked for"] = report.progress(
                    {"part": part.name} | done
                )
    return done, failed


def result_file_content(part: Part, result: JsonObject) -> JsonObject:
    """Return the result file of a part: command, date and figures."""
    command = f"python benchmarks/{part.command}"
    return {
        "benchmark": f"gpu {part.name}",
        "command": command,
        "date": date.today().isoformat(),
    } | result


if __name__ == "__main__":
    sys.exit(main())
