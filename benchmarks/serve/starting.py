"""Time a start: from the command to the first answer, of `generate` and of `serve.py`.

    python benchmarks/serve/starting.py
    python benchmarks/serve/starting.py --checkouts OTHER . --rounds 3

Serves a random model of 2 MB. Columns, in seconds since the command: `listens_s` until the server
says its address, `first_s` until the first answer of 8 tokens is there, `second_s` for a second,
longer prompt alone, asked right after the first. `processor_s` is the processor time of the program
and its children until the first answer, and `programs` the number of programs that were compiled or
read from the cache until then. Caches:

empty    no program is compiled; the native operations are built, as by `make setup`; one start
filled   that start, which ended after all programs were compiled, has left its programs
nothing  neither programs nor native operations; only with --nothing

--checkouts: folders of jmoe, started in turn, round by round. Prints one JSON object as its last
line.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from benchmarks import ROOT
from benchmarks.lib import report
from benchmarks.lib.report import JsonObject

CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
PROMPT, LONGER = "def f(", "def f(x):\n    return " * 20
NEW_TOKENS = 8
LIMIT_S = 900.0
PREPARED = "programs of all requests are compiled"  # what a server logs that compiles behind
COMPILED = re.compile(r"Finished XLA compilation of ")  # with JAX_LOG_COMPILES


def write_model(folder: Path) -> None:
    """Write the random model, with a tokenizer of bytes and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = folder.with_suffix(".json")
    config.write_text(json.dumps(CONFIG))
    program = ROOT / "benchmarks" / "serve" / "random_model.py"
    subprocess.run([sys.executable, program, config, folder], check=True, stdout=sys.stderr)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def commit_of(checkout: Path) -> str:
    """Return the short name of a checkout's commit."""
    command = ["git", "-C", checkout, "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Checkout:
    """A folder of jmoe, with caches of its own. commit: its short name."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder, self.commit = folder.resolve(), commit_of(folder)
        self._scratch = scratch / self.commit
        self._num_caches = 0
        self._native = Path(
            subprocess.run(
                [sys.executable, "-m", "kernels_pallas.native"],
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": str(self.folder)},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout.strip()
        )

    def new_cache(self, *, native: bool) -> Path:
        """Return a new cache folder without programs. native: with the native operations."""
        self._num_caches += 1
        cache = self._scratch / str(self._num_caches)
        (cache / "jmoe" / "native").mkdir(parents=True)
        if native:
            shutil.copy(self._native, cache / "jmoe" / "native")
        return cache

    def environment(self, cache: Path, **more: str) -> dict[str, str]:
        own = {"PYTHONPATH": str(self.folder), "XDG_CACHE_HOME": str(cache)}
        own |= {"PYTHONUNBUFFERED": "1", "JAX_NUM_CPU_DEVICES": "1"}
        here = {k: v for k, v in os.environ.items() if k not in ("JMOE_RUNTIME", "GLIBC_TUNABLES")}
        return here | own | more


def processor_s(process: psutil.Process) -> float:
    """Return the processor time of a process and its children so far."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def time_generate(
    checkout: Checkout, model: Path, cache: Path, *, fills: bool = False, **env: str
) -> JsonObject:
    """Return the parts of a run of `generate`, and how many programs it compiled or read. `fills`
    changes nothing: it leaves all of its programs.
    """
    command = [sys.executable, "-m", "jmoe.programs.generate", str(model), PROMPT]
    before, begun = os.times(), time.perf_counter()
    done = subprocess.run(
        [*command, "--max-new-tokens", str(NEW_TOKENS)],
        cwd=checkout.folder,
        env=checkout.environment(cache, **env),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    first_s, after = time.perf_counter() - begun, os.times()
    if done.returncode:
        sys.exit(done.stderr)
    used = after.children_user + after.children_system
    used -= before.children_user + before.children_system
    return {
        "first_s": first_s,
        "processor_s": used,
        "programs": len(COMPILED.findall(done.stderr)),
    }


@contextmanager
def serving(
    checkout: Checkout, model: Path, cache: Path, **env: str
) -> Iterator[tuple[psutil.Popen, str, Path]]:
    """Return a context with (process, address, log) of a server, begun now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = cache / "log"
    with log.open("w") as output:
        process = psutil.Popen(
            [sys.executable, "serve.py", str(model), "--port", str(port)],
            cwd=checkout.folder,
            env=checkout.environment(cache, **env),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process, f"http://127.0.0.1:{port}", log
        process.terminate()
        if process.wait(LIMIT_S):
            sys.exit(log.read_text())
    finally:
        if process.is_running():
            process.kill()


def wait_for(words: str, process: psutil.Popen, log: Path) -> None:
    """Wait until a server has logged these words."""
    until = time.perf_counter() + LIMIT_S
    while words not in log.read_text():
        if process.poll() is not None or time.perf_counter() > until:
            sys.exit(f"{log}: never says {words!r}:\n{log.read_text()}")
        time.sleep(0.005)


def ask(url: str, prompt: str) -> float:
    """Return the seconds of a completion."""
    begun = time.perf_counter()
    body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S, trust_env=False)
    if answer.status_code != 200:
        sys.exit(answer.text)
    return time.perf_counter() - begun


def time_server(
    checkout: Checkout, model: Path, cache: Path, *, fills: bool = False, **env: str
) -> JsonObject:
    """Return the parts of a start of `serve.py`, and how many programs it compiled or read before
    the first answer.

    fills: end only after all programs are compiled, if the server compiles them behind its first
    answers.
    """
    begun = time.perf_counter()
    with serving(checkout, model, cache, **env) as (process, url, log):
        wait_for("\nserving ", process, log)
        listens_s = time.perf_counter() - begun
        ask(url, PROMPT)
        first_s, used_s = time.perf_counter() - begun, processor_s(process)
        programs = len(COMPILED.findall(log.read_text()))
        second_s = ask(url, LONGER)
        if fills and "compiling the programs of all requests" not in log.read_text():
            wait_for(PREPARED, process, log)
    return {
        "listens_s": listens_s,
        "first_s": first_s,
        "second_s": second_s,
        "processor_s": used_s,
        "programs": programs,
    }


def time_starts(
    checkouts: list[Checkout], model: Path, name: str, a: argparse.Namespace
) -> list[JsonObject]:
    """Return the rows of a program: of every checkout, with every state of the caches."""
    time_start = {"generate": time_generate, "serve.py": time_server}[name]
    caches = [checkout.new_cache(native=True) for checkout in checkouts]
    first: list[list[JsonObject]] = []
    filled: list[list[JsonObject]] = [[] for _ in checkouts]
    programs: list[int] = []
    for checkout, cache in zip(checkouts, caches, strict=True):
        first.append([report.progress(time_start(checkout, model, cache, fills=True))])
        found = time_start(checkout, model, cache, JAX_LOG_COMPILES="1")
        programs.append(found["programs"])
    for _ in range(a.rounds):
        for checkout, cache, seen in zip(checkouts, caches, filled, strict=True):
            seen.append(report.progress(time_start(checkout, model, cache)))
    states = {"empty": first, "filled": filled}
    if a.nothing:
        without = [checkout.new_cache(native=False) for checkout in checkouts]
        starts = zip(checkouts, without, strict=True)
        states["nothing"] = [[time_start(checkout, model, cache)] for checkout, cache in starts]
    rows = []
    for state, measured in states.items():
        for checkout, seen, count in zip(checkouts, measured, programs, strict=True):
            row = {"program": name, "caches": state, "commit": checkout.commit}
            row |= {
                key: report.median((one[key] for one in seen), 2)
                for key in seen[0]
                if key != "programs"
            }
            rows.append(row | ({} if state == "nothing" else {"programs": count}))
    return rows


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--checkouts", type=Path, nargs="+", default=[ROOT])
    parser.add_argument("--nothing", action="store_true", help="also without native operations")
    parser.add_argument("--rounds", type=int, default=3, help="of starts with filled caches")
    a = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(model)
        checkouts = [Checkout(path, Path(folder)) for path in a.checkouts]
        rows = [
            row
            for name in ("generate", "serve.py")
            for row in time_starts(checkouts, model, name, a)
        ]
    report.finish(
        {
            "benchmark": "starting",
            "options": {"rounds": a.rounds},
            "load_before": round(load, 2),
            "starts": rows,
            "versions": report.versions("jax", "jaxlib"),
        }
    )


if __name__ == "__main__":
    main()
