"""Tokenizer files as releases have them: settings left from training, a first token that is
asked for elsewhere.
"""

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from jmoe.models.tokenizer_file import open_tokenizer, tokenizer_file
from jmoe.programs.generate import encode_prompt
from tests.model_configs import CHECKPOINTS
from tests.test_architecture import SOURCES, tree_of
from tests.tiny_engines import tiny_engine
from tests.word_tokenizers import BOS, LONG, word_tokenizer, write_word_tokenizer

ADD_BOS = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "bos_token": "<s>"}
BYTE_LEVEL = processors.ByteLevel(trim_offsets=False)
BEGINS = processors.TemplateProcessing(
    single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
)
ENDS = processors.TemplateProcessing(
    single="$A world", pair="$A $B world", special_tokens=[("world", 2)]
)


def test_texts_are_neither_cut_nor_padded(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_word_tokenizer(tmp_path))
    assert tokenizer.encode(LONG).ids == [1, 2, 3, 4, 5] * 20
    assert [one.ids for one in tokenizer.encode_batch(["hello", "hello world"])] == [[1], [1, 2]]


def test_an_engine_and_generate_take_whole_texts_and_their_first_token(tmp_path: Path) -> None:
    """A prompt of 30 tokens had 8, and one of a batch of two was padded."""
    folder = shutil.copytree(CHECKPOINTS / "mixtral", tmp_path / "model")
    write_word_tokenizer(folder, **ADD_BOS)
    prompt = "hello world this is text " * 6
    assert encode_prompt(folder, prompt, 4) == [BOS, *[1, 2, 3, 4, 5] * 6]
    with tiny_engine(folder) as engine:
        assert engine.add_request(prompt).prompt_token_ids == [BOS, *[1, 2, 3, 4, 5] * 6]
        assert engine.tokenizer is not None
        batch = engine.tokenizer.encode_batch_fast(["hello", "hello world"])
        chat = engine.tokenizer.encode("<s> hello", add_special_tokens=False)
    assert [one.ids for one in batch] == [[BOS, 1], [BOS, 1, 2]]
    assert chat.ids == [BOS, 1]  # a chat's template has written the token itself


@pytest.mark.parametrize(
    ("own", "settings", "expected"),
    [
        (None, ADD_BOS, [BOS, 1]),
        (BYTE_LEVEL, ADD_BOS, [BOS, 1]),
        (ENDS, ADD_BOS, [BOS, 1]),
        (BEGINS, ADD_BOS, [BOS, 1]),  # once
        (None, ADD_BOS | {"bos_token": {"content": "<s>", "lstrip": False}}, [BOS, 1]),
        (None, ADD_BOS | {"add_bos_token": False}, [1]),
        # tokenizer.json decides, as in transformers 5
        (BEGINS, ADD_BOS | {"add_bos_token": False}, [BOS, 1]),
        (None, ADD_BOS | {"bos_token": None}, [1]),
        (None, ADD_BOS | {"tokenizer_class": "GPTNeoXTokenizer"}, [BOS, 1]),
        (None, {"add_bos_token": True, "bos_token": "<s>"}, [BOS, 1]),
        # which goes by tokenizer.json alone
        (ENDS, ADD_BOS | {"tokenizer_class": "PreTrainedTokenizerFast"}, [1, 2]),
        (None, {}, [1]),
    ],
)
def test_the_first_token(
    own: Any, settings: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    tokenizer = word_tokenizer()
    if own is not None:
        tokenizer.post_processor = own
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    opened = open_tokenizer(tmp_path / "tokenizer.json")
    assert opened.encode("hello").ids == expected
    assert opened.encode("hello", add_special_tokens=False).ids == [1]
    # as `jmoe.deploy.lower` writes it
    assert Tokenizer.from_str(opened.to_str()).encode("hello").ids == expected


def test_a_first_token_in_the_old_file(tmp_path: Path) -> None:
    write_word_tokenizer(tmp_path, add_bos_token=True)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    assert open_tokenizer(tmp_path / "tokenizer.json").encode("hello").ids == [BOS, 1]


END = {
    "content": "<|im_end|>",
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
}
END |= {"special": True}


def test_tokens_that_tokenizer_config_numbers(tmp_path: Path) -> None:
    """A fine-tune may keep the tokenizer.json of its base: a token of its chats was text, of
    many pieces.
    """
    numbered = {
        "8": END,
        "7": END | {"content": "<tool>", "special": False},
        "6": END | {"content": "<s>"},
    }
    file = write_word_tokenizer(tmp_path, added_tokens_decoder=numbered)
    opened = open_tokenizer(file)
    assert opened.encode("hello<|im_end|> <tool> <s>").ids == [1, 8, 7, 6]
    assert opened.decode([1, 8, 7]) == "hello <tool>"
    for wrong, message in (
        (
            {"9": END},
            (
                r"tokenizer_config.json: token '<\|im_end\|>' is 9, and would be 7: tokenizer.json"
                r" lacks others"
            ),
        ),
        ({"x": END}, r"added_tokens_decoder must be a table of numbers and tokens"),
        ([END], r"added_tokens_decoder must be a table of numbers and tokens"),
        ({"7": {}}, r"added_tokens_decoder must be a table of numbers and tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            open_tokenizer(write_word_tokenizer(tmp_path, added_tokens_decoder=wrong))


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    for other, message in (
        (None, r"MODEL = '.*': must hold a tokenizer.json$"),
        (
            "tiktoken.model",
            r"must hold a tokenizer.json; none was made from its tiktoken.model: convert it",
        ),
    ):
        if other:
            (tmp_path / other).write_bytes(b"IQ== 0\n")
        with pytest.raises(ValueError, match=message):
            tokenizer_file(tmp_path)
    file = write_word_tokenizer(tmp_path, add_bos_token=True, bos_token="<begin>")
    assert tokenizer_file(tmp_path) == file
    with pytest.raises(
        ValueError,
        match=r"tokenizer.json: has no token '<begin>', the bos_token of tokenizer_config",
    ):
        open_tokenizer(file)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"tokenizer_config.json: must be a JSON object"):
        open_tokenizer(file)
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json: not a readable tokenizer.json"):
        open_tokenizer(file)


def test_one_module_opens_tokenizers() -> None:
    """Whoever calls tokenizers' own functions cuts and pads texts. run.py of a lowered model
    stands for itself.
    """
    opening = [
        module
        for module in SOURCES
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("Tokenizer.from_")
    ]
    assert opening == ["jmoe.deploy.portable", "jmoe.models.tokenizer_file"]
