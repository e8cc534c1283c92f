"""Calibration text as windows of tokens: its head is for measuring, its tail is held out.

`prune`, `distil` and `deploy` use it to choose experts and to compare models.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jmoe.config import check
from jmoe.data.progress import PreparationProgress
from jmoe.data.text_checks import check_and_detect_encodings
from jmoe.data.text_files import find_text_input
from jmoe.data.text_pieces import read_pieces
from jmoe.data.tokenizer import encode_pieces, load_tokenizer
from jmoe.models.lazy_checkpoint import LazyCheckpoint

HELD_OUT_SHARE = 0.25
Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class CalibrationText:
    """Windows [B, S + 1] of tokens to measure experts on, and held-out windows to compare models
    on.

    held_out_bytes: UTF-8 bytes of the text of the predicted tokens in `held_out_BS`.
    """

    calibration_BS: Tokens
    held_out_BS: Tokens
    held_out_bytes: int

    def bits_per_byte(self, mean_loss: float) -> float:
        """Return bits per byte of text from the mean loss in nats per held-out token."""
        predicted = self.held_out_BS.shape[0] * (self.held_out_BS.shape[1] - 1)
        return mean_loss * predicted / math.log(2) / self.held_out_bytes


def windows_with_next_token(tokens: Tokens, length: int) -> Tokens:
    """Return [B, length + 1]. Neighbouring windows share one token; a last partial window is
    dropped.
    """
    count = (len(tokens) - 1) // length
    return np.stack([tokens[i * length : (i + 1) * length + 1] for i in range(count)])


def read_calibration_text(
    folder: Path, pattern: str, vocab_size: int, *, length: int, max_tokens: int
) -> CalibrationText:
    """Return the text of a file, folder or glob, tokenized for the model in `folder`.

    length: predicted tokens of a window. max_tokens: tokens to read, a quarter of which are held
    out. Raises ValueError if there are too few tokens for one window of each part.
    """
    needed = 2 * (length + 1)
    constraint = f"must be at least {needed}, two windows of {length} tokens"
    check(max_tokens >= needed, "max_tokens", max_tokens, constraint)
    loaded = load_tokenizer(folder / "tokenizer.json", vocab_size)
    report = PreparationProgress(lambda _: None).report
    try:
        source = find_text_input(pattern, None, "text", report)
        check(not source.is_shards, "text", pattern, "must be text, not token shards")
        files = check_and_detect_encodings(source.files, ("utf-8",), report)
    except ValueError as error:  # its message names train.py's option
        raise ValueError(
            str(error).replace("data.path", "text").partition("\n--data.encoding")[0]
        ) from error
    ids: list[int] = []
    for file in sorted(files, key=lambda file: file.random_rank):
        for some, _ in encode_pieces(loaded, read_pieces(file, 0, file.size_bytes)):
            ids += some
        if len(ids) >= max_tokens:
            break
    tokens = np.array(ids[:max_tokens], np.int32)
    check(len(tokens) >= needed, "text", pattern, f"has {len(tokens)} tokens: {constraint}")
    held_out = max(length + 1, int(HELD_OUT_SHARE * len(tokens)))
    tail = windows_with_next_token(tokens[-held_out:], length)
    predicted = tail[:, 1:].reshape(-1).tolist()
    text = loaded.tokenizer.decode(predicted, skip_special_tokens=True)
    return CalibrationText(
        windows_with_next_token(tokens[:-held_out], length), tail, max(1, len(text.encode()))
    )


def calibration_text_for(
    checkpoint: LazyCheckpoint, pattern: str, length: int, max_tokens: int
) -> CalibrationText:
    """Return the calibration text of `read_calibration_text` in windows of `length` tokens, or of
    the checkpoint's number of positions if that is smaller. Raises ValueError if `length` is less
    than 2.
    """
    check(length >= 2, "sequence_length", length, "must be at least 2")
    length = min(length, checkpoint.max_positions)
    return read_calibration_text(
        checkpoint.folder,
        pattern,
        checkpoint.config.vocab_size,
        length=length,
        max_tokens=max_tokens,
    )
