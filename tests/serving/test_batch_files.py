"""The lines of a batch's two files, and what an interrupted write leaves."""

import json
from pathlib import Path
from typing import Any

import pytest

from jmoe.serving.batch_files import AnswersFile, read_request_keys, read_requests
from jmoe.serving.errors import ApiError

BODY: dict[str, Any] = {"prompt": "x"}
GOOD: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": BODY,
}


def write(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text(
        "".join(f"{text}\n" for text in texts), encoding="utf-8", errors="surrogateescape"
    )
    return path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "the line is not JSON"),
        ("[1]", "the line must be a JSON object"),
        ('{"custom_id": "a", "custom_id": "b"}', "custom_id: is given twice in one object"),
        ("[" * 100_000, "nested too deeply"),
        ("\udcff", "the body is not UTF-8"),
        ({"custom_id": "a"}, "method: is missing"),
        (GOOD | {"custom_id": 7}, "custom_id = 7: must be text"),
        (GOOD | {"method": "GET"}, "method = 'GET': must be POST"),
        (GOOD | {"url": "/v1/embeddings"}, "url = '/v1/embeddings': must be /v1/chat/completions"),
        (GOOD | {"url": ["/v1/completions"]}, "url = ['/v1/completions']: must be"),
        (GOOD | {"body": "x"}, "body = 'x': must be a JSON object"),
        (GOOD | {"body": BODY | {"stream": True}}, "body.stream = True: must be false"),
        (GOOD | {"modle": "m"}, "modle: is no field"),
    ],
)
def test_a_line_that_is_no_request_says_why(tmp_path: Path, line: Any, message: str) -> None:
    good = GOOD | {"custom_id": "good"}
    bad, other = read_requests(write(tmp_path / "in", line, "", good))
    assert (bad.line, other.line, other.error, other.path) == (1, 3, None, "/v1/completions")
    assert json.loads(other.body) == BODY
    assert bad.error is not None
    answer = bad.refusal_line(bad.error)
    assert message in answer["error"]["message"]
    assert answer["response"]["status_code"] == bad.error.status == 400
    assert answer["response"]["body"]["error"]["message"] == answer["error"]["message"]
    json.dumps(answer).encode()


def test_requests_with_one_custom_id_are_named_by_their_lines(tmp_path: Path) -> None:
    named = [GOOD | {"custom_id": name} for name in ("a", "\ud800", "b", "a", "\ud800", "a")]
    path = write(tmp_path / "in", *named)
    with pytest.raises(ValueError, match=r"'a' on lines 1 and 4; '.' on lines 2 and 5; .* 1 and 6"):
        read_request_keys(path)
    assert read_request_keys(write(path, GOOD, "{", "{")) == {"a", 2, 3}


def test_answers_go_on_where_they_ended(tmp_path: Path) -> None:
    lines = [GOOD | {"custom_id": name} for name in ("a", "\ud800", "c")]
    path, out = write(tmp_path / "in", *lines, "{"), tmp_path / "out"
    asked, requests = read_request_keys(path), list(read_requests(path))
    answers = [request.refusal_line(ApiError(400, "no")) for request in requests]
    with AnswersFile(out, path, asked) as file:
        for answer in answers[1:]:
            file.append(answer)
        with pytest.raises(ValueError, match="must be written by one process"):
            AnswersFile(out, path, asked)
    whole = out.read_bytes()
    torn = json.dumps(answers[0]).encode()
    for length in (0, 1, 12, len(torn)):  # a line without its end is no answer
        out.write_bytes(whole + torn[:length])
        with AnswersFile(out, path, asked) as file:
            assert file.keys == {"\ud800", "c", 4}
        assert out.read_bytes() == whole
    with AnswersFile(out, path, asked) as file:
        file.append(answers[0])
    assert out.read_bytes() == whole + torn + b"\n"


@pytest.mark.parametrize(
    "content",
    [
        "a text without a newline",
        "a text\n",
        '{"id": "batch_req_1", "custom_id": "b"}\n',  # to another file's request
        '{"id": "batch_req_1", "custom_id": "a"}\n' * 2,
        '{"id": "batch_req_1", "custom_id": null}\n',  # line 1 has a custom_id
        '{"id": 1, "custom_id": null}\n',
        "[1]\n",
    ],
)
def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, content: str) -> None:
    path, out = write(tmp_path / "in", GOOD), tmp_path / "out"
    out.write_text(content)
    with pytest.raises(ValueError, match=r"must be a new file or answers to .*in: line [12] is"):
        AnswersFile(out, path, read_request_keys(path))
    assert out.read_text() == content
