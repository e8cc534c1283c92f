"""lm_eval's `local-completions` against the server: log-likelihoods and generated text are the
engine's.

Needs the command `lm_eval` on the PATH (`pip install 'lm_eval[api]'` in a virtual environment of
its own, with torch).
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jmoe.inference.engine import Engine
from tests.http_servers import HttpProcess

CHOICES = {"task": "tiny_choices", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}"}
CHOICES |= {"doc_to_target": "{{gold}}", "metric_list": [{"metric": "acc"}]}
TEXT = {
    "task": "tiny_text",
    "output_type": "generate_until",
    "doc_to_target": "",
    "metric_list": [{"metric": "bleu"}],
}
TEXT |= {
    "generation_kwargs": {
        "until": ["\n", "e"],
        "max_gen_toks": 12,
        "do_sample": False,
        "temperature": 0,
    }
}
DOCUMENTS = [
    {"text": "def f(x):", "choices": ["\n    return x", " 日本語 🎉", " in one"], "gold": 0},
    {"text": "The quick brown", "choices": [" fox", " dog and a"], "gold": 0},
]


def run_lm_eval(
    server: HttpProcess, model_folder: Path, folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """The samples of each task."""
    data = folder / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    for task in (CHOICES, TEXT):
        common = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
        }
        fields = common | task | {"doc_to_text": "{{text}}", "target_delimiter": ""}
        (folder / f"{task['task']}.yaml").write_text(json.dumps(fields))  # JSON is YAML
    arguments = f"model=tiny-moe,base_url={server.url}/v1/completions,tokenizer={model_folder},num_concurrent=2"
    command = [
        "lm_eval",
        "--model",
        "local-completions",
        "--model_args",
        arguments,
        "--include_path",
        str(folder),
    ]
    command += [
        "--tasks",
        "tiny_choices,tiny_text",
        "--output_path",
        str(folder / "out"),
        "--log_samples",
    ]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    files = {
        name: next((folder / "out").rglob(f"samples_{name}_*.jsonl"))
        for name in ("tiny_choices", "tiny_text")
    }
    return {
        name: [json.loads(line) for line in file.read_text().splitlines()]
        for name, file in files.items()
    }


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("lm_eval") is None, reason="lm_eval is not installed: see this file's head"
)
def test_lm_eval(
    serve: Callable[..., HttpProcess], engine: Engine, model_folder: Path, tmp_path: Path
) -> None:
    samples = run_lm_eval(serve(), model_folder, tmp_path)
    assert engine.tokenizer is not None
    for sample in samples["tiny_choices"]:
        document = sample["doc"]
        assert len(sample["filtered_resps"]) == len(document["choices"])
        for choice, (logprob, greedy) in zip(
            document["choices"], sample["filtered_resps"], strict=True
        ):
            whole = engine.tokenizer.encode(document["text"] + choice).ids
            length = len(engine.tokenizer.encode(document["text"]).ids)
            (found,) = engine.generate([whole], max_new_tokens=1, prompt_logprobs=1)
            continuation = found.prompt_logprobs[length - 1 :]
            assert float(logprob) == pytest.approx(sum(lp.logprob for lp in continuation), abs=1e-4)
            assert (str(greedy) == "True") == all(
                lp.top[0][0] == lp.token_id for lp in continuation
            )
    for sample in samples["tiny_text"]:
        (expected,) = engine.generate([sample["doc"]["text"]], max_new_tokens=12, stop=("\n", "e"))
        assert sample["filtered_resps"] == [expected.text]
