"""Read `tokenizer.model`, a sentencepiece model, where a folder has no `tokenizer.json`.

Byte-pair models are read (Llama's kind, which Mixtral and ERNIE 4.5 have); the package
sentencepiece reads the file. transformers 4's `legacy: false` puts the space before a text's first
word alone, otherwise one stands before each piece of text between special tokens.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from jmoe.config import check
from jmoe.memory.direct_io import name_file_in_errors
from jmoe.models.tokenizer_file import (
    SETTINGS,
    prepend_token,
    read_json_if_present,
    special_token_texts,
)

FILE = "tokenizer.model"
SPACE = "▁"
_BPE = 2  # of trainer_spec.model_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # types of pieces
ADDS_BOS = ("LlamaTokenizer", "LlamaTokenizerFast")  # unless add_bos_token says otherwise


def read_sentencepiece(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder's `tokenizer.model` and `tokenizer_config.json`.

    Raises ValueError naming the file that is damaged, or of a kind that is not read.
    """
    file, model = folder / FILE, _read_model(folder / FILE)
    kind, spec = model.trainer_spec.model_type, model.normalizer_spec
    check(kind == _BPE, f"{file}: model_type", kind, f"must be {_BPE}, byte-pair encoding")
    trims = spec.remove_extra_whitespaces
    check(not trims, f"{file}: remove_extra_whitespaces", trims, "is not supported: must be false")
    settings = read_json_if_present(folder / SETTINGS)
    pieces = [piece.piece for piece in model.pieces]
    unknown = next((p.piece for p in model.pieces if p.type == _UNKNOWN), None)
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        BPE(
            vocabulary,
            _merges_of_vocabulary(vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=model.trainer_spec.byte_fallback,
        )
    )
    charsmap = []
    if spec.precompiled_charsmap:
        charsmap = [normalizers.Precompiled(spec.precompiled_charsmap)]
    if settings.get("legacy", True) is False:
        scheme = "first" if spec.add_dummy_prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme, split=False)
        tokenizer.normalizer = normalizers.Sequence(charsmap)
    else:
        prefix = [normalizers.Prepend(SPACE)] * spec.add_dummy_prefix
        tokenizer.normalizer = normalizers.Sequence(
            [*charsmap, *prefix, normalizers.Replace(" ", SPACE)]
        )
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] * spec.add_dummy_prefix
    tokenizer.decoder = decoders.Sequence(steps)
    for piece in model.pieces:
        if piece.type in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            special = piece.type != _USER_DEFINED
            token = AddedToken(piece.piece, special=special, normalized=False)
            tokenizer.add_special_tokens([token]) if special else tokenizer.add_tokens([token])
    bos = special_token_texts(settings, folder).get("bos_token")
    if settings.get("add_bos_token", settings.get("tokenizer_class") in ADDS_BOS) and bos:
        prepend_token(tokenizer, bos, file)
    return tokenizer


def _read_model(file: Path) -> Any:
    """Return the sentencepiece `ModelProto` of a file."""
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        words = "needs sentencepiece and protobuf: pip install 'jmoe[sentencepiece]'"
        raise ValueError(f"{file}: {words}") from error
    messages: Any = sentencepiece_model_pb2  # its classes are made at import
    model = messages.ModelProto()
    try:
        with name_file_in_errors(file):
            model.ParseFromString(file.read_bytes())
    except DecodeError as error:
        raise ValueError(f"{file}: is no sentencepiece model: {error}") from error
    return model


def _merges_of_vocabulary(vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that make a piece, those of the first pieces first."""
    pairs = [
        (number, vocabulary[piece[:i]], vocabulary[piece[i:]], piece[:i], piece[i:])
        for piece, number in vocabulary.items()
        for i in range(1, len(piece))
        if piece[:i] in vocabulary and piece[i:] in vocabulary
    ]
    return [(left, right) for *_, left, right in sorted(pairs)]
