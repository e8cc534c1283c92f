"""A Hugging Face folder for a GGUF file: `config.json`, tokenizer, chat template, and a link to the
weights, which are read where they are.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from jmoe.models.folder import read_text
from jmoe.models.gguf.config import config_fields
from jmoe.models.gguf.file import GgufFile, read_gguf
from jmoe.models.gguf.tokenizer import end_token_ids, gguf_tokenizer, tokenizer_settings
from jmoe.models.safetensors_io import replace_text_durably, unused_name_beside
from jmoe.models.tokenizer_file import SETTINGS, TOKENIZER, companion_file_names
from jmoe.models.weight_files import GGUF_LINK
from jmoe.types import JsonObject


def gguf_folder(file: Path, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Write the folder of a GGUF file's model, `FILE.gguf.jmoe`, and return it.

    It is beside the file, or in `cache_dir` if that is given. A `tokenizer.json` beside the file,
    with what belongs to it, takes precedence over the file's tokenizer. Several processes may call
    this at a time. Raises ValueError naming the metadata that is not read, OSError if the folder
    cannot be written.
    """
    model = read_gguf(file)
    texts = {"config.json": _json_text(config_fields(model))} | _tokenizer_texts(model)
    folder = _folder_of(file, cache_dir)
    try:
        _write_folder(folder, texts, file.absolute())
    except OSError as error:
        raise OSError(
            f"{folder}: cannot be written: {error.strerror or error}; give serve.py a --cache-dir,"
            f" or give a link to {file.name} in a folder that can be written"
        ) from error
    return folder


def _folder_of(file: Path, cache_dir: str | os.PathLike[str] | None) -> Path:
    """Return the path of a file's folder; in `cache_dir` its name has a hash of the file's path."""
    if not cache_dir:
        return file.parent / f"{file.name}.jmoe"
    place = hashlib.sha256(os.fsencode(file.absolute())).hexdigest()[:12]
    return Path(cache_dir).expanduser() / f"{file.name}-{place}.jmoe"


def _write_folder(folder: Path, texts: Mapping[str, str], weights: Path) -> None:
    """Write the files of a folder, and its link to the weights, unless they are as they should be.

    Files of a tokenizer that an earlier call wrote, and this one does not, are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (TOKENIZER, *companion_file_names(folder)):
        if name not in texts:
            (folder / name).unlink(missing_ok=True)
    for name, text in texts.items():
        file = folder / name
        if not file.is_file() or file.read_bytes() != text.encode():
            file.parent.mkdir(exist_ok=True)
            replace_text_durably(file, text)
    link = folder / GGUF_LINK
    if not link.is_symlink() or link.readlink() != weights:
        new = unused_name_beside(link)
        new.symlink_to(weights)
        new.replace(link)


def _tokenizer_texts(model: GgufFile) -> dict[str, str]:
    """Return {file name: text} of the tokenizer's files: those beside the GGUF file, and what its
    metadata says instead of those that are not there.
    """
    beside = model.path.parent
    texts = {
        SETTINGS: _json_text(tokenizer_settings(model)),
        "generation_config.json": _json_text({"eos_token_id": end_token_ids(model)}),
    }
    if not (beside / TOKENIZER).is_file():
        return texts | {TOKENIZER: gguf_tokenizer(model).to_str()}
    names = [TOKENIZER, *companion_file_names(beside)]
    return texts | {name: read_text(beside / name) for name in names}


def _json_text(fields: JsonObject) -> str:
    return json.dumps(fields, indent=2) + "\n"
