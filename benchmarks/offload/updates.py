"""AdamW of experts on the device or on the host's cores (`tiers.update`)."""

import argparse
from pathlib import Path

from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from benchmarks.offload.session import Session, config_of

WARM_UP = 2  # steps, in which programs are compiled and caches are filled


def measure(a: argparse.Namespace, folder: Path) -> JsonObject:
    """Take the same steps with both, in turn, with records in host memory and on NVMe."""
    rows = []
    for tier in ("host", "nvme"):
        sessions = {
            update: Session(
                config_of(
                    a,
                    folder / tier / update,
                    experts=tier,
                    optimizer=tier,
                    gradients=tier,
                    update=update,
                )
            )
            for update in ("device", "host")
        }
        taken: dict[str, list[float]] = {name: [] for name in sessions}
        losses: dict[str, list[float]] = {name: [] for name in sessions}
        links = {}
        for number in range(WARM_UP + a.rounds):
            for name, session in sessions.items():
                if number == WARM_UP:
                    links[name] = session.program.expert_stats().link
                cost = session.step(number)
                losses[name].append(cost.loss)
                taken[name].append(cost.seconds)
        parameters = 3 * a.hidden_size * a.intermediate_size * a.layers * a.experts
        for name, session in sessions.items():
            link = session.program.expert_stats().link
            both = [sum(x) for x in (link, links[name])]
            session.program.close()
            row = {
                "records": tier,
                "update": name,
                "step_s": report.median(taken[name][WARM_UP:]),
                "link_bytes_per_parameter": round((both[0] - both[1]) / a.rounds / parameters, 2),
                "speed_of_device_update": report.ratio(
                    taken["device"][WARM_UP:], taken[name][WARM_UP:]
                ),
                "largest_difference_of_losses": max(
                    abs(x - y) for x, y in zip(losses[name], losses["device"], strict=True)
                ),
            }
            rows.append(report.progress(row))
    return {"parameters_of_experts": parameters, "options": report.options(a), "rows": rows}
