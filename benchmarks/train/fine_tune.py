"""Fine-tune a small model on chats, with all parameters and with adapters, and ask the results.

    make fine-tune

A model of preset `tiny` learns docstrings of this Python's library and gets a chat template. The
chats ask for some of these functions and answer with the first line of their docstrings. The model
is tuned on them twice, by the presets `fine-tune` and `fine-tune-lora`; both results and the model
itself are served and asked the chats' questions over HTTP. Everything is in --out, by default
runs/fine-tune, which is emptied first.

Ends with status 1 unless both results give at least 80 % of the trained answers word for word.
Prints one JSON object as its last line.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import importlib
import inspect
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.lib import report

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("textwrap", "shutil", "statistics", "json")
NUM_CHATS = 24
LEAST_SHARE = 0.8  # of the trained answers
LIMIT_S = 1800.0
# no token of an answer may begin in the prompt: a line's end is a token of its own, a space is not
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ':\\n' + m.content + '<|endoftext|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)
# small models need larger steps than the presets, which are for models of billions of parameters
COMMON = (
    *("--batch-size", "8", "--sequence-length", "96", "--optimizer.warmup-steps", "10"),
    *("--evaluation.sample-tokens", "0"),
)
TUNED: dict[str, Sequence[str]] = {
    "fine-tune": ("--num-steps", "80", "--optimizer.learning-rate", "2e-3"),
    "fine-tune-lora": ("--num-steps", "200", "--optimizer.learning-rate", "5e-3"),
}


def docstrings() -> dict[str, str]:
    """Return the docstrings of functions of Python's library, by name."""
    return {
        f"{module.__name__}.{name}": inspect.getdoc(function) or ""
        for module in map(importlib.import_module, MODULES)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if not name.startswith("_")
    }


def chats() -> list[tuple[str, str]]:
    """Return (question, answer) for functions whose docstring begins with a sentence."""
    lines = {name: text.partition("\n")[0].strip() for name, text in docstrings().items()}
    pairs = {
        f"What does {name} do?": line
        for name, line in lines.items()
        if re.fullmatch(r"[A-Z].{20,80}\.", line)
    }
    return list(pairs.items())[:NUM_CHATS]


def run(*arguments: object) -> float:
    """Run one of jmoe's programs to its end; return its seconds."""
    command = [sys.executable, *map(str, arguments)]
    print("$ python", *command[1:], flush=True)
    begun = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, timeout=LIMIT_S)
    return time.perf_counter() - begun


@contextmanager
def served(model: Path, *options: object) -> Iterator[str]:
    """Yield the URL of a server of this model, which ends with the block."""
    command = ["serve.py", model, "--port", "0", "--max-seq-len", "128", *options]
    process = subprocess.Popen(
        [sys.executable, *map(str, command)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = None
        while found is None:
            line = process.stdout.readline()
            if not line:
                sys.exit(f"the server of {model} has ended with status {process.wait()}")
            found = re.search(r"serving (http://\S+)", line)
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)


def num_right(url: str, model: str, asked: Mapping[str, str]) -> int:
    """Return how many questions the server answers as the chats do; print the first answers."""
    right = 0
    with httpx.Client(timeout=LIMIT_S) as client:
        for number, (question, answer) in enumerate(asked.items()):
            body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
            reply = client.post(
                f"{url}/v1/chat/completions", json={**body, "model": model, "max_tokens": 48}
            )
            given = reply.raise_for_status().json()["choices"][0]["message"]["content"]
            right += given == answer
            if number < 3:
                print(f"  {question}\n    {given!r}", flush=True)
    return right


def make_model(out: Path) -> Path:
    """Return the folder of a small model with a chat template."""
    text = out / "docstrings.txt"
    text.write_text("".join(f"{name}: {doc}\n\n" for name, doc in docstrings().items()))
    train = ("train.py", "tiny", "--num-steps", "300", *COMMON, "--data.path", text)
    run(*train, "--output-dir", out / "base")
    run("-m", "jmoe.deploy.merge", out / "base", out / "model")
    (out / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return out / "model"


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "fine-tune")
    out = parser.parse_args().out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    model, pairs, file = make_model(out), chats(), out / "chats.jsonl"
    with file.open("w") as lines:
        for pair in pairs:
            roles = zip(("user", "assistant"), pair, strict=True)
            said = [{"role": role, "content": text} for role, text in roles]
            lines.write(json.dumps({"messages": said}) + "\n")
    run("-m", "jmoe.data.show", file, "--model", model, "--samples", 1)
    asked = dict(pairs[: NUM_CHATS * 9 // 10])  # the end of the file is held out
    folders, seconds = {"before": model}, dict[str, float]()
    for preset, options in TUNED.items():
        start = ("--init-from", model, "--data.path", file, *COMMON, *options)
        seconds[preset] = run("train.py", preset, *start, "--output-dir", out / preset)
        folders[preset] = out / f"{preset}-merged"
        run("-m", "jmoe.deploy.merge", out / preset, folders[preset])
    right = dict[str, int]()
    for name, folder in folders.items():
        print(f"answers of {folder}:", flush=True)
        with served(folder) as url:
            right[name] = num_right(url, folder.name, asked)
    train_s = {name: round(s, 1) for name, s in seconds.items()}
    report.finish({"questions": len(asked), "right": right, "train_s": train_s})
    if min(right[name] for name in TUNED) < LEAST_SHARE * len(asked):
        sys.exit("the tuned models do not give the answers that they were trained on")


if __name__ == "__main__":
    main()
