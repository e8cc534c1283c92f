"""Measure quality and size of a model after each stage of deployment.

    python benchmarks/paper/deploy_path.py --folder DIR

A preset is trained on the source of Python's standard library but for some files, merged, distilled
to half of its experts, pruned to three quarters of these, compressed to MXFP4, lowered, segmented
over two devices, bundled, and served by two processes from an environment that has the wheel and
not the repository. As controls the whole model learns for as many steps as the student and is
pruned then, and a student that begins alike learns from the text alone. Without --path-only also:
the whole model in every format, and pruned to 75 and 50 % of its experts by how often they are used
and by REAP's score. All are measured on the files that were left out: nothing was trained, chosen
or calibrated by them; what is lowered by its programs, what is served over HTTP. What is in DIR
already is not made again. The last line is one JSON object; `lost` is in bits per byte over the
whole model's.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import ROOT
from benchmarks.lib import report
from benchmarks.lib.deployed import (
    lowered_model_loss,
    make_wheel_environment,
    running_server,
    served_loss,
)
from benchmarks.lib.report import JsonObject
from jmoe.data.tokenizer import encode_pieces, load_tokenizer
from jmoe.deploy.calibration_text import CalibrationText, windows_with_next_token
from jmoe.deploy.cut import weight_bytes
from jmoe.deploy.expert_layouts import LAYOUTS
from jmoe.deploy.layerwise import mean_loss
from jmoe.deploy.prune import MAX_TOKENS
from jmoe.models.lazy_checkpoint import LazyCheckpoint

UNSEEN_SHARE = 16  # one file of so many is left out
WHOLE, DISTILLED, HALF = "whole", "distilled", "half of the experts"
LONGER = "the whole model, as many steps more"
LONGER_HALF = "half of its experts, after as many steps more"
ALONE = "the student without a teacher"
MACHINES = """
[[machines]]
devices = 1
device_bytes = 2e9
bytes_per_s = 2e10
[[machines]]
devices = 1
device_bytes = 1e9
bytes_per_s = 1e10
"""


def arguments() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="where texts, runs and models lie"
    )
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=int, default=360, help="of the teacher")
    parser.add_argument("--student-steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of the students")
    parser.add_argument(
        "--weight", type=float, default=0.5, help="of the divergence in the student's loss"
    )
    parser.add_argument("--warmup-steps", type=int, default=40, help="of the whole model")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--unseen-tokens", type=int, default=100_000, help="to measure on")
    parser.add_argument(
        "--calibration-tokens", type=int, default=MAX_TOKENS, help="to choose experts by"
    )
    parser.add_argument(
        "--path-only", action="store_true", help="without the comparison of formats and scores"
    )
    parser.add_argument("--plot", type=Path, help="the picture to write")
    return parser.parse_args()


def run(*words: object) -> None:
    """Run a program of the repository."""
    subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=True, stdout=sys.stderr)


def split_text(folder: Path) -> tuple[Path, Path]:
    """Return (folder of the text to learn from, folder of the files left out)."""
    learned, unseen = folder / "learned", folder / "unseen"
    if not unseen.is_dir():
        root = Path(sysconfig.get_path("stdlib"))
        files = [
            path
            for path in root.rglob("*.py")
            if "site-packages" not in path.parts and "test" not in path.parts
        ]
        for path in files:
            name = path.relative_to(root).as_posix()
            left_out = int(hashlib.sha256(name.encode()).hexdigest(), 16) % UNSEEN_SHARE == 0
            into = (unseen if left_out else learned) / name.replace("/", "-")
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, into)
    return learned, unseen


def unseen_text(model: Path, unseen: Path, length: int, most: int) -> CalibrationText:
    """Return windows of the files left out, all of them held out."""
    with LazyCheckpoint(model) as checkpoint:
        loaded = load_tokenizer(model / "tokenizer.json", checkpoint.config.vocab_size)
    texts = [(path.read_text(errors="replace"), True) for path in sorted(unseen.iterdir())]
    tokens = np.array([i for ids, _ in encode_pieces(loaded, texts) for i in ids][:most], np.int32)
    windows = windows_with_next_token(tokens, length)
    text = loaded.tokenizer.decode(windows[:, 1:].reshape(-1).tolist(), skip_special_tokens=True)
    return CalibrationText(windows, windows, len(text.encode()))


class Stages:
    """Models in a folder, each made once, and a table row for each measurement."""

    def __init__(self, a: argparse.Namespace, folder: Path) -> None:
        self.a, self.folder, self.rows = a, folder, list[JsonObject]()
        self.on_path = True  # whether rows are stages of the path, or beside it
        self.learned, self.unseen = split_text(folder)
        self.whole = folder / "whole"
        self.cut = (
            "--text",
            self.learned,
            "--sequence-length",
            a.sequence_length,
            "--max-tokens",
            a.calibration_tokens,
        )
        # train.py's own evaluation is not what counts here
        self.sizes = ("--batch-size", a.batch_size, "--sequence-length", a.sequence_length)
        self.sizes += ("--evaluation.every-steps", 1_000_000, "--data.held-out-bytes", 20_000)
        self.same = (
            "--optimizer.learning-rate",
            a.learning_rate,
            "--optimizer.warmup-steps",
            20,
            *self.sizes,
        )

    def prepare(self) -> None:
        """Train the whole model."""
        teacher = self.folder / "teacher"
        if not self.whole.is_dir():
            options = (
                "--data.path",
                self.learned,
                "--output-dir",
                teacher,
                "--num-steps",
                self.a.steps,
            )
            run(
                "train.py",
                self.a.preset,
                *options,
                "--optimizer.warmup-steps",
                self.a.warmup_steps,
                *self.sizes,
            )
            run("-m", "jmoe.deploy.merge", teacher, self.whole)
        with LazyCheckpoint(self.whole) as checkpoint:
            self.experts, positions = checkpoint.config.num_experts, checkpoint.max_positions
        length = min(
            self.a.sequence_length, positions - 2
        )  # windows have one more, and servers room for output
        self.text = unseen_text(self.whole, self.unseen, length, self.a.unseen_tokens)
        # of the programs and servers
        self.room = ("--max-batch", 8, "--max-seq-len", min(self.a.sequence_length + 32, positions))
        self.measure(WHOLE, self.whole)

    def made(self, name: str, *words: object) -> Path:
        """Return the folder of this name; a stage of `jmoe.deploy` writes it if it is missing."""
        out = self.folder / name
        if not out.is_dir():
            run("-m", *words, "--out", out)
        return out

    def row(self, stage: str, experts: int, num_bytes: int, loss: float) -> None:
        """Add a row. loss: in nats a token."""
        bits = self.text.bits_per_byte(loss)
        lost = round(bits - (self.rows[0]["bits_per_byte"] if self.rows else bits), 4)
        row = {
            "stage": stage,
            "experts": experts,
            "path": self.on_path,
            "mb": round(num_bytes / 1e6, 2),
        }
        self.rows.append(report.progress(row | {"bits_per_byte": round(bits, 4), "lost": lost}))

    def measure(self, stage: str, model: Path) -> None:
        """Add a row for a Hugging Face folder."""
        with LazyCheckpoint(model, "float32", "wide") as checkpoint:
            loss = mean_loss(checkpoint, self.text.held_out_BS)
            self.row(stage, checkpoint.config.num_experts, weight_bytes(model), loss)

    def compare(self) -> None:
        """Measure every format and every score for choosing experts."""
        self.on_path = False
        for kind in LAYOUTS:
            model = self.made(
                f"whole-{kind}", "jmoe.deploy.compress", self.whole, "--experts", kind
            )
            self.measure(f"whole, {kind}", model)
        for kept in (3 * self.experts // 4, self.experts // 2):
            for score in ("usage", "reap"):
                self.measure(
                    f"pruned by {score}", self.pruned(self.whole, kept, score, f"{score}-{kept}")
                )
        half = ("--experts", self.experts // 2, "--merge-similar", *self.cut)
        merged = self.made(f"merged-{self.experts // 2}", "jmoe.deploy.prune", self.whole, *half)
        self.measure("pruned by reap, similar ones merged", merged)

    def pruned(self, model: Path, kept: int, score: str, name: str) -> Path:
        """Return a model with fewer experts."""
        return self.made(
            name, "jmoe.deploy.prune", model, "--experts", kept, "--score", score, *self.cut
        )

    def learned_more(self, name: str, start: Path) -> Path:
        """Return the model trained on the text alone for as many more steps as the student."""
        out = self.folder / f"{name}-model"
        if not out.is_dir():
            options = (
                "--init-from",
                start,
                "--data.path",
                self.learned,
                "--output-dir",
                self.folder / name,
            )
            run(
                "train.py", self.a.preset, *options, "--num-steps", self.a.student_steps, *self.same
            )
            run("-m", "jmoe.deploy.merge", self.folder / name, out)
        return out

    def deploy(self) -> None:
        """Distil, prune, compress, lower, segment, bundle and serve, one after the other."""
        self.on_path = True
        folder, student, windows = self.folder, self.folder / "student-model", self.text.held_out_BS
        if not student.is_dir():
            half = ("--experts", self.experts // 2, "--score", "reap", "--preset", self.a.preset)
            steps = ("--weight", self.a.weight, "--num-steps", self.a.student_steps)
            where = (
                "--out",
                folder / "student",
                "--text",
                self.learned,
                "--max-tokens",
                self.a.calibration_tokens,
            )
            run("-m", "jmoe.deploy.distil", self.whole, *where, *half, *steps, *self.same)
            run("-m", "jmoe.deploy.merge", folder / "student", student)
        self.measure(DISTILLED, student)
        kept = 3 * self.experts // 8
        self.measure("pruned", pruned := self.pruned(student, kept, "reap", "pruned-student"))
        small = self.made("compressed", "jmoe.deploy.compress", pruned, "--experts", "mxfp4")
        self.measure("compressed to mxfp4", small)
        lowered = self.made("lowered", "jmoe.deploy.lower", small, *self.room)
        self.row(
            "lowered, for JAX alone", kept, all_bytes(lowered), lowered_model_loss(lowered, windows)
        )
        segments, machines = folder / "segments.json", folder / "machines.toml"
        machines.write_text(MACHINES)
        if not segments.is_file():
            run(
                "-m",
                "jmoe.deploy.segment",
                small,
                "--machines",
                machines,
                "--out",
                segments,
                *self.room,
            )
        split = ("--devices", 2, "--segments", segments, *self.room)
        with LazyCheckpoint(small, None, "wide") as checkpoint:
            fullest = max(
                sum(map(len, layers)) for layers in json.loads(segments.read_text())["segments"]
            )
            device_bytes = checkpoint.dense_bytes_per_device(1) + fullest * checkpoint.expert_bytes
        serve = (sys.executable, ROOT / "serve.py")
        self.serve("segmented, each of 2 devices", device_bytes, (*serve, small, *split), 1)
        bundled = folder / "bundle"
        if not bundled.is_dir():
            os.environ["JAX_NUM_CPU_DEVICES"] = "2"
            run("-m", "jmoe.deploy.bundle", small, "--out", bundled, *split)
            del os.environ["JAX_NUM_CPU_DEVICES"]
        self.serve("bundled, by one process", all_bytes(bundled), (*serve, bundled), 1)
        wheel = make_wheel_environment(folder / "wheel")
        self.serve(
            "served by 2 processes, from a wheel",
            all_bytes(bundled),
            (wheel / "jmoe-serve", bundled),
            2,
        )

    def serve(self, stage: str, num_bytes: int, command: Sequence[object], processes: int) -> None:
        """Add a row for a server that runs outside the repository."""
        elsewhere = self.folder / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        with running_server(command, elsewhere, processes, self.folder / "server.log") as url:
            loss = served_loss(url, self.text.held_out_BS)
        self.row(stage, self.rows[-1]["experts"], num_bytes, loss)

    def controls(self) -> None:
        """Measure the student's steps without a teacher, and plain pruning to as many experts."""
        self.on_path, half = False, self.experts // 2
        self.measure(HALF, self.pruned(self.whole, half, "reap", f"reap-{half}"))
        longer = self.learned_more("longer", self.whole)
        self.measure(LONGER, longer)
        self.measure(LONGER_HALF, self.pruned(longer, half, "reap", f"longer-{half}"))
        self.measure(ALONE, self.learned_more("alone", self.folder / "student" / "student"))


def ratios(rows: Sequence[JsonObject]) -> dict[str, float]:
    """Return the student's loss over that of pruning the whole model, or one trained as long.

    teacher_gains_bits: bits per byte that the student has from its teacher beyond the text alone.
    """
    bits = {row["stage"]: row["bits_per_byte"] for row in rows}
    student, longer = bits[DISTILLED], bits[LONGER]
    return {
        "distilled_over_pruned": round((student - bits[WHOLE]) / (bits[HALF] - bits[WHOLE]), 3),
        "distilled_over_pruned_after_as_many_steps": round(
            (student - longer) / (bits[LONGER_HALF] - longer), 3
        ),
        "teacher_gains_bits": round(bits[ALONE] - student, 4),
    }


def all_bytes(folder: Path) -> int:
    """Return the bytes of all files of a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def draw(rows: Sequence[JsonObject], file: Path) -> None:
    """Draw bytes and bits per byte of every row, in order."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.42 * len(rows) + 1.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(rows))
    for axes, field, label in (
        (left, "mb", "MB"),
        (right, "bits_per_byte", "bits per byte, unseen text"),
    ):
        values = [row[field] for row in rows]
        axes.barh(places, values, color=["tab:blue" if row["path"] else "tab:gray" for row in rows])
        for place, value in zip(places, values, strict=True):
            axes.annotate(
                f" {value:,.2f}" if field == "mb" else f" {value:.3f}",
                (value, place),
                va="center",
                fontsize=8,
            )
        axes.set_xlabel(label)
        axes.set_xlim(0, 1.18 * max(values))
        axes.spines[["top", "right"]].set_visible(False)
    left.set_yticks(
        places, [f"{row['stage']} ({row['experts']} experts)" for row in rows], fontsize=8
    )
    left.invert_yaxis()
    figure.savefig(file, dpi=110)


def main() -> None:
    a = arguments()
    begun, folder = time.monotonic(), a.folder.resolve()
    path = Stages(a, folder)
    path.prepare()
    if not a.path_only:
        path.compare()
    path.deploy()
    path.controls()
    if a.plot:
        draw(path.rows, a.plot)
    report.finish(
        {
            "benchmark": "deploy_path",
            "options": report.options(a, "folder", "plot"),
            "stages": path.rows,
            **ratios(path.rows),
            "unseen_tokens": int(path.text.held_out_BS[:, 1:].size),
            "total_s": round(time.monotonic() - begun),
            "versions": report.versions("jax", "jaxlib", "numpy"),
        }
    )


if __name__ == "__main__":
    main()
