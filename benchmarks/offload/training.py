"""Time training steps whose experts are in host memory or on NVMe.

    python benchmarks/offload/training.py WHAT

WHAT                measured
step                seconds of a step with and without fetching ahead, beside max(computing, bytes /
                    disk rate), and a step that needs no disk while fio moves as many bytes a
                    second; processor_s: of all threads of the process, spinning and I/O included;
                    --disk-bytes-per-s limits the disk
traffic             bytes of a step with half of the experts idle, beside those with all in use
write_back          bytes written a step, and by a save after it, with
                    `tiers.write_back_every_steps` = 0, 1, 4 and 16
expected            bytes of a step, and hits, if the cache expects nothing, what the last
                    accumulation step's tokens chose, what the whole last step's chose (the
                    product), or what the next step's will choose (a bound, told by the first run)
mapped              bytes that a step reads into host memory, with records on a disk and in files
                    in memory (/dev/shm)
replicas            bytes of a step, and updates, with 1, 2 and 4 replicas of every expert
room                bytes on the device, and seconds of a step, with slots for all experts of a
                    layer and for the share that a step of text chooses (`tiers.device_experts`,
                    MoESys' alpha); the losses are the same to the bit
updates             seconds and bytes of a step with AdamW on the device and on the host
                    (`tiers.update`), in turn
limited_link        step / max(computing, link) with a link limited to an H100's ratio of bytes to
                    products, and to multiples of it, with AdamW on the host
replay              seconds to replay 1, 10 and 100 missed steps of an expert, beside its fetch
retention           tokens/s with experts in host memory, where the host updates them, over
                    tokens/s with all of them on the device, by tokens of a step
two_nodes           as step, in two processes with a limited link between them; needs root

Prints one JSON object as its last line. Legend: E experts of a layer, N layers with experts.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest import mock

import jax
import numpy as np
from numpy.typing import NDArray

from benchmarks.lib import fio, report
from benchmarks.lib.report import JsonObject
from benchmarks.lib.slow_disk import SlowDisk
from benchmarks.offload import copies, limited_link, retention, room, two_nodes, updates
from benchmarks.offload.session import (
    Session,
    StepCost,
    TextSession,
    add_model_options,
    config_of,
    disk_rates,
    expert_bytes,
)
from jmoe.config import RouterConfig
from jmoe.memory.tiered_store import TieredStore
from jmoe.offload.expert_state import ExpertState
from jmoe.offload.train_stores import THREADS
from jmoe.training.streamed.experts import StreamedExperts

PERIODS = (0, 1, 4, 16)  # steps between two times of writing back


def measure_steps(a: argparse.Namespace, folder: Path) -> JsonObject:
    """Time steps with fetching ahead, without it, and in host memory, also beside fio, in turn."""
    kinds = {
        "ahead": config_of(a, folder / "ahead", experts="nvme", optimizer="nvme", device_layers=2),
        "not_ahead": config_of(
            a, folder / "not_ahead", experts="nvme", optimizer="nvme", device_layers=1
        ),
        "host": config_of(a, folder, experts="host", optimizer="host", gradients="host"),
    }
    sessions = {name: Session(config) for name, config in kinds.items()}
    if fio.is_installed() and not a.disk_bytes_per_s:
        sessions["host_beside_io"] = sessions["host"]
    read_rate, write_rate = disk_rates(
        sessions["ahead"].program.stores.layouts["moments"], folder / "rates", 3
    )
    seen: dict[str, list[StepCost]] = {name: [] for name in sessions}
    rates = (
        0.0,
        0.0,
    )  # bytes/s read and written by the step with fetching ahead, which comes first
    for number in range(a.rounds + 2):
        for name, session in sessions.items():
            with (
                fio.running_in_background(folder / "fio", *rates)
                if name == "host_beside_io"
                else nullcontext()
            ):
                measured = session.step(number)
            if name == "ahead":
                rates = (
                    measured.read_bytes / measured.seconds,
                    measured.written_bytes / measured.seconds,
                )
            if number >= 2:
                seen[name].append(measured)
    for name in kinds:
        sessions[name].program.close()
    step_s = {name: median(step.seconds for step in steps) for name, steps in seen.items()}
    read_bytes = median(step.read_bytes for step in seen["ahead"])
    written_bytes = median(step.written_bytes for step in seen["ahead"])
    ways = read_bytes / read_rate, written_bytes / write_rate
    disk_s = (
        max(ways) if a.disk_bytes_per_s else sum(ways)
    )  # a limit is one for reads and one for writes
    bound_s = max(step_s["host"], disk_s)
    result = {
        "step_s": step_s,
        "all_step_s": {
            name: [round(step.seconds, 4) for step in steps] for name, steps in seen.items()
        },
        "processor_s": {
            name: median(step.processor_s for step in steps) for name, steps in seen.items()
        },
        "disk_s": disk_s,
        "read_bytes": read_bytes,
        "written_bytes": written_bytes,
        "read_bytes_per_s": read_rate,
        "write_bytes_per_s": write_rate,
        "ahead_against_bound": step_s["ahead"] / bound_s,
        "not_ahead_against_bound": step_s["not_ahead"] / bound_s,
    }
    if beside_io_s := step_s.get("host_beside_io"):
        result["io_slows_computing"] = beside_io_s / step_s["host"]
        result["ahead_against_bound_beside_io"] = step_s["ahead"] / max(beside_io_s, disk_s)
    return result


def measure_traffic(a: argparse.Namespace, folder: Path) -> JsonObject:
    """Return bytes moved with a cache for the same share of used experts, beside bytes in flight.

    Where everything fits no bytes move, and there is nothing to compare.
    """
    result = JsonObject()
    for name, experts in (("all", a.experts), ("half", a.experts // 2)):
        slots = (
            int(a.cache * a.layers * experts) + 4 * THREADS
        )  # two under way for each that reads or writes
        cache_bytes = slots * (expert_bytes(a) + 4 * 4096)
        session = Session(
            config_of(
                a, folder / name, experts="nvme", optimizer="nvme", host_cache_bytes=cache_bytes
            )
        )
        session.use_only(experts)
        steps = [session.step(i) for i in range(a.rounds + 2)][2:]
        result[name] = median(step.read_bytes + step.written_bytes for step in steps)
        session.program.close()
    return result | {"half_against_all": result["half"] / result["all"] if result["all"] else None}


def measure_write_back(a: argparse.Namespace, folder: Path) -> JsonObject:
    """Count bytes written in twice the longest period, and by the save that follows."""
    rows = []
    for every in PERIODS:
        tiers = {"experts": "nvme", "optimizer": "nvme", "write_back_every_steps": every}
        session = Session(config_of(a, folder / str(every), **tiers))
        steps = [session.step(number) for number in range(2 * max(PERIODS))]
        before = _when_nothing_moves(session)
        session.program.prepare_state_for_save(session.state)
        _, after = session.moved_bytes()
        row = {"write_back_every_steps": every, "written_bytes_a_step": before // len(steps)}
        rows.append(report.progress(row | {"written_bytes_of_the_save": after - before}))
        session.program.close()
    return {"steps": 2 * max(PERIODS), "rows": rows}


def measure_expected(a: argparse.Namespace, folder: Path) -> JsonObject:
    """Train the same steps on text with four kinds of foresight; the first quarter is warm-up.

    The router is that of ordinary training, whose loss balances the experts.
    """
    chosen_by_last = deque[NDArray[np.bool_]](
        maxlen=a.layers
    )  # [E] each: by tokens of the last accumulation step
    chosen = StreamedExperts._chosen_experts
    used = list[
        NDArray[np.int64]
    ]()  # by the steps of the first run, in which the cache expects nothing
    steps_of = Counter[TieredStore]()
    expect = TieredStore.keep_cached

    def nothing(store: TieredStore, ids: NDArray[np.int64]) -> None:
        steps_of[store] += 1
        if steps_of[store] > len(used):
            used.append(ids)

    def noting(program: StreamedExperts, arrived: Sequence[jax.Array]) -> NDArray[np.bool_]:
        chosen_by_last.append(chosen(program, arrived[-1:]))
        return chosen(program, arrived)

    def last_part(store: TieredStore, ids: NDArray[np.int64]) -> None:
        expect(store, np.flatnonzero(np.stack(chosen_by_last)))

    def next_step(store: TieredStore, ids: NDArray[np.int64]) -> None:
        steps_of[store] += 1
        expect(store, used[steps_of[store]] if steps_of[store] < len(used) else [])

    rows = []
    told_by = {
        "nothing": nothing,
        "last_part": last_part,
        "last_step": expect,
        "next_step": next_step,
    }
    for name, told in told_by.items():
        with (
            mock.patch.object(TieredStore, "keep_cached", told),
            mock.patch.object(StreamedExperts, "_chosen_experts", noting),
        ):
            config = config_of(a, folder / name, experts="nvme", optimizer="nvme")
            config = replace(config, gradient_accumulation_steps=a.accumulation_steps)
            session = TextSession(
                replace(config, model=replace(config.model, router=RouterConfig()))
            )
            steps = [session.step(number) for number in range(a.steps)][a.steps // 4 :]
        cache = [store.cache for store in session.program.expert_stats().store_stats]
        hits, misses = sum(stats.hits for stats in cache), sum(stats.misses for stats in cache)
        read, written = (
            sum(getattr(step, f"{way}_bytes") for step in steps) for way in ("read", "written")
        )
        row = {
            "expected": name,
            "read_bytes_a_step": read // len(steps),
            "written_bytes_a_step": written // len(steps),
        }
        rows.append(report.progress(row | {"hit_rate": round(hits / (hits + misses), 4)}))
        session.program.close()
    share = float(np.mean([np.unique(ids).size for ids in used])) / (a.layers * a.experts)
    result = {
        "steps": a.steps,
        "accumulation_steps": a.accumulation_steps,
        "share_of_experts_a_step": round(share, 3),
    }
    return result | {"rows": rows}


def _when_nothing_moves(session: Session) -> int:
    """Wait for the write-back to finish; return the bytes written since the start."""
    before = -1
    while before != (now := session.moved_bytes()[1]):
        before = now
        time.sleep(1)
    return now


def measure_replay(a: argparse.Namespace, folder: Path) -> JsonObject:
    """Return the seconds to fetch and replay one expert after the other, and nothing else."""
    cache_bytes = 40 * expert_bytes(a)
    session = Session(
        config_of(a, folder, experts="nvme", optimizer="nvme", host_cache_bytes=cache_bytes)
    )
    state: ExpertState = session.program.experts
    result: JsonObject = {"parameters": 3 * a.hidden_size * a.intermediate_size}
    nobody = np.zeros(a.experts, np.bool_)
    for steps in (1, 10, 100):
        seconds = []
        for _ in range(a.rounds + 1):
            state.apply_pending_updates()
            for _ in range(steps):
                state.commit_step(1e-3, 1.0)
            state.begin_pass(range(a.layers))
            before = state.stats()
            begun = time.perf_counter()
            state.fetch_layer(0, nobody | (np.arange(a.experts) == 0))
            seconds.append(time.perf_counter() - begun)
            after = state.stats()
            assert after.replayed_steps - before.replayed_steps == steps
            state.release_layer()
            for layer in range(1, a.layers):
                state.fetch_layer(layer, nobody)
                state.release_layer()
        result[f"fetch_and_{steps}_steps_s"] = median(seconds[1:])
    session.program.close()
    return result


def main() -> None:
    parser = report.parser(__doc__)
    measures = {
        "step": measure_steps,
        "traffic": measure_traffic,
        "write_back": measure_write_back,
        "expected": measure_expected,
        "mapped": copies.measure_mapped,
        "replicas": copies.measure_replicas,
        "room": room.measure,
        "updates": updates.measure,
        "limited_link": limited_link.measure,
        "replay": measure_replay,
        "retention": retention.measure,
        "two_nodes": two_nodes.measure,
    }
    parser.add_argument("what", choices=measures)
    parser.add_argument(
        "--folder", type=Path, help="where records are; default: the system's temporary folder"
    )
    add_model_options(parser, layers=6)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument(
        "--cache", type=float, default=0.25, help="share of all records in host memory"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40, help="of expected, mapped, replicas")
    parser.add_argument("--accumulation-steps", type=int, default=1, help="of expected")
    retention.add_options(parser)
    parser.add_argument(
        "--link-shares",
        type=float,
        nargs="+",
        default=[1, 16],
        help="bandwidths of limited_link, as shares of that of an H100's ratio",
    )
    parser.add_argument(
        "--records",
        nargs="+",
        choices=limited_link.PLACES,
        default=limited_link.PLACES,
        help="places of limited_link",
    )
    two_nodes.add_options(parser)
    a = parser.parse_args()
    if a.rank is not None:
        report.finish(two_nodes.worker(a))
        return
    with tempfile.TemporaryDirectory(prefix="jmoe-training-tiers-", dir=a.folder) as folder:
        limit = a.disk_bytes_per_s if a.what == "step" else 0  # two_nodes sets its own
        with SlowDisk(Path(folder), limit) if limit else nullcontext():
            report.finish(measures[a.what](a, Path(folder)) | report.device_and_versions())


if __name__ == "__main__":
    main()
