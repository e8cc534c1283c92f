"""The files with which a model trained on samples is served as it was trained: chat templates,
special tokens and defaults for generation. Folders of shards and checkpoints carry them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jmoe.config import DataConfig
from jmoe.data.shards import replace_content_durably
from jmoe.models.chat_template import TEMPLATE_FILE
from jmoe.models.tokenizer_file import SETTINGS, TEMPLATE_FOLDER, companion_file_names


def chat_files(config: DataConfig) -> dict[str, bytes]:
    """Return the files, by name, beside `data.tokenizer`; `data.chat_template`, if set, replaces
    all their templates, also the one for requests with tools.
    """
    files = {}
    if config.tokenizer is not None:
        files = _read_files(Path(config.tokenizer).expanduser().parent)
    if config.chat_template is not None:
        files = {name: content for name, content in files.items() if not _is_template(name)}
        files[TEMPLATE_FILE] = Path(config.chat_template).expanduser().read_bytes()
    return files


def write_chat_files(config: DataConfig, folder: Path) -> None:
    """Write the files of `chat_files` beside shards."""
    for name, content in chat_files(config).items():
        (folder / name).parent.mkdir(exist_ok=True)
        replace_content_durably(folder / name, content)


def with_chat_files(
    files: Mapping[str, bytes], config: DataConfig, folders: Sequence[Path]
) -> dict[str, bytes]:
    """Return a checkpoint's files with those of its samples: from the folders of their shards, or
    as `chat_files` if a folder has none. Their templates replace all of `files`.

    Raises ValueError if two folders' samples were made with different templates.
    """
    own = chat_files(config)
    by_folder = {folder: _read_files(folder) or own for folder in folders}
    first, chosen = next(iter(by_folder.items()))
    for folder, others in by_folder.items():
        if _deciding(others) != _deciding(chosen):
            raise ValueError(
                f"data.path: the samples of {folder} have another chat template or {SETTINGS} than"
                f" those of {first}; make their shards again, with one --tokenizer and"
                " --chat-template"
            )
    if any(map(_is_template, chosen)):
        files = {name: content for name, content in files.items() if not _is_template(name)}
    return {**files, **chosen}


def _read_files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in companion_file_names(folder)}


def _deciding(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files that decide how chats become tokens."""
    return {name: files[name] for name in files if _is_template(name) or name == SETTINGS}


def _is_template(name: str) -> bool:
    return name == TEMPLATE_FILE or name.startswith(f"{TEMPLATE_FOLDER}/")
