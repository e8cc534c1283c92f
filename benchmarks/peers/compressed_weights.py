"""Compare log-probabilities of compressed experts with transformers'.

    python benchmarks/peers/compressed_weights.py --model DIR --python ENVIRONMENT/bin/python

--model: a Hugging Face folder with wide experts; hidden sizes a multiple of 128. --python: of an
environment with `pip install torch transformers compressed-tensors`. Each format is written by
`jmoe.deploy.compress`. transformers computes in float32 from weights widened to bfloat16 (fp8: to
float32), which cannot hold int4 and int8 times their scales; ours starts from weights rounded
likewise (`difference`), and from what is stored (`difference_as_stored`). `wide` is the model
itself.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import json
import subprocess
import tempfile
from pathlib import Path

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

import jmoe
from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from jmoe.deploy.compress import compress_model
from jmoe.deploy.expert_layouts import LAYOUTS

TOKENS = np.arange(3, 67, dtype=np.int32)[None]
THEIRS = """
import importlib.metadata, json, sys, numpy, torch, transformers
for folder in sys.argv[1:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.nn.Module.float(model.eval())
    with torch.no_grad():
        logits = model(torch.arange(3, 67)[None]).logits
    numpy.save(f"{folder}/theirs.npy", logits.log_softmax(-1).numpy())
names = "torch", "transformers", "compressed-tensors"
print(json.dumps({name: importlib.metadata.version(name) for name in names}))
"""


def log_probabilities(folder: Path, *, rounded: bool) -> np.ndarray:
    """Return our float32 [1, S, V]; rounded: weights are rounded to bfloat16 first."""
    model = jmoe.load_pretrained(folder, dtype="float32")
    if rounded:
        once = lambda w: w.astype(jnp.bfloat16).astype(w.dtype) if w.dtype == jnp.float32 else w  # noqa: E731
        nnx.update(model, jax.tree.map(once, nnx.state(model)))
    return np.asarray(jax.nn.log_softmax(model(TOKENS)))


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--python", required=True)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = {kind: Path(scratch) / kind for kind in ("wide", *LAYOUTS)}
        folders["wide"] = Path(scratch) / "copy"
        folders["wide"].mkdir()
        for file in a.model.resolve().iterdir():
            (folders["wide"] / file.name).symlink_to(file)
        for kind in LAYOUTS:
            compress_model(a.model, folders[kind], kind)
        command = [a.python, "-c", THEIRS, *map(str, folders.values())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        rows: list[JsonObject] = []
        for kind, folder in folders.items():
            theirs = np.load(folder / "theirs.npy")
            exact, rounded = (
                float(np.abs(log_probabilities(folder, rounded=r) - theirs).max())
                for r in (False, True)
            )
            alike = exact if kind == "fp8" else rounded
            rows.append(
                report.progress(
                    {"experts": kind, "difference": alike, "difference_as_stored": exact}
                )
            )
    versions = report.versions("jax") | json.loads(done.stdout.strip().splitlines()[-1])
    result = {
        "benchmark": "compressed experts as transformers reads them",
        "rows": rows,
        "versions": versions,
    }
    report.finish(result)


if __name__ == "__main__":
    main()
