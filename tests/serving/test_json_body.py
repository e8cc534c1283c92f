"""Bodies that other readers of JSON would take for something else."""

import json

import pytest

from jmoe.serving.errors import ApiError
from jmoe.serving.json_body import parse_body


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            b'{"max_tokens": 2, "prompt": "x", "max_tokens": 200}',
            "max_tokens: is given twice in one object",
        ),
        (b'{"a": [{"b": 1, "c": 2, "c": 2}]}', "c: is given twice in one object"),
        (b'{"\\ud800": 1, "\\ud800": 1}', "?: is given twice in one object"),
        (b'{"user": NaN}', "the body is not JSON, which has no NaN"),
        (b"[-Infinity]", "the body is not JSON, which has no -Infinity"),
        (b'"\xff"', "the body is not UTF-8"),
        ('{"a": "é"}'.encode("utf-16"), "the body is not UTF-8"),
        (b"[" * 100_000, "lists and objects of the body are nested too deeply"),
        (b"[" + b"9" * 5000 + b"]", "a number of the body has too many digits"),
    ],
)
def test_refused(body: bytes, words: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body(body)
    assert refused.value.status == 400 and refused.value.body.error.message == words


def test_taken() -> None:
    for text in (
        '{"a": {"b": 1}, "b": [{"a": 1}, {"a": 2.5}]}',
        "[1e400, 10000000000000000000000]",
        '"\\ud800"',
    ):
        assert parse_body(text.encode()) == json.loads(text)
    with pytest.raises(json.JSONDecodeError):
        parse_body(b"{")
