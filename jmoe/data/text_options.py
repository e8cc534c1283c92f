"""Command-line options about text, shared by the programs that write token shards."""

from __future__ import annotations

import argparse
from typing import get_args

from jmoe.config import DataConfig
from jmoe.config.train import TrainOn


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how text is read and which of it is held out."""
    defaults = DataConfig()
    parser.add_argument(
        "--field", default=defaults.field, help="JSONL: the field with the text (%(default)s)"
    )
    parser.add_argument(
        "--encoding",
        nargs="+",
        default=defaults.encoding,
        metavar="NAME",
        help="of the text; several: the first that fits",
    )
    parser.add_argument(
        "--control-tokens",
        action="store_true",
        help=(
            'text that spells out a special token ("<|im_start|>") is that token, as a server'
            " reads it"
        ),
    )
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="chats: the chat template; default: the one beside the tokenizer",
    )
    parser.add_argument(
        "--train-on",
        choices=get_args(TrainOn),
        default=defaults.train_on,
        help="chats: the tokens in the loss (%(default)s)",
    )
    parser.add_argument(
        "--preferences",
        action="store_true",
        help="records hold chosen and rejected answers, for a run with dpo.beta",
    )
    parser.add_argument(
        "--held-out-fraction", type=float, default=defaults.held_out_fraction, metavar="F"
    )
    parser.add_argument("--held-out-bytes", type=int, default=defaults.held_out_bytes, metavar="N")


def data_config(options: argparse.Namespace) -> DataConfig:
    """Return the configuration that the options give. Raises ValueError for a wrong value."""
    return DataConfig(
        path=tuple(options.path),
        field=options.field,
        encoding=tuple(options.encoding),
        control_tokens=options.control_tokens,
        tokenizer=options.tokenizer,
        chat_template=options.chat_template,
        train_on=options.train_on,
        preferences=options.preferences,
        held_out_fraction=options.held_out_fraction,
        held_out_bytes=options.held_out_bytes,
    )
