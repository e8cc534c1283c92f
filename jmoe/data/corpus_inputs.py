"""The inputs of `data.path`: text, samples or token shards, found and checked before anything is
written.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from jmoe.config import DataConfig
from jmoe.config.checks import check, check_unset
from jmoe.data.input_file import SHARD_SUFFIXES, Report
from jmoe.data.record_shards import MANIFEST, open_token_shard, read_manifest_hashes
from jmoe.data.shards import (
    Shard,
)
from jmoe.data.text_files import (
    TextInput,
    find_text_input,
    mark_inputs_with_samples,
    standard_library_files,
)
from jmoe.data.tokenizer import (
    CorpusTokenizer,
    load_tokenizer,
)
from jmoe.memory.identity import sampled_content_hash
from jmoe.models.tokenizer_file import TOKENIZER


def find_inputs(config: DataConfig, report: Report) -> list[TextInput]:
    if not config.path:
        return [TextInput("", tuple(standard_library_files()))]
    weights = config.weights or (None,) * len(config.path)
    inputs = [
        find_text_input(*pair, config.field, report)
        for pair in zip(config.path, weights, strict=True)
    ]
    written = [entry for entry in inputs if not entry.is_shards]
    texts = iter(mark_inputs_with_samples(written, preferences=config.preferences))
    inputs = [entry if entry.is_shards else next(texts) for entry in inputs]
    owner: dict[Path, tuple[TextInput, Path]] = {}
    for entry in inputs:
        for file in entry.files:
            first, known = owner.setdefault(file.path.resolve(), (entry, file.path))
            if first is not entry or known is not file.path:
                twice = f"is in both {first.pattern!r} and {entry.pattern!r}"
                raise ValueError(
                    f"data.path: {file.path}"
                    f" {f'is {known}, by a link' if first is entry else twice}; its held-out part"
                    " would be trained on"
                )
    if all(entry.is_shards for entry in inputs):
        check_unset(config, "data", ["encoding"], "with token shards alone, which hold no text")
    if not any(file.field for entry in inputs for file in entry.files):
        check_unset(
            config,
            "data",
            ["field"],
            "without JSON or JSONL in data.path, whose records have fields",
        )
    _check_sample_options(config, inputs)
    return inputs


def has_samples(entry: TextInput) -> bool:
    """Return whether an input holds samples for fine-tuning, as records or as token shards."""
    if entry.is_shards:
        return open_token_shard(entry.files[0].path).header.has_samples
    return entry.files[0].has_samples


def _check_sample_options(config: DataConfig, inputs: Sequence[TextInput]) -> None:
    """Raise ValueError for options of samples without samples, and for text beside samples."""
    samples = [entry for entry in inputs if has_samples(entry)]
    written = [entry for entry in samples if not entry.is_shards]
    if samples and len(samples) < len(inputs):
        text = next(entry for entry in inputs if entry not in samples)
        raise ValueError(
            f"data.path = {text.pattern!r}: is text beside the samples of {samples[0].pattern!r};"
            " give samples alone"
        )
    if not samples:
        why = "without samples, such as chats, in data.path"
        names = ["preferences", "max_prompt_tokens", "long_samples", "pack_samples"]
        check_unset(config, "data", names, why)
    for entry in samples:
        if entry.is_shards:
            layout = open_token_shard(entry.files[0].path).header.layout
            wanted = "preferences" if config.preferences else "samples"
            check(
                layout == wanted,
                "data.preferences",
                config.preferences,
                f"must be {not config.preferences} with shards of {layout} in {entry.pattern!r}",
            )
    if not written:
        why = "without samples, such as chats, in data.path that are not tokens yet"
        check_unset(config, "data", ["chat_template", "train_on"], why)
    elif config.tokenizer is None:
        check(
            any(entry.is_shards for entry in inputs),
            "data.tokenizer",
            None,
            "must be the tokenizer.json of the model whose chat format the samples take;"
            " --init-from MODEL takes the model's own",
        )


def has_shards(folder: Path) -> bool:
    return any(any(folder.glob(f"*{suffix}")) for suffix in SHARD_SUFFIXES)


def open_shards(entry: TextInput, vocab_size: int, config: DataConfig) -> list[Shard]:
    folders = sorted({file.path.parent for file in entry.files})
    listed = {folder: read_manifest_hashes(folder) for folder in folders}
    train = []
    for file in entry.files:
        shard = open_token_shard(file.path)
        expected = listed[file.path.parent].get(file.path.name, shard.header.sha256)
        if shard.header.sha256 != expected:
            raise ValueError(
                f"{file.path}: is of another preparation than the {MANIFEST} beside it; copy the"
                " whole folder"
            )
        made_for = shard.header.vocab_size
        if made_for > vocab_size:
            raise ValueError(
                f"{file.path}: its vocab_size = {made_for} exceeds model.vocab_size = {vocab_size}"
            )
        if config.control_tokens and shard.header.control != "tokens":
            raise ValueError(
                f"data.control_tokens = True: {file.path} was made without; make its shards again"
                " with python -m jmoe.data --control-tokens"
            )
        if shard.header.split != "held_out":
            train.append(shard)
    if not train:
        raise ValueError(
            f"data.path = {entry.pattern!r}: holds held-out token shards only, nothing to train on"
        )
    return train


def existing_tokenizer(
    config: DataConfig, inputs: Sequence[TextInput], shards: dict[int, list[Shard]], vocab_size: int
) -> CorpusTokenizer | None:
    """Return the tokenizer of `data.tokenizer`, or else of the shards' folder.

    Returns None if there is neither: shards without a tokenizer, or text whose tokenizer is yet to
    be trained. Raises ValueError if shards come from different tokenizers.
    """
    path = Path(config.tokenizer).expanduser() if config.tokenizer else None
    if path is None:
        beside = [inputs[i].files[0].path.parent / TOKENIZER for i in shards]
        path = next((p for p in beside if p.is_file()), None)
    tokenizer = (
        load_tokenizer(path, vocab_size, encode_control=config.control_tokens) if path else None
    )
    makers = {
        shard.header.tokenizer: inputs[i].pattern for i, group in shards.items() for shard in group
    }
    if len(makers) > 1:
        raise ValueError(
            f"data.path: the token shards in {', '.join(makers.values())} come from different"
            " tokenizers"
        )
    for maker, pattern in makers.items():
        if tokenizer is None and len(shards) < len(inputs):
            raise ValueError(
                f"data.tokenizer = None: the token shards in {pattern!r} come without a"
                f" {TOKENIZER}, so the text beside them cannot be tokenised alike"
            )
        if tokenizer is not None and tokenizer.fingerprint != maker:
            raise ValueError(
                f"data.tokenizer = {str(tokenizer.path)!r}: the token shards in {pattern!r} were"
                f" made with another tokenizer ({maker[:12]}, not {tokenizer.fingerprint[:12]})"
            )
    return tokenizer


def held_out_target_bytes(
    config: DataConfig, inputs: Sequence[TextInput], shards: dict[int, list[Shard]]
) -> list[int]:
    """Return the number of bytes of text to hold out of each input, in proportion to the inputs'
    shares of training data.
    """
    sizes = [
        (
            sum(s.header.text_bytes for s in shards[i])
            if i in shards
            else sum(f.size_bytes for f in entry.files)
        )
        for i, entry in enumerate(inputs)
    ]
    weights = [
        float(size) if entry.weight is None else entry.weight
        for size, entry in zip(sizes, inputs, strict=True)
    ]
    total = sum(weights) or 1.0
    return [
        int(min(config.held_out_bytes * weight / total, config.held_out_fraction * size))
        for size, weight in zip(sizes, weights, strict=True)
    ]


def hash_of_texts(inputs: Sequence[TextInput], report: Report) -> str:
    """Return an identity (hash) of the content of all text files."""
    files = {
        f"{i}/{file.name}": file.path for i, entry in enumerate(inputs) for file in entry.files
    }
    return sampled_content_hash(files, report=partial(report, "comparing the text"))
