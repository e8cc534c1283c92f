"""Steps whose experts cross a link of limited bandwidth, beside max(computing, link).

link_s is the time of the bytes on the link: those of the forward pass (weights go to the device),
then the longer direction of the backward pass (weights of all but the last layers go again,
gradients return). The passes cannot overlap: no weight of a step is known before the last gradient
of the step before, because the clipping factor takes all of them.

The host updates the experts (`tiers.update`), so that weights go to the device and gradients
return. Records are in host memory or on NVMe; `device`: in host memory, and the weights of all
layers stay on the device in the dtype of the products, so that none goes there twice in a step.
Each direction of the link is limited. A row has its limit as a share of the bytes that an H100's
link (54 GB/s) moves in the time of its products (790 TFLOP/s): at 1, bytes and products take as
long beside each other as on an H100. computing_s: steps with all experts on the device, taken
before and after those of the row.

passes_s is a stricter bound: the sum over both passes of max(the pass without a limit, the bytes of
the pass). A pass without a limit has what a device leaves to the host: here AdamW, copies, records
and products share the cores. What a step takes beyond it is lost where the link and the device wait
for each other: for the first layer's weights, at the turn of the passes, and for the last gradient.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from benchmarks.offload.session import Session, config_of
from jmoe.memory.link import Link
from jmoe.offload.expert_updates import HostUpdate
from jmoe.training.trainer import make_trainer

H100_BYTES_PER_FLOP = 54e9 / 790e12
PLACES = ("device", "host", "nvme")
WARM_UP = 2  # steps, in which programs are compiled and caches are filled
SIZE = 1024  # of the products that rate this device


def product_rate(rounds: int = 5) -> float:
    """Return the FLOP/s of a large float32 product, the median of `rounds`."""
    square = jnp.ones((SIZE, SIZE), jnp.float32)
    product = jax.jit(lambda x: (x @ square) / SIZE)
    product(square).block_until_ready()
    rates = []
    for _ in range(rounds):
        begun = time.perf_counter()
        product(square).block_until_ready()
        rates.append(2 * SIZE**3 / (time.perf_counter() - begun))
    return report.median(rates, digits=0)


def expert_parameters(a: argparse.Namespace) -> int:
    """Return the number of parameters of all experts."""
    return int(3 * a.hidden_size * a.intermediate_size * a.layers * a.experts)


def limit_links(session: Session, bytes_per_s: float | None) -> None:
    """Limit each direction of every device's link of a run whose experts the host updates; None
    ends the limit.
    """
    experts = session.program._loaded_experts
    update = cast(HostUpdate, experts._update)
    update.links.update({device: Link(bytes_per_s) for device in update.links})
    experts._gradients.links = [Link(bytes_per_s) for _ in experts._gradients.links]


def take_steps(session: Session, numbers: Sequence[int]) -> tuple[list[float], int, int]:
    """Return (seconds of each step, bytes to the device, bytes from it, of one step)."""
    before = session.program.expert_stats()
    seconds = [session.step(number).seconds for number in numbers]
    after = session.program.expert_stats()
    if after is None:
        return seconds, 0, 0
    to, back = np.subtract(after.link, before.link) // len(numbers)
    return seconds, int(to), int(back)


def take_free_passes(session: Session, numbers: Sequence[int]) -> tuple[float, float]:
    """Return the seconds of a step's forward and backward pass over links without a limit, medians
    of steps.
    """
    turned, backward = list[float](), session.program._backward

    def backward_at(*args: Any) -> Any:
        turned.append(time.perf_counter())
        return backward(*args)

    passes = []
    with mock.patch.object(session.program, "_backward", backward_at):
        for number in numbers:
            begun = time.perf_counter()
            session.step(number)
            passes.append((turned[-1] - begun, time.perf_counter() - turned[-1]))
    forward, back = zip(*passes, strict=True)
    return report.median(forward), report.median(back)


def measure(a: argparse.Namespace, folder: Path) -> JsonObject:
    """Return, by share of an H100's ratio and place, step / max(computing, link)."""
    on_device = Session(
        config_of(a, folder, experts="device", optimizer="device", gradients="host"),
        make=make_trainer,
    )
    take_steps(on_device, range(WARM_UP))
    rate = product_rate()
    rows = []
    for place in a.records:
        rows += _measure_place(a, folder / place, place, on_device, rate)
    on_device.program.close()
    return {
        "tokens": a.batch_size * a.sequence_length,
        "parameters_of_experts": expert_parameters(a),
        "product_gflops": round(rate / 1e9, 1),
        "options": report.options(a),
        "rows": rows,
    }


def _measure_place(
    a: argparse.Namespace, folder: Path, place: str, on_device: Session, rate: float
) -> list[JsonObject]:
    """Return the rows of a place of records. rate: FLOP/s of products."""
    weights_stay = {"device_layers": a.layers} if place == "device" else {}
    tier = "host" if place == "device" else place
    config = config_of(
        a,
        folder,
        experts=tier,
        optimizer=tier,
        gradients=tier,
        gradient_dtype="bfloat16",
        update="host",
        **weights_stay,
    )
    session = Session(config)
    take_steps(session, range(WARM_UP))
    rounds = range(WARM_UP + 1, WARM_UP + 1 + a.rounds)
    sent_again = 1 - min(1, config.tiers.device_layers / a.layers)  # share in the backward pass
    rows = []
    for share in a.link_shares:
        limit_links(session, None)
        passes = take_free_passes(session, rounds)
        session.program._loaded_experts._ring.wait_for_loads()
        computing = take_steps(on_device, rounds[:2])[0]
        limit = share * H100_BYTES_PER_FLOP * rate
        limit_links(session, limit)
        take_steps(session, [WARM_UP])  # begins with what the limit did not delay
        seconds, to, back = take_steps(session, rounds)
        session.program._loaded_experts._ring.wait_for_loads()
        computing += take_steps(on_device, rounds[:2])[0]
        forward = to / (1 + sent_again)
        links = forward / limit, max(to - forward, back) / limit
        step_s, computing_s = report.median(seconds), report.median(computing)
        bound_s, passes_s = max(computing_s, sum(links)), sum(map(max, passes, links))
        row = {
            "records": place,
            "share_of_h100_ratio": share,
            "link_mb_per_s": round(limit / 1e6, 2),
            "step_s": step_s,
            "computing_s": computing_s,
            "link_s": round(sum(links), 4),
            "free_passes_s": passes,
            "passes_s": round(passes_s, 4),
            "bytes_per_parameter": round((to + back) / expert_parameters(a), 2),
            "step_against_bound": round(step_s / bound_s, 3),
            "step_against_passes": round(step_s / passes_s, 3),
        }
        rows.append(report.progress(row))
    session.program.close()
    return rows
