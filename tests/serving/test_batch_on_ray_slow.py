"""A thousand prompts on a Ray cluster of three nodes, two of which are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.ray_clusters import SETTINGS, kill_worker, ray_cluster
from tests.serving.conftest import SIZES

ROOT = Path(__file__).resolve().parents[2]
COUNT = int(os.environ.get("BATCH_PROMPTS", "1000"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
def test_each_prompt_is_answered_once_with_two_nodes_killed(
    model_folder: Path, server_env: dict[str, str | None], tmp_path: Path
) -> None:
    """An engine is killed too. Greedy answers are those of one engine."""
    lines = [
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"fox {i}", "max_tokens": 16, "temperature": 0},
        }
        for i in range(COUNT)
    ]
    requests = tmp_path / "in.jsonl"
    requests.write_text("\n".join(map(json.dumps, lines)))
    changes = {name: value for name, value in server_env.items() if value is not None}
    environment = {**os.environ, **SETTINGS, **changes, "PYTHONPATH": str(ROOT)}

    def start(out: Path, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "jmoe.programs.batch", requests, out]
        arguments = [*command, "--model", model_folder, *SIZES, *options]
        return subprocess.Popen(list(map(str, arguments)), env=environment)

    def texts(out: Path) -> dict[str, str]:
        answers = [json.loads(line) for line in out.read_text().splitlines()]
        assert Counter(answer["custom_id"] for answer in answers) == Counter(
            line["custom_id"] for line in lines
        )
        return {a["custom_id"]: a["response"]["body"]["choices"][0]["text"] for a in answers}

    assert start(tmp_path / "one.jsonl").wait(600) == 0
    out = tmp_path / "three.jsonl"
    with ray_cluster(3, {**changes, "PYTHONPATH": str(ROOT)}) as cluster:
        program = start(out, "--ray", cluster.address)

        def wait_for_answers(share: float) -> None:
            while not out.exists() or out.read_bytes().count(b"\n") < share * COUNT:
                assert program.poll() is None
                time.sleep(0.05)

        wait_for_answers(0.05)
        assert kill_worker(cluster, "EngineActor")
        for share in (0.2, 0.5):
            wait_for_answers(share)
            cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        assert program.wait(900) == 0
    assert texts(out) == texts(tmp_path / "one.jsonl")
