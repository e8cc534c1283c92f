"""Command line that tokenises text once into token shards for `train.py --data.path DIR`.

Usage: python -m jmoe.data PATH... --out DIR.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jmoe.data.corpus import write_shards
from jmoe.data.progress import PreparationProgress
from jmoe.data.text_options import add_text_options, data_config
from jmoe.runtime import end_at_once_on_interrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Write token shards and a tokenizer; return the exit status, 2 for a user's mistake."""
    options = _build_parser().parse_args(arguments)
    try:
        config = data_config(options)
        report = PreparationProgress(lambda line: print(line, file=sys.stderr, flush=True)).report
        corpus = write_shards(
            config, 2**32 if options.vocab_size is None else options.vocab_size, options.out, report
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text_bytes = sum(source.text_bytes for source in corpus.sources)
    held_out = corpus.held_out_samples
    held_out_bytes = len(corpus.held_out_bytes) if held_out is None else held_out.text_bytes
    print(
        f"{options.out}: {corpus.num_train_tokens} tokens to train on ({text_bytes} bytes of text),"
        f" {corpus.num_held_out_tokens} held out ({held_out_bytes} bytes), vocabulary"
        f" {corpus.vocab_size}; {corpus.describe_input_files()}"
    )
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jmoe.data",
        description=(
            "Tokenise text into token shards (.bin) and a tokenizer.json that train.py --data.path"
            " DIR takes."
        ),
    )
    parser.add_argument(
        "path",
        nargs="*",
        help="files, folders or globs of text, JSONL or chats; none: the standard library",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    maker = parser.add_mutually_exclusive_group(required=True)
    maker.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json")
    maker.add_argument(
        "--vocab-size", type=int, metavar="N", help="train a byte-level BPE of N tokens on the text"
    )
    add_text_options(parser)
    return parser


if __name__ == "__main__":
    end_at_once_on_interrupt()
    sys.exit(main())
