"""The tokenizer and chat template of a GGUF file's metadata, as files of a Hugging Face folder.

Byte-level BPE (`tokenizer.ggml.model` = gpt2) is read, whose tokens and merges the file holds; how
text is cut before it is known by name alone (`tokenizer.ggml.pre`), so `PATTERNS` has the regular
expressions of the names that jmoe's families use.
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from jmoe.config import check
from jmoe.models.gguf.file import GgufFile
from jmoe.types import JsonObject

# types of tokens that are matched in a text as they are
_CONTROL, _USER_DEFINED = 3, 4
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_THREE_DIGITS = _QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# {tokenizer.ggml.pre: how text is cut before merges; None for GPT-2's own pattern}
PATTERNS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "olmo": None,
    "qwen2": _QWEN,
    "glm4": _THREE_DIGITS,
    "chatglm-bpe": _THREE_DIGITS,
    "gpt-4o": _GPT_4O,
}


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Return the tokenizer of a GGUF file. Raises ValueError naming the key that is not read."""
    metadata = file.metadata
    kind, cut = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    words = "must be gpt2, a byte-level BPE: put the tokenizer.json of the model beside the file"
    check(kind == "gpt2", "tokenizer.ggml.model", kind, words)
    words = f"must be one of {', '.join(PATTERNS)}: put the model's tokenizer.json beside the file"
    check(cut in PATTERNS, "tokenizer.ggml.pre", cut, words)
    tokens = _vocabulary(file)
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    words = f"must be as many as tokens, {len(tokens)}"
    check(len(types) == len(tokens), "tokenizer.ggml.token_type", len(types), words)
    tokenizer = Tokenizer(_byte_pair_model(tokens, metadata.get("tokenizer.ggml.merges", [])))
    pattern = PATTERNS[str(cut)]
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind_of_token in zip(tokens, types, strict=True):
        if kind_of_token in (_CONTROL, _USER_DEFINED):
            special = kind_of_token == _CONTROL
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    return tokenizer


def _vocabulary(file: GgufFile) -> list[str]:
    """Return the tokens in the order of their ids."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    check(isinstance(tokens, list), "tokenizer.ggml.tokens", tokens, "must be a list of tokens")
    assert isinstance(tokens, list)
    return tokens


def _byte_pair_model(tokens: list[str], merges: list[str]) -> BPE:
    """Return the model of tokens and of merges "LEFT RIGHT", first merges first."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    repeated = len(tokens) - len(vocabulary)
    check(not repeated, "tokenizer.ggml.tokens", len(tokens), f"has {repeated} tokens twice")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    for left, right in pairs:
        is_known = left in vocabulary and right in vocabulary and left + right in vocabulary
        words = "must be two tokens whose concatenation is a token"
        check(is_known, "tokenizer.ggml.merges", f"{left} {right}", words)
    return BPE(vocabulary, pairs)


def tokenizer_settings(file: GgufFile) -> JsonObject:
    """Return the `tokenizer_config.json` of a GGUF file: special tokens and the chat template."""
    metadata, tokens = file.metadata, _vocabulary(file)
    settings: JsonObject = {
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "tokenizer_class": "LlamaTokenizer",  # a class that honours add_bos_token
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        field = f"tokenizer.ggml.{key}_token_id"
        number = metadata.get(field)
        if number is not None:
            check(number < len(tokens), field, number, f"must be below {len(tokens)}, the tokens")
            settings[f"{name}_token"] = tokens[number]
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    return settings


def end_token_ids(file: GgufFile) -> list[int]:
    """Return the tokens that end a text or an answer."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (file.metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return list(dict.fromkeys(int(token) for token in ids if token is not None))
