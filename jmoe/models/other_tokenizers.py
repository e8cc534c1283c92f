"""Make the `tokenizer.json` of a folder that ships a tokenizer in another library's format."""

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from jmoe.models import sentencepiece_file, tiktoken_file
from jmoe.models.folder import has_file
from jmoe.models.safetensors_io import replace_text_durably
from jmoe.models.tokenizer_file import TOKENIZER

# {file: a function from a folder to its tokenizer}
READERS: dict[str, Callable[[Path], Tokenizer]] = {
    tiktoken_file.FILE: tiktoken_file.read_tiktoken,
    sentencepiece_file.FILE: sentencepiece_file.read_sentencepiece,
}


def write_missing_tokenizer(folder: Path, say: Callable[[str], None]) -> None:
    """Write `tokenizer.json` into a model's folder that has another tokenizer alone, and say so.

    What prevents it is said too: a command that needs no tokenizer goes on.
    """
    if has_file(folder / TOKENIZER):
        return
    name = next((name for name in READERS if has_file(folder / name)), None)
    if name is None:
        return
    try:
        text = READERS[name](folder).to_str()
    except (ValueError, OSError) as error:
        say(f"no {TOKENIZER} can be made from {name}: {error}")
        return
    try:
        replace_text_durably(folder / TOKENIZER, text)
    except OSError as error:
        say(
            f"{folder / TOKENIZER} cannot be written: {error.strerror}; give a folder of links to"
            " the files of this one (cp -rs) instead"
        )
    else:
        say(f"{folder / TOKENIZER} was made from {name}")
