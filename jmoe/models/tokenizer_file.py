"""Read the tokenizer files of a Hugging Face folder as transformers does.

`truncation` and `padding` in a `tokenizer.json`, leftovers from training, are always disabled:
transformers also resets both for each call.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, processors

from jmoe.config import check
from jmoe.memory.direct_io import name_file_in_errors
from jmoe.models.folder import has_file
from jmoe.types import Json, JsonObject

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
OLD_SETTINGS = "special_tokens_map.json"
# Files beside a tokenizer.json that define special tokens, the chat template, and defaults for
# generation.
BESIDE = (
    SETTINGS,
    OLD_SETTINGS,
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
TEMPLATE_FOLDER = "additional_chat_templates"  # of further chat templates, NAME.jinja
# Tokenizer formats of other libraries; some models have no tokenizer.json beside them.
# `other_tokenizers.py` makes one from the first two.
OTHER_TOKENIZERS = ("tiktoken.model", "tokenizer.model", "tekken.json", "vocab.json")
# options of an added token that say how it is matched in a text
ADDED_TOKEN = ("single_word", "lstrip", "rstrip", "normalized", "special")
# Tokenizer classes of transformers 4 that honour `add_bos_token`; others rely on tokenizer.json.
ADDING_BOS = tuple(
    f"{name}Tokenizer{end}"
    for name in ("Llama", "CodeLlama", "Gemma", "Cohere", "GPTNeoX")
    for end in ("", "Fast")
)


def find_additional_chat_templates(folder: Path) -> dict[str, Path]:
    """Return {name: file} of a folder's additional chat templates.

    Raises ValueError if `TEMPLATE_FOLDER` is not a folder, or an entry of it not a file.
    """
    additional = folder / TEMPLATE_FOLDER
    if os.path.lexists(additional) and not additional.is_dir():
        raise ValueError(f"{additional}: must be a folder of templates, or not be there")
    return {path.stem: path for path in sorted(additional.glob("*.jinja")) if has_file(path)}


def companion_file_names(folder: Path) -> list[str]:
    """Return the names, relative to `folder`, of the files of `BESIDE` and the additional chat
    templates that it holds.
    """
    templates = [
        f"{TEMPLATE_FOLDER}/{file.name}" for file in find_additional_chat_templates(folder).values()
    ]
    return [name for name in BESIDE if (folder / name).is_file()] + templates


def tokenizer_file(folder: Path, option_name: str = "MODEL") -> Path:
    """Return the path of a folder's `tokenizer.json`. Raises ValueError if there is none.

    option_name: the option that gave the folder, for the error.
    """
    others = [other for other in OTHER_TOKENIZERS if (folder / other).is_file()]
    instead = (
        f"; none was made from its {others[0]}: convert it, with transformers" if others else ""
    )
    check(
        has_file(folder / TOKENIZER),
        option_name,
        str(folder),
        f"must hold a tokenizer.json{instead}",
    )
    return folder / TOKENIZER


def open_tokenizer(file: Path) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json`, without truncation or padding.

    Adds tokens that only tokenizer_config.json lists. Prepends `bos_token` to every text if
    tokenizer_config.json has `add_bos_token: true` and a tokenizer_class of `ADDING_BOS`, or none:
    transformers 4 did so, transformers 5 leaves it to tokenizer.json, and some releases
    (DeepSeek-V3) lack it there. Raises ValueError naming the damaged file.
    """
    try:
        with name_file_in_errors(file):
            tokenizer = parse_tokenizer(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    settings = read_json_if_present(file.with_name(SETTINGS))
    _add_missing_tokens(
        tokenizer, settings.get("added_tokens_decoder") or {}, file.with_name(SETTINGS)
    )
    token = special_token_texts(settings, file.parent).get("bos_token")
    adds = (
        settings.get("add_bos_token") is True
        and settings.get("tokenizer_class", "LlamaTokenizer") in ADDING_BOS
    )
    if adds and token is not None:
        prepend_token(tokenizer, token, file)
    return tokenizer


def parse_tokenizer(content: bytes) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json`'s content, without truncation or padding.

    Raises ValueError if the content is not readable.
    """
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # tokenizers raises bare Exception; nothing is swallowed
        raise ValueError(f"not a readable tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _add_missing_tokens(tokenizer: Tokenizer, numbered: Json, settings: Path) -> None:
    """Add the tokens of `added_tokens_decoder` that the tokenizer lacks, in the order of their ids.

    Raises ValueError if a token would get another id than the table says.
    """
    try:
        tokens = [
            (int(number), dict(entry), str(entry["content"])) for number, entry in numbered.items()
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{settings}: added_tokens_decoder must be a table of numbers and tokens"
        ) from error
    for number, entry, content in sorted(tokens, key=lambda token: token[0]):
        if tokenizer.token_to_id(content) is not None:
            continue
        options = {name: bool(entry[name]) for name in ADDED_TOKEN if name in entry}
        tokenizer.add_tokens([AddedToken(content, **options)])
        own = tokenizer.token_to_id(content)
        if own != number:
            raise ValueError(
                f"{settings}: token {content!r} is {number}, and would be {own}: tokenizer.json"
                " lacks others"
            )


def prepend_token(tokenizer: Tokenizer, token: str, file: Path) -> None:
    """Make the tokenizer prepend a token to every text, unless it already does.

    Raises ValueError if the tokenizer does not have the token.
    """
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise ValueError(
            f"{file}: has no token {token!r}, the bos_token of {SETTINGS}, where add_bos_token is"
            " true"
        )
    if token_id in tokenizer.encode("").ids:
        return
    # replaces the tokenizer's own post-processor, as transformers 4 does
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[f"{token}:0", "$A:0"],
        pair=[f"{token}:0", "$A:0", f"{token}:1", "$B:1"],
        special_tokens=[(token, token_id)],
    )


def special_token_texts(settings: Mapping[str, Json], folder: Path) -> dict[str, str]:
    """Return {name: text} of the special tokens: each `..._token` that is a string or has
    `content`.

    settings: the content of tokenizer_config.json. An old one, without `added_tokens_decoder`, may
        leave its tokens to special_tokens_map.json.
    """
    old = {} if "added_tokens_decoder" in settings else read_json_if_present(folder / OLD_SETTINGS)
    extra = settings.get("extra_special_tokens")
    tokens = {name: token for name, token in settings.items() if name.endswith("_token")}
    tokens |= {**(extra if isinstance(extra, dict) else {}), **old}
    contents = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in tokens.items()
    }
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def read_json_if_present(path: Path) -> JsonObject:
    """Return the JSON object in a file, or {} if the file is missing.

    Raises ValueError naming the file if it is damaged.
    """
    if not has_file(path):
        return {}
    try:
        with name_file_in_errors(path):
            config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not readable JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: must be a JSON object")
    return config


def byte_level_characters() -> list[str]:
    """Return the character that stands for each byte in a byte-level BPE vocabulary: its own if it
    is printable, else one from 256 on. This is GPT-2's `bytes_to_unicode`.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
