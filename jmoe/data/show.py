"""Command line that prints what samples for fine-tuning become: their tokens, and which of them the
loss counts.

Usage: python -m jmoe.data.show FILE --model M.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from jmoe.config import DataConfig
from jmoe.config.train import TrainOn
from jmoe.data.input_file import InputFile
from jmoe.data.sample_encoder import (
    Encoded,
    EncodedPair,
    EncodedSample,
    SampleEncoder,
    encode_in_batches,
    make_sample_encoder,
)
from jmoe.data.samples import ANSWER_FIELDS
from jmoe.data.text_checks import check_and_detect_encodings
from jmoe.data.text_files import TextInput, find_text_input, mark_inputs_with_samples
from jmoe.data.text_pieces import describe_position, read_samples
from jmoe.data.tokenizer import load_tokenizer
from jmoe.models.tokenizer_file import tokenizer_file
from jmoe.runtime import end_at_once_on_interrupt

# a learned token, and the end of its marks: green on a terminal
COLORS, PLAIN = ("\x1b[30;42m", "\x1b[0m"), ("\u00ab", "\u00bb")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print samples; return the exit status: 2 for a user's mistake, 1 if a sample that was read
    cannot be trained on.
    """
    options = _build_parser().parse_args(arguments)
    try:
        config = DataConfig(
            path=(options.file,),
            field=options.field,
            chat_template=options.chat_template,
            train_on=options.train_on,
            preferences=options.preferences,
        )
        file = _find_and_check_sample_file(config)
        path = tokenizer_file(Path(options.model).expanduser(), "--model")
        encoder = make_sample_encoder(config, load_tokenizer(path, 2**31, encode_control=True))
        status = 0
        for position, sample in _encode_first_samples(encoder, file, options.samples):
            where = describe_position(file, position)
            if isinstance(sample, ValueError):
                print(f"{where}: {sample}")
                status = 1
                continue
            names = ANSWER_FIELDS if isinstance(sample, EncodedPair) else ("",)
            for name, own in zip(names, sample.sequences, strict=True):
                _print_sample(encoder, own, f"{where} {name}".rstrip(), options.ids)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


def _print_sample(
    encoder: SampleEncoder, sample: EncodedSample, where: str, with_ids: bool
) -> None:
    end = "" if _ends_in_trained_control_token(encoder, sample) else ", none of them ends an answer"
    print(f"{where}: {len(sample.ids)} tokens, {sample.num_trained} learned{end}")
    print(_text_with_marked_tokens(encoder, sample, with_ids))


def _find_and_check_sample_file(config: DataConfig) -> InputFile:
    """Return the one file of samples. Raises ValueError that lists its bad records."""
    inputs = [_find_sample_file(config)]
    (entry,) = mark_inputs_with_samples(inputs, preferences=config.preferences)
    (file,) = check_and_detect_encodings(entry.files, config.encoding, lambda *_: None)
    return file


def _find_sample_file(config: DataConfig) -> TextInput:
    """Return the file of `data.path`. Raises ValueError for several files, and for text without
    samples.
    """
    entry = find_text_input(config.path[0], None, config.field, lambda *_: None)
    if len(entry.files) != 1 or entry.is_shards:
        raise ValueError(f"FILE = {config.path[0]!r}: must be one file of samples")
    if not mark_inputs_with_samples([entry])[0].files[0].has_samples:
        raise ValueError(
            f"FILE = {config.path[0]!r}: must hold samples, such as chats; every token of a text is"
            " learned"
        )
    return entry


def _encode_first_samples(
    encoder: SampleEncoder, file: InputFile, count: int
) -> Iterator[tuple[int, Encoded | ValueError]]:
    samples = itertools.islice(read_samples(file, 0, file.size_bytes), count)
    yield from encode_in_batches(encoder, samples)


def _ends_in_trained_control_token(encoder: SampleEncoder, sample: EncodedSample) -> bool:
    """Return whether the last token to learn is a control token, at which a server may stop."""
    last = int(sample.ids[sample.trained][-1])
    return encoder.tokenizer.tokenizer.id_to_token(last) in encoder.tokenizer.control_tokens


def _text_with_marked_tokens(encoder: SampleEncoder, sample: EncodedSample, with_ids: bool) -> str:
    """Return the sample's tokens, separated by `|`, with marks around those that are learned."""
    begin, end = COLORS if sys.stdout.isatty() else PLAIN
    tokenizer, text = encoder.tokenizer.tokenizer, ""
    for i, (token, learned) in enumerate(zip(sample.ids.tolist(), sample.trained, strict=True)):
        shown = tokenizer.decode([token], skip_special_tokens=False)
        shown = f"{token}:{shown!r}" if with_ids else shown
        text += f"{begin}{shown}{end}" if learned and i else f"{shown}|"
    return text


def _build_parser() -> argparse.ArgumentParser:
    defaults = DataConfig()
    parser = argparse.ArgumentParser(
        prog="python -m jmoe.data.show",
        description=(
            "Print the tokens of samples for fine-tuning, as train.py takes them; those that the"
            " loss counts are green, or in angle quotes if the output is no terminal."
        ),
    )
    parser.add_argument("file", metavar="FILE", help="chats or other samples, as for data.path")
    parser.add_argument(
        "--model", required=True, metavar="M", help="folder with tokenizer.json and chat template"
    )
    parser.add_argument(
        "--samples", type=int, default=3, metavar="N", help="how many, from the first (%(default)s)"
    )
    parser.add_argument("--ids", action="store_true", help="also print the id of each token")
    parser.add_argument(
        "--field", default=defaults.field, help="the field with the text (%(default)s)"
    )
    parser.add_argument("--chat-template", metavar="FILE", help="instead of the model's own")
    parser.add_argument(
        "--train-on",
        choices=get_args(TrainOn),
        default=defaults.train_on,
        help="the tokens in the loss (%(default)s)",
    )
    parser.add_argument(
        "--preferences", action="store_true", help="records hold chosen and rejected answers"
    )
    return parser


if __name__ == "__main__":
    end_at_once_on_interrupt()
    sys.exit(main())
