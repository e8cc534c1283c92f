"""Train adapters over a model on NVMe under a memory limit that the model exceeds four times.

    sudo python benchmarks/offload/frozen_experts.py --folder FOLDER

Writes a model of --layers layers with random bfloat16 weights, and runs `train.py` with LoRA on
attention and experts: with all experts in memory and no limit (device); on NVMe in a memory cgroup
(nvme); and on NVMe, ended with SIGKILL once a checkpoint is written and resumed in such a cgroup.
The limit is what Python, JAX and the programs need, and --limit-mb beside it. Each run is a process
of its own. Losses are compared step by step, the adapters of the last step as files. Compilations,
which take memory of their own, are those of earlier runs: a resumed run has programs that no other
run has, so it runs twice.

predicted_mib: the sum that `docs/fine_tuning.md` names: `tiers.device_layers` layers' stored
experts, one layer's decoded experts, the host cache, the other parameters, 16 bytes for each
parameter of an adapter, and the layers' inputs. measured_mib: the largest resident memory of the
run (VmHWM), less of_programs_mib, that of the same run over a model of two narrow layers. --folder:
on the disk that is meant. Prints one JSON object as its last line.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from benchmarks import BENCHMARKS, ROOT
from benchmarks.lib import report
from benchmarks.lib.memory_limit import memory_limit
from benchmarks.lib.peers import run_for_last_object
from benchmarks.lib.report import JsonObject
from benchmarks.lib.train_processes import one_device_environment
from benchmarks.offload.session import LIBRARY, MODULES
from jmoe.config import LoraConfig, TiersConfig, TrainConfig
from jmoe.deploy.merge import main as merge
from jmoe.mesh import make_mesh
from jmoe.models.huggingface import model_config
from jmoe.models.pretrained import read_config
from jmoe.training.finetune import with_pretrained_model
from jmoe.training.frozen_experts import open_frozen_experts, stored_matrices
from jmoe.training.streamed.adapting import StreamedAdapterTrainer

BITS = {"bfloat16": 16, "mxfp4": 4.25}  # of a stored weight
FORMATS = tuple(BITS)
WIDE = ("bfloat16",)  # not compressed
MIB = 2**20
POLL_S = 0.02
BATCH, LENGTH = 2, 64
SHAPE = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}
TARGETS = ("attention", "experts")


def write_model(folder: Path, layers: int, hidden: int, inner: int) -> Path:
    """Write a model of random weights; return its folder."""
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden}
    widths = {"moe_intermediate_size": inner, "intermediate_size": inner}
    config = folder.with_suffix(".json")
    config.write_text(json.dumps(SHAPE | sizes | widths))
    writer = str(BENCHMARKS / "serve" / "random_model.py")
    run_for_last_object([sys.executable, writer, str(config), str(folder)])
    return folder


def write_shards(folder: Path) -> Path:
    """Write token shards of Python's own source; return their folder."""
    text = [str(LIBRARY / f"{name}.py") for name in MODULES]
    limits = ("--vocab-size", str(SHAPE["vocab_size"]), "--held-out-bytes", "2000")
    command = [sys.executable, "-m", "jmoe.data", *text, "--out", str(folder), *limits]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def cache_bytes_of(model: Path, kind: str) -> int:
    """Return the host cache that a run over this model gets: room for 16 stored experts."""
    shape = model_config(read_config(model))
    return int(16 * 3 * shape.hidden_size * shape.moe_intermediate_size * BITS[kind] / 8)


def predicted_bytes(model: Path, kind: str, a: argparse.Namespace) -> dict[str, int]:
    """Return the parts of the memory that a streamed run needs beside its programs."""
    lora = LoraConfig(a.rank, targets=TARGETS, expert_dtype="wide" if kind in WIDE else kind)
    tiers = TiersConfig(
        experts="nvme", optimizer="nvme", host_cache_bytes=cache_bytes_of(model, kind)
    )
    config = with_pretrained_model(
        TrainConfig(
            init_from=str(model),
            lora=lora,
            tiers=tiers,
            batch_size=BATCH,
            sequence_length=LENGTH,
            compute_dtype="bfloat16",
            remat="layer",
        )
    )
    with open_frozen_experts(config) as checkpoint:
        fields = stored_matrices(checkpoint.expert_fields)
    of_expert = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in fields.values())
    shape = config.model
    elements = 3 * shape.hidden_size * shape.moe_intermediate_size
    trainer = StreamedAdapterTrainer(config, make_mesh((1, 1, 1), jax.devices()[:1]))
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    return {
        "ring": tiers.device_layers * shape.num_experts * of_expert,
        "decoded": 0 if kind in WIDE else shape.num_experts * elements * 2,
        "host_cache": tiers.host_cache_bytes,
        "other_parameters": size(trainer.state_shape.frozen),
        "adapters": 4 * size(trainer.saved_shape.params),  # and two moments and gradients
        "layer_inputs": shape.num_hidden_layers * BATCH * LENGTH * shape.hidden_size * 2,
    }


@dataclasses.dataclass
class Run:
    """One run of train.py into an output folder."""

    a: argparse.Namespace
    model: Path
    shards: Path
    out: Path
    kind: str
    on_nvme: bool

    @property
    def command(self) -> list[str]:
        """The command line of the run."""
        steps = ("--num-steps", self.a.steps, "--checkpoint.every-steps", self.a.killed_step)
        sizes = ("--batch-size", BATCH, "--sequence-length", LENGTH, "--remat", "layer")
        lora = ("--lora.rank", self.a.rank, "--lora.targets", *TARGETS)
        if self.kind not in WIDE:
            lora = (*lora, "--lora.expert-dtype", self.kind)
        plain = ("--compute-dtype", "bfloat16", "--evaluation.every-steps", 0)
        rate = ("--optimizer.schedule", "constant", "--optimizer.learning-rate", 1e-3)
        none = ("--evaluation.sample-tokens", 0, "--optimizer.warmup-steps", 0)
        tiers: tuple[object, ...] = ()
        if self.on_nvme:
            cache = ("--tiers.host-cache-bytes", cache_bytes_of(self.model, self.kind))
            place = ("--tiers.path", self.records_folder)
            tiers = ("--tiers.experts", "nvme", "--tiers.optimizer", "nvme", *cache, *place)
        start = ("train.py", "tiny", "--init-from", self.model, "--data.path", self.shards)
        end = ("--output-dir", self.out)
        parts = (*start, *steps, *sizes, *lora, *plain, *rate, *none, *tiers, *end)
        return [sys.executable, *map(str, parts)]

    @property
    def records_folder(self) -> Path:
        """The folder of the experts' records."""
        return self.out.parent / f"records-{self.out.name}"

    def records(self) -> list[JsonObject]:
        """Return the whole lines of the run's metrics."""
        file = self.out / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    def losses(self) -> dict[int, float]:
        """Return the loss of each step; of a step taken twice the later one."""
        return {r["step"]: r["loss"] for r in self.records() if "event" not in r}

    def resumed_at(self) -> list[int]:
        """Return the steps at which the run resumed."""
        return [r["step"] for r in self.records() if r.get("event") == "resume"]

    def is_saved(self) -> bool:
        """Return whether a checkpoint is complete."""
        return any(path.name.isdigit() for path in (self.out / "checkpoints").glob("*"))

    def start(self, limit_bytes: int | None = None, until_saved: bool = False) -> JsonObject:
        """Run to the end, or until a checkpoint is complete and SIGKILL; return peaks in MiB and
        seconds. limit_bytes: of a memory cgroup.
        """
        begun, log = time.perf_counter(), self.out.with_suffix(".log")
        peaks = {"VmHWM": 0, "RssAnon": 0}
        with (
            memory_limit(limit_bytes) if limit_bytes else contextlib.nullcontext() as processes,
            log.open("ab") as output,
        ):
            enter = ["bash", "-c", 'echo $$ >"$0"; exec "$@"', str(processes)] if processes else []
            environment = one_device_environment(self.a.folder)
            streams = {"stdout": output, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(
                [*enter, *self.command], cwd=ROOT, env=environment, **streams
            )
            try:
                while process.poll() is None:
                    for name, value in memory_of(process.pid).items():
                        peaks[name] = max(peaks[name], value)
                    if until_saved and self.is_saved():
                        break
                    time.sleep(POLL_S)
            finally:
                process.kill()
                status = process.wait()
        if until_saved and status != -signal.SIGKILL:
            sys.exit(f"{' '.join(self.command)}: ended before SIGKILL; give more --steps")
        if not until_saved and status:
            sys.exit(f"{' '.join(self.command)}: status {status}\n{log.read_text()[-2000:]}")
        seconds = round(time.perf_counter() - begun, 1)
        return {name: kib // 1024 for name, kib in peaks.items()} | {"seconds": seconds}

    def adapter(self) -> bytes:
        """Return the file of the last step's adapters."""
        folder = self.out.with_suffix(".adapter")
        if not folder.exists():
            with contextlib.redirect_stdout(sys.stderr):
                merge([str(self.out), str(folder), "--adapter"])
        return (folder / "adapter_model.safetensors").read_bytes()


def memory_of(pid: int) -> dict[str, int]:
    """Return a process's largest resident memory and its present anonymous part, in KiB; {} once it
    has ended.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    return {name: int(kib) for name, kib in re.findall(r"^(VmHWM|RssAnon):\s+(\d+)", text, re.M)}


def difference(one: Run, other: Run) -> float:
    """Return the largest difference of a step's loss."""
    ours, theirs = one.losses(), other.losses()
    assert ours.keys() == theirs.keys(), (ours, theirs)
    return max(abs(loss - theirs[step]) for step, loss in ours.items())


class Runs:
    """The runs of one format over the large model and the narrow one, with their peaks."""

    def __init__(self, a: argparse.Namespace, kind: str, models: Sequence[Path], shards: Path):
        self.a, self.kind, (self.large, narrow) = a, kind, models

        def run(name: str, model: Path, on_nvme: bool = True) -> Run:
            return Run(a, model, shards, a.folder / f"{kind}-{name}", kind, on_nvme)

        self.narrow = run("narrow", narrow)
        self.whole, self.killed = run("whole", self.large), run("killed", self.large)
        self.device = run("device", self.large, on_nvme=False)
        self.peaks: dict[str, JsonObject] = {}

    @property
    def limit_bytes(self) -> int:
        """The limit of a memory cgroup, once the narrow run has ended."""
        return (self.peaks["narrow"]["RssAnon"] + self.a.limit_mb) * MIB

    def note(self, name: str, peak: JsonObject) -> None:
        """Keep the peaks of a run, and show them."""
        self.peaks[name] = peak
        report.progress({"format": self.kind, "run": name, **peak})

    def run_narrow(self) -> None:
        """Run over the narrow model, twice: first it compiles."""
        self.narrow.start()
        shutil.rmtree(self.narrow.out)
        self.note("narrow", self.narrow.start())

    def run_all(self) -> None:
        """Take all runs, one after the other."""
        self.run_narrow()
        self.killed.start(until_saved=True)
        saved = self.killed.out.with_suffix(".saved")
        shutil.copytree(self.killed.out, saved)
        self.killed.start()  # compiles
        shutil.rmtree(self.killed.out)
        saved.rename(self.killed.out)
        self.note("resumed", self.killed.start(self.limit_bytes))
        self.note("nvme", self.whole.start(self.limit_bytes))
        self.note("device", self.device.start())

    def row(self) -> JsonObject:
        """Return the figures of the format."""
        parts = predicted_bytes(self.large, self.kind, self.a)
        peak, share = self.peaks["nvme"], self.peaks["narrow"]
        predicted, measured = sum(parts.values()), (peak["VmHWM"] - share["VmHWM"]) * MIB
        stored = sum(file.stat().st_size for file in self.large.glob("*.safetensors"))
        records = self.whole.records_folder
        on_disk = sum(f.stat().st_size for f in records.rglob("*") if f.is_file())
        whole, killed, device = self.whole, self.killed, self.device
        return {
            "experts": self.kind,
            "model_mib": stored // MIB,
            "records_mib": on_disk // MIB,
            "limit_mib": self.limit_bytes // MIB,
            "limit_beside_programs_mib": self.a.limit_mb,
            "model_to_limit_beside_programs": round(stored / (self.a.limit_mb * MIB), 2),
            "records_to_limit_beside_programs": round(on_disk / (self.a.limit_mb * MIB), 2),
            "peak_mib": peak["VmHWM"],
            "peak_anonymous_mib": peak["RssAnon"],
            "of_programs_mib": share["VmHWM"],
            "measured_mib": measured // MIB,
            "predicted_mib": predicted // MIB,
            "measured_to_predicted": round(measured / predicted, 3),
            "parts_mib": {name: round(size / MIB, 1) for name, size in parts.items()},
            "device_peak_mib": self.peaks["device"]["VmHWM"],
            "losses": [round(loss, 6) for loss in whole.losses().values()],
            "loss_difference_to_device": difference(whole, device),
            "adapter_equals_device": whole.adapter() == device.adapter(),
            "resumed_at": killed.resumed_at(),
            "resumed_peak_mib": self.peaks["resumed"]["VmHWM"],
            "resumed_to_predicted": round(
                (self.peaks["resumed"]["VmHWM"] - share["VmHWM"]) * MIB / predicted, 3
            ),
            "loss_difference_of_resumed": difference(whole, killed),
            "adapter_equals_resumed": whole.adapter() == killed.adapter(),
        }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--inner-size", type=int, default=832, help="of an expert")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--limit-mb", type=int, default=300, help="beside the programs'")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--killed-step", type=int, default=2, help="the checkpoint after which to kill"
    )
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    a = parser.parse_args()
    if not 1 <= a.killed_step < a.steps:
        parser.error(
            f"--killed-step {a.killed_step}: must be at least 1 and below --steps {a.steps}"
        )
    a.folder = a.folder.resolve()
    a.folder.mkdir(parents=True)
    try:
        models = (
            write_model(a.folder / "model", a.layers, a.hidden_size, a.inner_size),
            write_model(a.folder / "narrow", 2, 64, 64),
        )
        shards = write_shards(a.folder / "shards")
        rows = []
        for kind in a.formats:
            runs = Runs(a, kind, models, shards)
            runs.run_all()
            rows.append(report.progress(runs.row()))
    finally:
        shutil.rmtree(a.folder)
    options = report.options(a, "folder")
    device: JsonObject = report.device_and_versions()
    report.finish({"options": options, "cores": os.cpu_count(), **device, "rows": rows})


if __name__ == "__main__":
    main()
