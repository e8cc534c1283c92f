"""A model on its way to a deployed one: what each stage costs in quality and saves in bytes.

    python -m benchmarks.paper.deploy_path --folder DIR

A preset is trained on the source of Python's standard library but for some files, merged, pruned to 75 and 50 % of its
experts by how often they are used and by REAP's score, and distilled to half of its experts; beside the student one
that begins alike and learns as long from the text alone. The whole model is compressed to every format, the student to
MXFP4. All are measured on the files that were left out: nothing was trained, chosen or calibrated by them. What is in
DIR already is not made again. The last line is one JSON object; `lost` is in bits per byte over the whole model's.
"""

if __name__ == "__main__":
    from jmoe.runtime import reexec_with_env

    reexec_with_env()

import argparse
import hashlib
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib import report
from jmoe.data.tokenizer import encode_pieces, load_tokenizer
from jmoe.deploy.calibration_text import CalibrationText, windows_of
from jmoe.deploy.cut import weight_bytes
from jmoe.deploy.expert_layouts import LAYOUTS
from jmoe.deploy.layerwise import mean_loss
from jmoe.models.lazy_checkpoint import LazyCheckpoint

ROOT = Path(__file__).resolve().parents[2]
UNSEEN_SHARE, UNSEEN_TOKENS = 16, 100_000  # one file of so many is left out


def arguments() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where texts, runs and models lie")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=int, default=360, help="of the teacher")
    parser.add_argument("--student-steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of the students")
    parser.add_argument("--weight", type=float, default=0.5, help="of the divergence in the student's loss")
    parser.add_argument("--sequence-length", type=int, default=256)
    return parser.parse_args()


def run(*words: object) -> None:
    """Run a program of the repository."""
    subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=True, stdout=sys.stderr)


def split_text(folder: Path) -> tuple[Path, Path]:
    """Return (folder of the text to learn from, folder of the files left out)."""
    learned, unseen = folder / "learned", folder / "unseen"
    if not unseen.is_dir():
        root = Path(sysconfig.get_path("stdlib"))
        files = [path for path in root.rglob("*.py") if "site-packages" not in path.parts and "test" not in path.parts]
        for path in files:
            name = path.relative_to(root).as_posix()
            left_out = int(hashlib.sha256(name.encode()).hexdigest(), 16) % UNSEEN_SHARE == 0
            into = (unseen if left_out else learned) / name.replace("/", "-")
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, into)
    return learned, unseen


def unseen_text(model: Path, unseen: Path, length: int) -> CalibrationText:
    """Return windows of the files left out, all of them held out."""
    with LazyCheckpoint(model) as checkpoint:
        loaded = load_tokenizer(model / "tokenizer.json", checkpoint.config.vocab_size)
    texts = [(path.read_text(errors="replace"), True) for path in sorted(unseen.iterdir())]
    tokens = np.array([i for ids, _ in encode_pieces(loaded, texts) for i in ids][:UNSEEN_TOKENS], np.int32)
    windows = windows_of(tokens, length)
    text = loaded.tokenizer.decode(windows[:, 1:].reshape(-1).tolist(), skip_special_tokens=True)
    return CalibrationText(windows, windows, len(text.encode()))


def main() -> None:
    a = arguments()
    begun, folder = time.monotonic(), a.folder.resolve()
    learned, unseen = split_text(folder)
    teacher, whole = folder / "teacher", folder / "whole"
    if not whole.is_dir():
        run("train.py", a.preset, "--data.path", learned, "--output-dir", teacher, "--num-steps", a.steps)
        run("-m", "jmoe.deploy.merge", teacher, whole)
    text = unseen_text(whole, unseen, a.sequence_length)
    with LazyCheckpoint(whole) as checkpoint:
        experts = checkpoint.config.num_experts
    rows: list[dict[str, Any]] = []

    def measure(stage: str, model: Path) -> None:
        with LazyCheckpoint(model, "float32", "wide") as checkpoint:
            bits, kept = text.bits_per_byte(mean_loss(checkpoint, text.held_out_BS)), checkpoint.config.num_experts
        lost = round(bits - (rows[0]["bits_per_byte"] if rows else bits), 4)
        row = {"stage": stage, "experts": kept, "mb": round(weight_bytes(model) / 1e6, 2)}
        rows.append(report.progress(row | {"bits_per_byte": round(bits, 4), "lost": lost}))

    measure("whole", whole)

    def measure_compressed(stage: str, model: Path, kind: str) -> None:
        out = folder / f"{model.name}-{kind}"
        if not out.is_dir():
            run("-m", "jmoe.deploy.compress", model, "--out", out, "--experts", kind)
        measure(f"{stage}, {kind}", out)

    for kind in LAYOUTS:
        measure_compressed("whole", whole, kind)
    cut = ("--text", learned, "--sequence-length", a.sequence_length)
    for kept in (3 * experts // 4, experts // 2):
        for score in ("usage", "reap"):
            out = folder / f"{score}-{kept}"
            if not out.is_dir():
                run("-m", "jmoe.deploy.prune", whole, "--out", out, "--experts", kept, "--score", score, *cut)
            measure(f"pruned by {score}", out)
    merged = folder / f"merged-{experts // 2}"
    if not merged.is_dir():
        run("-m", "jmoe.deploy.prune", whole, "--out", merged, "--experts", experts // 2, "--merge-similar", *cut)
    measure("pruned by reap, similar ones merged", merged)
    student, alone = folder / "student", folder / "alone"
    same = ("--num-steps", a.student_steps, "--optimizer.learning-rate", a.learning_rate)
    same += ("--optimizer.warmup-steps", 20, "--evaluation.every-steps", a.student_steps + 1)
    half = ("--experts", experts // 2, "--score", "reap", "--preset", a.preset, "--weight", a.weight)
    if not (folder / "student-model").is_dir():
        run("-m", "jmoe.deploy.distil", whole, "--out", student, "--text", learned, *half, *same)
        run("-m", "jmoe.deploy.merge", student, folder / "student-model")
    measure("distilled", folder / "student-model")
    measure_compressed("distilled", folder / "student-model", "mxfp4")
    if not (folder / "alone-model").is_dir():
        start = ("--init-from", student / "student", "--data.path", learned, "--output-dir", alone)
        run("train.py", a.preset, *start, *same)
        run("-m", "jmoe.deploy.merge", alone, folder / "alone-model")
    measure("the same student without a teacher", folder / "alone-model")
    by_name = {(row["stage"], row["experts"]): row["lost"] for row in rows}
    pruned = {score: by_name[(f"pruned by {score}", experts // 2)] for score in ("usage", "reap")}
    report.finish(
        {
            "benchmark": "deploy_path",
            "options": report.options(a, "folder"),
            "stages": rows,
            "distilled_over_pruned_by_reap": round(by_name[("distilled", experts // 2)] / pruned["reap"], 3),
            "reap_over_usage_at_half": round(pruned["reap"] / pruned["usage"], 3),
            "unseen_tokens": int(text.held_out_BS[:, 1:].size),
            "total_s": round(time.monotonic() - begun),
            "versions": report.versions("jax", "jaxlib", "numpy"),
        }
    )


if __name__ == "__main__":
    main()
