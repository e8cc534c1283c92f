"""`python -m jmoe.data.show`: the tokens of samples, with marks around those that are learned."""

from pathlib import Path

import pytest

from jmoe.data.show import main
from tests.chat_models import MARKED_CHATML, say, write_chat_tokenizer, write_jsonl


def test_shows_what_is_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_chat_tokenizer(tmp_path / "model")
    records = [say("q", "ab"), say("only asked"), say("x", "y"), say("not shown", "z")]
    path = write_jsonl(tmp_path / "chats.jsonl", records)
    assert main([str(path), "--model", str(model)]) == 1
    said = capsys.readouterr().out
    assert said == (
        f"{path}:1: 24 tokens, 3 learned\n"
        "<|im_start|>|u|s|e|r|\n|q|<|im_end|>|\n|<|im_start|>|a|s|s|i|s|t|a|n|t|\n"
        "|«a»«b»«<|im_end|>»\n|\n"
        f"{path}:2: messages: has no answer to learn (a message with role assistant)\n"
        f"{path}:3: 23 tokens, 2 learned\n"
        "<|im_start|>|u|s|e|r|\n|x|<|im_end|>|\n|<|im_start|>|a|s|s|i|s|t|a|n|t|\n"
        "|«y»«<|im_end|>»\n|\n"
    )
    one = [str(path), "--model", str(model), "--samples", "1"]
    assert main([*one, "--ids", "--train-on", "all"]) == 0
    assert "257:'<|im_start|>'|«84:'u'»" in capsys.readouterr().out


def test_answers_without_an_end_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a template whose `{% generation %}` ends before the token at which servers stop."""
    template = MARKED_CHATML.replace(
        "{{ message.content + '<|im_end|>' }}{% endgeneration %}",
        "{{ message.content }}{% endgeneration %}<|im_end|>",
    )
    model = write_chat_tokenizer(tmp_path / "model", template)
    path = write_jsonl(tmp_path / "chats.jsonl", [say("q", "ab")])
    assert main([str(path), "--model", str(model)]) == 0
    assert "24 tokens, 2 learned, none of them ends an answer" in capsys.readouterr().out


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_chat_tokenizer(tmp_path / "model")
    (tmp_path / "a.txt").write_text("words\n" * 99)
    path = write_jsonl(tmp_path / "chats.jsonl", [say("q", "a"), {"id": 1}])
    records = write_jsonl(tmp_path / "good.jsonl", [say("q", "a")])
    for file, folder, said in (
        (path, model, "chats.jsonl:2: has id; must have messages"),
        (tmp_path / "a.txt", model, "must hold samples, such as chats; every token of a text is"),
        (tmp_path / "none.jsonl", model, "no such file or folder"),
        (records, tmp_path, "--model = "),
    ):
        assert main([str(file), "--model", str(folder)]) == 2
        assert said in capsys.readouterr().err
