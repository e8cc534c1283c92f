"""What the batch program refuses before it reads a model."""

import json
from pathlib import Path

import pytest

from jmoe.command_line import BatchOptions, parse_batch
from jmoe.programs.batch import run
from jmoe.serving.batch_files import AnswersFile

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


@pytest.fixture
def options(tmp_path: Path) -> BatchOptions:
    """Of a model that is not there."""
    (tmp_path / "in.jsonl").write_text(json.dumps(LINE))
    paths = [str(tmp_path / name) for name in ("in.jsonl", "out.jsonl")]
    return parse_batch([*paths, "--model", str(tmp_path / "none"), "--max-batch", "3"])


def test_the_options_are_those_of_the_server(options: BatchOptions) -> None:
    config = options.serving_config()
    assert (config.model, config.engine.max_batch) == (options.model, 3)
    assert config.max_waiting > 10**9
    with pytest.raises(ValueError, match=r"request_timeout_s = 0.0: must be greater than 0"):
        BatchOptions("in", "out", "model", request_timeout_s=0.0).serving_config()


def test_files_are_refused_before_the_model_is_read(options: BatchOptions) -> None:
    requests, answers = Path(options.requests), Path(options.answers)
    requests.write_text(f"{json.dumps(LINE)}\n" * 2)
    with pytest.raises(ValueError, match=r"requests = .*'a' on lines 1 and 2"):
        run(options)
    assert not answers.exists()
    requests.write_text(json.dumps(LINE))
    with (
        AnswersFile(answers, requests, {"a"}),
        pytest.raises(ValueError, match=r"answers = .*must be written by one process"),
    ):
        run(options)
    with pytest.raises(ValueError, match=r"model = .*none'.*must be a folder"):
        run(options)
    answers.write_text("{}\n")
    with pytest.raises(ValueError, match=r"answers = .*line 1 is none"):
        run(options)


def test_a_batch_with_all_answers_reads_no_model(
    options: BatchOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(options.answers).write_text('{"id": "batch_req_1", "custom_id": "a"}\n')
    run(options)
    assert "1 of 1 requests have an answer" in capsys.readouterr().err
