"""Make the `tokenizer.json` of a folder that ships a tokenizer in another library's format."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenizers import Tokenizer

from jmoe.models import sentencepiece_file, tiktoken_file
from jmoe.models.folder import has_file
from jmoe.models.safetensors_io import replace_text_durably
from jmoe.models.tokenizer_file import SETTINGS, TOKENIZER, read_json_if_present

# {file: a function from a folder to its tokenizer}
READERS: dict[str, Callable[[Path], Tokenizer]] = {
    tiktoken_file.FILE: tiktoken_file.read_tiktoken,
    sentencepiece_file.FILE: sentencepiece_file.read_sentencepiece,
}


# Beside a tokenizer.json that was made here: the SHA-256 of it and of the files it was made from.
RECORD = "tokenizer.json.made_from"


def write_missing_tokenizer(folder: Path, say: Callable[[str], None]) -> None:
    """Write `tokenizer.json` into a model's folder that has another tokenizer alone, and say so.

    One that was made by an earlier call, and not changed since, is made again once its source has
    changed. What prevents it is said too: a command that needs no tokenizer goes on.
    """
    name = next((name for name in READERS if has_file(folder / name)), None)
    if name is None:
        return
    sources = {file: _digest(folder / file) for file in (name, SETTINGS) if has_file(folder / file)}
    if has_file(folder / TOKENIZER) and not _is_outdated(folder, sources):
        return
    try:
        text = READERS[name](folder).to_str()
    except (ValueError, OSError) as error:
        say(f"no {TOKENIZER} can be made from {name}: {error}")
        if has_file(folder / TOKENIZER):  # of another source
            (folder / TOKENIZER).unlink()
        return
    record = {"sources": sources, TOKENIZER: hashlib.sha256(text.encode()).hexdigest()}
    try:
        # first: a tokenizer.json that no record describes would count as the user's own
        replace_text_durably(folder / RECORD, json.dumps(record, indent=1) + "\n")
        replace_text_durably(folder / TOKENIZER, text)
    except OSError as error:
        say(
            f"{folder / TOKENIZER} cannot be written: {error.strerror}; give a folder of links to"
            " the files of this one (cp -rs) instead"
        )
    else:
        say(f"{folder / TOKENIZER} was made from {name}")


def _is_outdated(folder: Path, sources: Mapping[str, str]) -> bool:
    """Return whether `tokenizer.json` was made here, from files that have changed since."""
    record = read_json_if_present(folder / RECORD)
    is_ours = record.get(TOKENIZER) == _digest(folder / TOKENIZER)
    return is_ours and record.get("sources") != sources


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
