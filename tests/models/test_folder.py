"""Files that a model may lack, and names that lead to no file."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jmoe.models.chat_template import read_templates
from jmoe.models.folder import has_file, read_text
from jmoe.models.generation_config import GenerationConfig
from jmoe.models.pretrained import read_config
from jmoe.models.safetensors_io import read_headers
from jmoe.models.tokenizer_file import open_tokenizer, read_json_if_present, tokenizer_file


def link_to_nothing(path: Path) -> None:
    path.symlink_to(path.with_name("moved away"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Path.mkdir, "is a folder: it must be a file, or not be there"),
        (
            link_to_nothing,
            "is a link to a file that is not there: it must be a file, or not be there",
        ),
        (os.mkfifo, "is no plain file: it must be a file, or not be there"),
    ],
)
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("generation_config.json", lambda folder: GenerationConfig.read(folder, {})),
        (
            "tokenizer_config.json",
            lambda folder: read_json_if_present(folder / "tokenizer_config.json"),
        ),
        ("special_tokens_map.json", read_templates),
        ("chat_template.jinja", read_templates),
        ("additional_chat_templates/tool_use.jinja", read_templates),
        ("tokenizer.json", tokenizer_file),
        ("model.safetensors.index.json", read_headers),
    ],
)
def test_a_name_that_leads_to_no_file(
    name: str, read: Callable[[Path], Any], make: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    """It is not taken for a file that the model does not have, without which it would be another
    model.
    """
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / name}: {words}")):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", read_config),
        ("generation_config.json", lambda folder: GenerationConfig.read(folder, {})),
        (
            "tokenizer_config.json",
            lambda folder: read_json_if_present(folder / "tokenizer_config.json"),
        ),
        ("chat_template.jinja", read_templates),
        ("tokenizer.json", lambda folder: open_tokenizer(folder / "tokenizer.json")),
        ("model.safetensors", read_headers),
        ("model.safetensors.index.json", read_headers),
    ],
)
def test_an_error_of_the_disk_names_the_file(
    name: str, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    (tmp_path / name).symlink_to("/proc/self/mem")  # cannot be read at byte 0
    with pytest.raises(OSError, match=rf"Input/output error: '{tmp_path / name}'"):
        read(tmp_path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert not has_file(tmp_path / "generation_config.json")
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").symlink_to("generation_config.json")
    assert (
        has_file(tmp_path / "tokenizer_config.json")
        and read_text(tmp_path / "tokenizer_config.json") == "{}"
    )


def test_templates_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"abc\xff")
    with pytest.raises(
        ValueError, match=r"chat_template\.jinja: is not UTF-8: invalid start byte at byte 3$"
    ):
        read_templates(tmp_path)
    (tmp_path / "additional_chat_templates").write_text("{{ messages }}")
    with pytest.raises(
        ValueError,
        match=r"additional_chat_templates: must be a folder of templates, or not be there$",
    ):
        read_templates(tmp_path)
