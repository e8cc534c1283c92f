"""Tokens/s with experts in host memory over tokens/s with all of them on the device.

In host memory the host updates the experts (`tiers.update`), and gradients go there in bfloat16;
the weights of all layers stay on the device in the dtype of the products (`device_layers`). A
step of more tokens than --micro-batch-tokens has several micro-batches on both sides, so that one
compiled layer serves all steps.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from benchmarks.offload.session import Session, config_of
from jmoe.config import TrainConfig
from jmoe.training.trainer import make_trainer

PLACES = ("device", "host")
WARM_UP = 2  # steps, in which programs are compiled and memory is used for the first time


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `config_at` that other measurements lack."""
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[8192, 16384, 32768], help="a step's, of retention"
    )
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=8192, help="the most, of retention"
    )


def config_at(a: argparse.Namespace, folder: Path, place: str, tokens: int) -> TrainConfig:
    """Return the run of steps of `tokens`, with experts, optimizer and gradients on the tier
    `place`.
    """
    tiers: dict[str, Any] = {"gradients": "host"}
    if place == "host":
        tiers |= {"update": "host", "gradient_dtype": "bfloat16", "device_layers": a.layers}
    run = config_of(a, folder, experts=place, optimizer=place, **tiers)
    return replace(
        run,
        batch_size=tokens // a.sequence_length,
        gradient_accumulation_steps=max(1, tokens // a.micro_batch_tokens),
    )


def measure(a: argparse.Namespace, folder: Path) -> JsonObject:
    """Return, by tokens of a step, the speed that a run keeps with experts in host memory."""
    # one after the other, since both states together may not fit the device
    taken = {place: _take_steps(a, folder, place) for place in PLACES}
    rows = [
        {
            "tokens": tokens,
            "step_s": {place: report.median(taken[place][tokens]) for place in PLACES},
            "speed_of_device": report.ratio(*(taken[place][tokens] for place in PLACES)),
        }
        for tokens in a.tokens
    ]
    return {
        "parameters_of_experts": 3 * a.hidden_size * a.intermediate_size * a.layers * a.experts,
        "rows": rows,
    }


def _take_steps(a: argparse.Namespace, folder: Path, place: str) -> dict[int, list[float]]:
    """Return the seconds of the steps after the warm-up, by tokens of a step; one state trains
    through all of them.
    """
    session: Session | None = None
    taken = dict[int, list[float]]()
    for tokens in a.tokens:
        config = config_at(a, folder, place, tokens)
        if session is None:
            session = Session(config, make=make_trainer)
        else:
            session.replace_config(config)
        seconds = list[float]()
        for number in range(WARM_UP + a.rounds):
            seconds.append(session.step(number).seconds)
            shown = {"tokens": tokens, "experts": place, "step": number}
            report.progress(shown | {"step_s": round(seconds[-1], 4)})
        taken[tokens] = seconds[WARM_UP:]
    if session is not None:
        session.program.close()
    return taken
