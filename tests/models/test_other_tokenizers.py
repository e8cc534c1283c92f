"""Tokenizers of other libraries: the token ids that these libraries give
(fixtures/make_tokenizers.py), and what is refused.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jmoe.deploy.model_folder import hugging_face_folder
from jmoe.models.other_tokenizers import write_missing_tokenizer
from jmoe.models.sentencepiece_file import read_sentencepiece
from jmoe.models.tiktoken_file import read_tiktoken
from jmoe.models.tokenizer_file import open_tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures" / "tokenizers"


def copied(name: str, folder: Path, **settings: Any) -> Path:
    """A copy of a fixture without its reference, with other fields of tokenizer_config.json."""
    shutil.copytree(FIXTURES / name, folder)
    (folder / "reference.json").unlink()
    fields = json.loads((folder / "tokenizer_config.json").read_text()) | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("name", ["kimi", "llama"])
def test_ids_of_the_other_library(name: str, tmp_path: Path) -> None:
    """Once `tokenizer.json` is made, by any command that opens the model."""
    if name == "llama":
        pytest.importorskip("sentencepiece")
        pytest.importorskip("google.protobuf")
    said: list[str] = []
    with hugging_face_folder(copied(name, tmp_path / "model"), said.append) as folder:
        tokenizer = open_tokenizer(folder / "tokenizer.json")
    assert len(said) == 1 and "tokenizer.json was made from " in said[0]
    for row in json.loads((FIXTURES / name / "reference.json").read_text()):
        ids = tokenizer.encode(row["text"], add_special_tokens=False).ids
        assert ids == row["ids"], row["text"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == row["text"]
    bos = [tokenizer.token_to_id("<s>")] if name == "llama" else []
    assert (
        tokenizer.encode("the").ids == bos + tokenizer.encode("the", add_special_tokens=False).ids
    )
    write_missing_tokenizer(tmp_path / "model", said.append)  # it is there now
    assert len(said) == 1


def test_kimis_special_tokens_have_their_numbers(tmp_path: Path) -> None:
    tokenizer = read_tiktoken(FIXTURES / "kimi")
    assert tokenizer.token_to_id("[BOS]") == 307 and tokenizer.token_to_id("<|im_middle|>") == 311
    assert tokenizer.get_vocab_size() == 307 + 258
    assert tokenizer.id_to_token(400) == "<|reserved_token_400|>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer_class": "QWenTokenizer"}, "tokenizer_class = 'QWenTokenizer': must be TikTok"),
        (
            {"added_tokens_decoder": {"400": {"content": "[A]"}, "9999": {"content": "[BOS]"}}},
            r"added_tokens_decoder = '9999': must be in range\(307, 565\), behind the 307 tokens",
        ),
        (
            {"added_tokens_decoder": {"400": {"content": "[A]"}, "401": {"content": "[A]"}}},
            r"added_tokens_decoder = 401: must name a token of its own, and '\[A\]' is 400",
        ),
        ("YQ== x\n", r"tiktoken\.model: must have a token in base64 and its rank a line"),
        ("YQ== 0\nYg== 2\n", r"tiktoken\.model: must number its tokens from 0"),
    ],
)
def test_tiktoken_files_that_are_refused(
    change: str | dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings = change if isinstance(change, dict) else {}
    folder = copied("kimi", tmp_path / "model", **settings)
    if isinstance(change, str):
        (folder / "tiktoken.model").write_text(change)
    with pytest.raises(ValueError, match=message):
        read_tiktoken(folder)
    said: list[str] = []
    write_missing_tokenizer(folder, said.append)
    assert said[0].startswith("no tokenizer.json can be made from tiktoken.model: ")
    assert not (folder / "tokenizer.json").exists()


def test_sentencepiece_files_that_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    model_pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    folder = copied("llama", tmp_path / "model")
    model = model_pb2.ModelProto()
    model.ParseFromString((folder / "tokenizer.model").read_bytes())
    model.normalizer_spec.remove_extra_whitespaces = True
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="remove_extra_whitespaces = True: is not supported"):
        read_sentencepiece(folder)
    model.trainer_spec.model_type = 1
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="model_type = 1: must be 2, byte-pair encoding"):
        read_sentencepiece(folder)
    (folder / "tokenizer.model").write_bytes(b"\xff\xff")
    with pytest.raises(ValueError, match=r"tokenizer\.model: is no sentencepiece model"):
        read_sentencepiece(folder)


def test_spaces_of_transformers_4(tmp_path: Path) -> None:
    """`legacy`, its default, begins each piece of text between special tokens with a space."""
    pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    new = read_sentencepiece(FIXTURES / "llama")
    folder = copied("llama", tmp_path / "model", legacy=True, add_bos_token=False)
    old = read_sentencepiece(folder)
    assert old.encode("the end").ids == new.encode("the end", add_special_tokens=False).ids
    assert old.encode("<s>the").ids != new.encode("<s>the", add_special_tokens=False).ids
    assert old.encode("<s>the").ids[1:] == old.encode("the").ids


def test_a_made_tokenizer_follows_its_source(tmp_path: Path) -> None:
    """It is made again once its source changes, unless somebody has changed it; a source that
    cannot be read leaves none of before.
    """
    folder, said = copied("kimi", tmp_path / "model"), list[str]()
    write_missing_tokenizer(folder, said.append)
    write_missing_tokenizer(folder, said.append)
    made = (folder / "tokenizer.json").read_text()
    assert len(said) == 1
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"]["400"] = {"content": "<|new|>", "special": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    write_missing_tokenizer(folder, said.append)
    assert len(said) == 2
    assert open_tokenizer(folder / "tokenizer.json").token_to_id("<|new|>") == 400
    (folder / "tiktoken.model").write_text("YQ== x\n")
    write_missing_tokenizer(folder, said.append)
    assert said[2].startswith("no tokenizer.json can be made from tiktoken.model")
    assert not (folder / "tokenizer.json").exists()
    (folder / "tokenizer.json").write_text(made + "\n")  # the user's own from here on
    write_missing_tokenizer(folder, said.append)
    assert len(said) == 3 and (folder / "tokenizer.json").read_text() == made + "\n"


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied("kimi", tmp_path / "model")

    def refuse(descriptor: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "fsync", refuse)
    said: list[str] = []
    write_missing_tokenizer(folder, said.append)
    assert len(said) == 1 and "tokenizer.json cannot be written: Read-only file system" in said[0]
    names = {path.name for path in folder.iterdir()}
    assert names == {"tiktoken.model", "tokenizer_config.json"}


def test_commands_that_make_one_tokenizer_at_a_time(tmp_path: Path) -> None:
    folder, said = copied("kimi", tmp_path / "model"), list[str]()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: write_missing_tokenizer(folder, said.append), range(8)))
    assert said and all(line.endswith("was made from tiktoken.model") for line in said)
    assert open_tokenizer(folder / "tokenizer.json").get_vocab_size() == 307 + 258
    assert not list(folder.glob(".*"))
