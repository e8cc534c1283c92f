"""Room on the device for all experts of a layer, or for the share that steps choose
(`tiers.device_experts`).
"""

import argparse
import gc
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax

from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from benchmarks.offload.session import TextSession, config_of
from jmoe.config import RouterConfig, TrainConfig
from jmoe.run.planner import training_plan

WARM_UP = 8  # steps, in which programs are compiled and the share is measured


def measure(a: argparse.Namespace, folder: Path) -> JsonObject:
    """Train the same steps on text with both, in turn; the losses must be the same to the bit.

    The router is that of ordinary training, whose loss balances the experts.
    """

    def config_with(share: float) -> TrainConfig:
        tiers = {
            "experts": "host",
            "optimizer": "host",
            "gradients": "host",
            "device_experts": share,
        }
        config = config_of(a, folder / str(share), **tiers)
        return replace(config, model=replace(config.model, router=RouterConfig()))

    sessions = {"all": TextSession(config_with(1.0))}
    losses = {"all": [sessions["all"].step(number).loss for number in range(WARM_UP)]}
    stats = sessions["all"].program.expert_stats()
    share = math.ceil(8 * stats.most_chosen_share) / 8
    sessions["chosen"] = TextSession(config_with(share))
    losses["chosen"] = [sessions["chosen"].step(number).loss for number in range(WARM_UP)]
    taken: dict[str, list[float]] = {name: [] for name in sessions}
    for number in range(WARM_UP, WARM_UP + a.rounds):
        for name, session in sessions.items():
            cost = session.step(number)
            taken[name].append(round(cost.seconds, 4))
            losses[name].append(cost.loss)
    assert losses["all"] == losses["chosen"], losses
    stats = sessions["chosen"].program.expert_stats()
    for session in sessions.values():
        session.program.close()
    del session
    sessions.clear()
    plan = training_plan(config_with(share))  # whose seconds are the same for any room
    rows = [
        {"room_for": name, "device_experts": room}
        | device_bytes(config_with(room))
        | {"step_s": report.median(taken[name]), "rounds_s": taken[name]}
        for name, room in (("all", 1.0), ("chosen", share))
    ]
    return {
        "tokens": a.batch_size * a.sequence_length,
        "chosen_share": round(stats.chosen_share, 3),
        "most_chosen_share": round(stats.most_chosen_share, 3),
        "room_at_the_end": stats.room,
        "steps_with_the_same_loss": len(losses["all"]),
        "slot_bytes_against_all": round(rows[1]["slot_bytes"] / rows[0]["slot_bytes"], 3),
        "device_bytes_against_all": round(rows[1]["device_bytes"] / rows[0]["device_bytes"], 3),
        "predicted_step_s": round(plan.step_s(), 4),
        "predicted_step_s_measured_share": round(
            plan.with_chosen_share(stats.chosen_share).step_s(), 4
        ),
        "step_s_against_all": report.ratio(taken["chosen"], taken["all"]),
        "rows": [report.progress(row) for row in rows],
    }


def device_bytes(config: TrainConfig) -> dict[str, int]:
    """Return the bytes of slots, and the peak of two steps while a layer with experts runs.

    The peak counts all arrays that exist as a program begins, and XLA's results and temporaries.
    """
    gc.collect()  # arrays of other sessions
    session, peaks = TextSession(config), list[int]()

    def noting(program: jax.stages.Wrapped) -> Callable[..., object]:
        def run(*args: object, **options: object) -> object:
            needs = program.lower(*args, **options).compile().memory_analysis()
            there = sum(array.nbytes for array in jax.live_arrays())
            peaks.append(
                there
                + needs.temp_size_in_bytes
                + needs.output_size_in_bytes
                - needs.alias_size_in_bytes
            )
            return program(*args, **options)

        return run

    programs = session.program.programs
    session.program.programs = replace(
        programs,
        apply_experts=noting(programs.apply_experts),
        moe_gradients=noting(programs.moe_gradients),
    )
    for number in range(2):
        session.step(number)
    slot_bytes = session.program.expert_stats().slot_bytes
    session.program.close()
    return {"slot_bytes": slot_bytes, "device_bytes": max(peaks)}
