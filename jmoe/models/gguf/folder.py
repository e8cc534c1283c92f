"""A Hugging Face folder for a GGUF file: `config.json`, tokenizer, chat template, and a link to the
weights, which are read where they are.
"""

import json
import os
from pathlib import Path

from jmoe.models.gguf.config import config_fields
from jmoe.models.gguf.file import GgufFile, read_gguf
from jmoe.models.gguf.tokenizer import end_token_ids, gguf_tokenizer, tokenizer_settings
from jmoe.models.safetensors_io import replace_text_durably
from jmoe.models.tokenizer_file import BESIDE, TOKENIZER
from jmoe.models.weight_files import GGUF_LINK


def gguf_folder(file: Path, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Write the folder of a GGUF file's model, `FILE.gguf.jmoe`, and return it.

    It is beside the file, or in `cache_dir` if that is given. A `tokenizer.json` beside the file,
    with what belongs to it, takes precedence over the file's tokenizer. Raises ValueError naming
    the metadata that is not read, OSError if the folder cannot be written.
    """
    model = read_gguf(file)
    fields = config_fields(model)
    texts = {"config.json": fields} | _tokenizer_texts(model)
    folder = (Path(cache_dir).expanduser() if cache_dir else file.parent) / f"{file.name}.jmoe"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in texts.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
        if not (folder / name).is_file() or (folder / name).read_text(encoding="utf-8") != text:
            replace_text_durably(folder / name, text)
    link = folder / GGUF_LINK
    if not link.exists() or link.resolve() != file.resolve():
        link.unlink(missing_ok=True)
        link.symlink_to(file.resolve())
    return folder


def _tokenizer_texts(model: GgufFile) -> dict[str, object]:
    """Return {file name: content} of the tokenizer's files."""
    beside = model.path.parent
    if (beside / TOKENIZER).is_file():
        names = [name for name in (TOKENIZER, *BESIDE) if (beside / name).is_file()]
        return {name: (beside / name).read_text(encoding="utf-8") for name in names}
    return {
        TOKENIZER: gguf_tokenizer(model).to_str(),
        "tokenizer_config.json": tokenizer_settings(model),
        "generation_config.json": {"eos_token_id": end_token_ids(model)},
    }
