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
    """Return {name: content} of the files with which a chat model is served: chat templates,
    special tokens and generation defaults beside `data.tokenizer`.

    `data.chat_template`, if set, replaces all templates, also the one for requests with tools.
    """
    files = {}
    if config.tokenizer is not None:
        files = _read_companion_files(Path(config.tokenizer).expanduser().parent)
    if config.chat_template is not None:
        files = {name: content for name, content in files.items() if not _is_template(name)}
        files[TEMPLATE_FILE] = Path(config.chat_template).expanduser().read_bytes()
    return files


def write_chat_files(config: DataConfig, folder: Path) -> None:
    """Write the files that `chat_files` returns into `folder`, beside token shards."""
    for name, content in chat_files(config).items():
        (folder / name).parent.mkdir(exist_ok=True)
        replace_content_durably(folder / name, content)


def replace_chat_files(
    files: Mapping[str, bytes], config: DataConfig, folders: Sequence[Path]
) -> dict[str, bytes]:
    """Return `files` (those of a checkpoint, {name: content}) with the chat files of its training
    samples, whose chat templates replace all templates in `files`.

    The chat files come from the folders of the samples' shards, or from `chat_files` if a folder
    has none. Raises ValueError if two folders' samples were made with different templates.
    """
    own = chat_files(config)
    by_folder = {folder: _read_companion_files(folder) or own for folder in folders}
    first, chosen = next(iter(by_folder.items()))
    for folder, others in by_folder.items():
        if _select_tokenizing_files(others) != _select_tokenizing_files(chosen):
            raise ValueError(
                f"data.path: the samples of {folder} have another chat template or {SETTINGS} than"
                f" those of {first}; make their shards again, with one --tokenizer and"
                " --chat-template"
            )
    if any(map(_is_template, chosen)):
        files = {name: content for name, content in files.items() if not _is_template(name)}
    return {**files, **chosen}


def _read_companion_files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in companion_file_names(folder)}


def _select_tokenizing_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return those of `files`, {name: content}, that decide how chats become tokens: the chat
    templates and tokenizer_config.json.
    """
    return {name: files[name] for name in files if _is_template(name) or name == SETTINGS}


def _is_template(name: str) -> bool:
    return name == TEMPLATE_FILE or name.startswith(f"{TEMPLATE_FOLDER}/")
