"""Real clients against a real server, each to the end of what it does.

The model is `tests.agent_model`, whose answers are given: it calls `weather` twice, then `add`, then
answers; a coding agent's command writes a file. The clients need packages and programs that jmoe
does not. Scripts run in the Python that the environment variable JMOE_CLIENTS_PYTHON names (another
virtual environment; by default this one), programs are those of the PATH, and a test is skipped
where its client is missing. `docs/server.md` (Clients) says which versions were run.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.agent_model import POSITIONS, Scene, call_text, save_agent_model
from tests.http_servers import HttpProcess, events

SCRIPTS = Path(__file__).parent / "clients"
PYTHON = os.environ.get("JMOE_CLIENTS_PYTHON", sys.executable)
REASONING, ANSWER = "Both, then the sum.", "It is 33 °C in all."
WEATHER = [call_text("weather", f'{{"city": "{city}"}}') for city in ("Zürich", "Oslo")]
WRITE = "echo 33 > answer.txt"
SCENES = (
    Scene(
        "'weather' in names and results == 0",
        f"<think>\n{REASONING}\n</think>\n\n" + "\n".join(WEATHER),
    ),
    Scene("'weather' in names and results == 2", call_text("add", '{"a": 21, "b": 12}')),
    Scene("results > 0", ANSWER),
    # Codex, Claude Code
    Scene("'exec_command' in names", call_text("exec_command", f'{{"cmd": "{WRITE}"}}')),
    Scene(
        "'Bash' in names",
        call_text("Bash", f'{{"command": "{WRITE}", "description": "Write it"}}'),
    ),
    # aider's format of whole files
    Scene("'answer.txt' in said and not names", "answer.txt\n```\n33\n```\n"),
    Scene("true", "Hello."),
)
CALLED = [["weather", "Zürich"], ["weather", "Oslo"], ["add", 21, 12]]
SIZES = ("--max-batch", 2, "--max-seq-len", POSITIONS, "--prefill-chunk-tokens", 256)
ASKED = "Write 33 to answer.txt"
CLIENT_LIMIT_S = 900  # a guard against what hangs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "agent"
    save_agent_model(folder, SCENES)
    return folder


@pytest.fixture(scope="module")
def server(serve: Callable[..., HttpProcess], folder: Path) -> HttpProcess:
    return serve(*SIZES, "--policy", "resident", folder=folder)


def run_client(script: str, package: str, server: HttpProcess) -> Any:
    """What a script prints; the test is skipped where its package is missing."""
    found = subprocess.run(
        [PYTHON, "-c", f"import {package}"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        pytest.skip(f"{package} is not installed: see this file's head")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, str(SCRIPTS / script), server.url, "agent"],
        env=env,
        capture_output=True,
        text=True,
        timeout=CLIENT_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def run_program(program: str, arguments: Sequence[str], home: Path, **env: str) -> str:
    """What a coding agent prints, in a folder `work` of an empty home; the test is skipped where
    the program is missing.
    """
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed: see this file's head")
    work = home / "work"
    work.mkdir(parents=True)
    done = subprocess.run(
        [found, *arguments],
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=CLIENT_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


USER = {"role": "user", "content": "x"}
READ = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
READ_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "read_file", "arguments": '{"path": "a.py"}'},
}
READ_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "x = 1"}
# As the public code of these programs writes them
AGENT_BODIES: dict[str, dict[str, Any]] = {
    "Continue": {
        "messages": [
            {"role": "system", "content": "You are in agent mode."},
            USER,
            {"role": "assistant", "content": " ", "tool_calls": [READ_CALL]},
            READ_RESULT,
        ],
        "tools": [{**READ, "function": {**READ["function"], "strict": None}}],
        "top_p": None,
        "stop": None,
    },
    "Cline": {
        "messages": [
            {"role": "system", "content": "You are Cline."},
            {"role": "user", "content": [{"type": "text", "text": "<task>x</task>"}]},
            {"role": "assistant", "tool_calls": [READ_CALL]},
            READ_RESULT,
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
        ],
        "tools": [READ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENT_BODIES)
def test_bodies_of_coding_agents(server: HttpProcess, name: str) -> None:
    """A turn after a tool's result, streamed to its end."""
    with server.client() as client:
        body = {"model": "agent", "stream": True} | AGENT_BODIES[name]
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    *chunks, end = events(answer.iter_lines())
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert end == "[DONE]" and "".join(d.get("content") or "" for d in deltas) == ANSWER
    assert (chunks[-1].get("usage") is not None) == ("stream_options" in body)


@pytest.mark.slow
def test_langgraph(server: HttpProcess) -> None:
    made = run_client("langgraph_agent.py", "langchain, langgraph, langchain_openai", server)
    assert made["answer"] == made["streamed"] == ANSWER
    for called in (made["called"], made["again"]):  # the first two at once, in any order
        assert sorted(called[:2]) + called[2:] == sorted(CALLED[:2]) + CALLED[2:]


@pytest.mark.slow
def test_litellm(server: HttpProcess) -> None:
    made = run_client("litellm_tools.py", "litellm", server)
    assert len(made) == 4
    for one in made.values():
        assert one["answer"] == ANSWER and one["called"] == CALLED
        assert one["reasoning"] == REASONING


@pytest.mark.slow
def test_litellm_proxy(server: HttpProcess) -> None:
    made = run_client("litellm_proxy.py", "litellm.proxy.proxy_cli, openai", server)
    assert len(made) == 4
    for one in made.values():
        assert one == {"answer": ANSWER, "called": CALLED, "reasoning": REASONING, "counted": True}


@pytest.mark.slow
def test_anthropic(server: HttpProcess) -> None:
    made = run_client("anthropic_tools.py", "anthropic", server)
    for one in (made["whole"], made["streamed"]):
        assert one == {"answer": ANSWER, "called": CALLED, "reasoning": REASONING}
    assert made["tokens"] > 0


@pytest.mark.slow
def test_openai_agents(server: HttpProcess) -> None:
    made = run_client("openai_agents_loop.py", "agents", server)
    assert len(made) == 4
    for one in made.values():
        assert one == {"answer": ANSWER, "called": sorted(CALLED[:2]) + CALLED[2:]}


@pytest.mark.slow
def test_codex(server: HttpProcess, tmp_path: Path) -> None:
    """Runs the command that the model calls, and prints the answer after it."""
    settings = tmp_path / ".codex" / "config.toml"
    settings.parent.mkdir()
    settings.write_text(
        'model = "agent"\nmodel_provider = "jmoe"\nweb_search = "disabled"\n'
        "[features]\nimage_generation = false\n[analytics]\nenabled = false\n"
        f'[model_providers.jmoe]\nname = "jmoe"\nbase_url = "{server.url}/v1"\n'
        'wire_api = "responses"\nrequest_max_retries = 0\nstream_max_retries = 0\n'
    )
    options = ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", ASKED]
    said = run_program("codex", options, tmp_path, CODEX_HOME=str(settings.parent))
    assert ANSWER in said and (tmp_path / "work" / "answer.txt").read_text() == "33\n"


@pytest.mark.slow
def test_claude_code(server: HttpProcess, tmp_path: Path) -> None:
    """Runs the command that the model calls, and prints the answer after it."""
    env = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "agent",
        "ANTHROPIC_SMALL_FAST_MODEL": "agent",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    said = run_program("claude", ["-p", ASKED, "--allowedTools", "Bash"], tmp_path, **env)
    assert ANSWER in said and (tmp_path / "work" / "answer.txt").read_text() == "33\n"


@pytest.mark.slow
def test_guidellm(shared_server: HttpProcess, model_folder: Path, tmp_path: Path) -> None:
    """Chats of random text, streamed: each has the tokens that were asked for, and no error."""
    tokens, count = 16, 6
    options = ["run", "--backend", f"kind=openai_http,target={shared_server.url},model=tiny-moe"]
    options += ["--profile", "kind=concurrent,streams=2"]
    options += ["--constraint", f"kind=max_requests,count={count}"]
    options += ["--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={tokens}"]
    options += ["--tokenizer", f"kind=huggingface_auto,model={model_folder}"]
    options += ["--output", "kind=json", "--disable-console-interactive"]
    env = {"HF_HUB_OFFLINE": "1", "GUIDELLM__DEFAULT_RESULTS_DIR": str(tmp_path)}
    run_program("guidellm", options, tmp_path, **env)
    (report,) = tmp_path.rglob("*.json")
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"]) == (count, [])
    assert {one["output_metrics"]["text_tokens"] for one in requests["successful"]} == {tokens}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "path"),
    [
        ("openai", "completions"),
        ("openai-chat", "chat/completions"),
        ("openai-responses", "responses"),
    ],
)
def test_vllm_bench(
    shared_server: HttpProcess, model_folder: Path, tmp_path: Path, backend: str, path: str
) -> None:
    """Random prompts, streamed: each answer has the tokens that were asked for, and no error."""
    tokens, count = 16, 6
    options = ["bench", "serve", "--base-url", shared_server.url, "--tokenizer", str(model_folder)]
    options += ["--model", "tiny-moe", "--backend", backend, "--endpoint", f"/v1/{path}"]
    options += ["--dataset-name", "random", "--random-input-len", "32", "--ignore-eos"]
    options += ["--random-output-len", str(tokens), "--num-prompts", str(count)]
    options += ["--max-concurrency", "2", "--temperature", "0", "--disable-tqdm"]
    options += ["--save-result", "--save-detailed", "--result-filename", "bench.json"]
    run_program("vllm", options, tmp_path, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    made = json.loads((tmp_path / "work" / "bench.json").read_text())
    assert (made["completed"], made["failed"], set(made["errors"])) == (count, 0, {""})
    assert set(made["output_lens"]) == {tokens} and made["total_output_tokens"] == count * tokens
    assert min(made["ttfts"]) > 0


@pytest.mark.slow
def test_aider(server: HttpProcess, tmp_path: Path) -> None:
    """Writes the file that the model's answer holds."""
    options = ["--model", "openai/agent", "--edit-format", "whole", "--yes-always", "--no-git"]
    options += ["--no-check-update", "--no-show-model-warnings", "--analytics-disable"]
    env = {"OPENAI_API_BASE": f"{server.url}/v1", "OPENAI_API_KEY": "none"}
    run_program("aider", [*options, "--message", ASKED, "answer.txt"], tmp_path, **env)
    assert (tmp_path / "work" / "answer.txt").read_text() == "33\n"
