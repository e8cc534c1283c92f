"""A campaign of faults: kills at any moment, a disk that fails at any call, a flipped bit in any
kind of file.

Each outcome is bit for bit that of a run which nothing disturbed, or an error that names the file;
then, without the fault, the run goes on to the same end. The counts are printed (`pytest -s`).
JMOE_KILLS sets the number of kills.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import CheckpointConfig
from jmoe.memory.record_checkpoint import ITEM, RecordCheckpoints
from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.tiered_store import TieredStore
from jmoe.memory.version_store import VersionStore
from jmoe.run.checkpoint import Checkpoints
from tests import damage
from tests.faults import FailingDisk
from tests.fuse import Lack, fuse
from tests.processes import Child, kill_group
from tests.train_runs import Run, Start, TrainRuns, committed, losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

KILLS = int(os.environ.get("JMOE_KILLS", "100"))
SEED = random.SystemRandom().randrange(1 << 30)
STEPS = 60
NVME = (
    "--tiers.experts",
    "nvme",
    "--tiers.optimizer",
    "nvme",
    "--tiers.host-cache-bytes",
    "500000",
)
HOST = ("--tiers.experts", "host", "--tiers.optimizer", "host")
KINDS: dict[str, tuple[str, ...]] = {
    "device": (),
    "host": HOST,
    "host, updated on the host": (*HOST, "--tiers.update", "host"),
    "nvme": NVME,
    "nvme, gradients too": (*NVME, "--tiers.gradients", "nvme"),
    "nvme, updated on the host": (*NVME, "--tiers.gradients", "nvme", "--tiers.update", "host"),
}
OFTEN = (
    "--num-steps",
    str(STEPS),
    "--checkpoint.every-steps",
    "3",
    "--evaluation.every-steps",
    "25",
)


def last_losses(output_dir: Path) -> dict[int, float]:
    """The loss of every step, as it was computed last."""
    return dict(losses(output_dir))


# ---- kills


def kill_again_and_again(
    runs: TrainRuns, kind: str, folder: Path, kills: int, run_python: Run, start_python: Start
) -> Counter[str]:
    """Kill runs of this kind until there were so many; each chain of restarts ends as the
    undisturbed run did.
    """
    rng, options, counts = random.Random(f"{SEED} {kind}"), (*OFTEN, *KINDS[kind]), Counter[str]()
    folder.mkdir()
    began = time.monotonic()
    done = run_python(runs.command(folder / "whole", *options), runs.environment(), timeout=600)
    assert done.returncode == 0, done.stderr
    took_s, reference = time.monotonic() - began, last_losses(folder / "whole")
    assert len(reference) == STEPS
    chain = 0
    while counts["kills"] < kills:
        output_dir, newest, ended = folder / f"chain-{chain}", -1, False
        while not ended:
            log = folder / f"log-{counts['starts']}"
            process = start_python(runs.command(output_dir, *options), log, runs.environment())
            counts["starts"] += 1
            if counts["kills"] < kills:
                kill_at_random(process, output_dir, took_s, rng)
            process.wait(600)
            screen = log.read_text()
            if process.returncode == -signal.SIGKILL:
                counts["kills"] += 1
                counts["kills while computing"] += "resuming" in screen or bool(losses(output_dir))
            else:
                assert process.returncode == 0, screen[-4000:]
                ended = True
            said = re.findall(r"^resuming from step (\d+)", screen, re.MULTILINE)
            assert said in ([], [str(newest)]), f"resumed from {said}, the newest step was {newest}"
            counts["resumes"] += len(said)
            newest = max(committed(output_dir), default=-1)
        found = last_losses(output_dir)
        assert {step: loss for step, loss in found.items() if loss != reference[step]} == {}
        assert found.keys() == reference.keys()
        counts["chains that ended bit for bit the same"] += 1
        shutil.rmtree(output_dir)
        chain += 1
    return counts


def kill_at_random(
    process: subprocess.Popen[str], output_dir: Path, took_s: float, rng: random.Random
) -> None:
    """SIGKILL after a random time, of which every other is counted from the first step on."""
    if rng.random() < 0.5:
        time_s = rng.uniform(0.2, took_s)
    else:
        before = len(losses(output_dir))
        while process.poll() is None and len(losses(output_dir)) <= before:
            time.sleep(0.002)
        time_s = rng.uniform(0, 0.5 * took_s)
    try:
        process.wait(time_s)
    except subprocess.TimeoutExpired:
        kill_group(process)


def test_kills(runs: TrainRuns, tmp_path: Path, run_python: Run, start_python: Start) -> None:
    assert runs.shards.is_dir()  # made before the threads need it
    each = {kind: KILLS // len(KINDS) + (i < KILLS % len(KINDS)) for i, kind in enumerate(KINDS)}
    with ThreadPoolExecutor(2) as pool:
        campaigns = {
            kind: pool.submit(
                kill_again_and_again,
                runs,
                kind,
                tmp_path / kind.replace(", ", "-").replace(" ", "-"),
                *rest,
            )
            for kind in KINDS
            for rest in [(each[kind], run_python, start_python)]
        }
        counts = {kind: campaign.result() for kind, campaign in campaigns.items()}
    for kind, found in counts.items():
        print(f"\nkills, experts on {kind} (seed {SEED}): {dict(found)}", flush=True)
    assert sum(found["kills"] for found in counts.values()) == KILLS


# ---- a disk that fails

LAYOUT = RecordLayout.from_arrays({"w": ((600,), np.float32), "m": ((600,), np.float32)})
NUM_RECORDS, LAST = 4, 6


def run_records(
    root: Path, checkpoints: Callable[[RecordCheckpoints], Any], last: int
) -> dict[str, Any]:
    """Resume, train records behind a small cache up to step `last`, save every second; what
    there is then.
    """
    with VersionStore.open(root / "local", LAYOUT, NUM_RECORDS, fingerprint="a") as store:
        saved = checkpoints(RecordCheckpoints({"experts": store}))
        try:
            found = train_records(store, saved, last)
            saved.close()
        except BaseException:
            # a process would end here: no thread may go on
            with contextlib.suppress(OSError, ValueError):
                saved.close()
            raise
    return found


def train_records(store: VersionStore, saved: Any, last: int) -> dict[str, Any]:
    begin, total = saved.resume()
    if not begin:
        record_R = store.layout.zeros()
        for index in range(NUM_RECORDS):
            record_R[:] = 0
            store.layout.views(record_R)["w"][:] = index
            store.write(index, record_R)
    with TieredStore(
        store, cache_bytes=3 * store.layout.record_bytes, write_back_every_steps=1
    ) as tiers:
        for step in range(begin, last):
            tiers.prefetch(range(NUM_RECORDS))
            for index in range(NUM_RECORDS):
                with tiers.get(index, writable=True) as record:
                    record["m"][:] = record["m"] * np.float32(0.9) + np.float32(step + 1)
                    record["w"][:] = record["w"] * np.float32(0.99) - record["m"]
                    total = np.float32(total * np.float32(0.5) + record["w"][0])
                    record.close_as_changed()
            tiers.count_step(range(NUM_RECORDS))
            if step % 2:
                tiers.flush()
                saved.save(step + 1, total)
        tiers.flush()
        found: dict[str, Any] = {"total": float(total)}
        for index in range(NUM_RECORDS):
            with tiers.get(index) as record:
                found[str(index)] = (record["w"].tobytes(), record["m"].tobytes())
    return found


class PlainSteps:
    """Steps in folders of their own, committed by one rename that never fails: what is tested is
    below them.
    """

    def __init__(self, root: Path, records: RecordCheckpoints) -> None:
        self.root, self.records = root / "steps", records
        self.root.mkdir(exist_ok=True, parents=True)

    def _steps(self) -> list[int]:
        return sorted(int(path.name) for path in self.root.iterdir() if path.name.isdigit())

    def resume(self) -> tuple[int, np.float32]:
        for step in reversed(self._steps()):
            if not self.records.verify_records(self.root / str(step) / ITEM).missing:
                self.records.restore_records(self.root / str(step) / ITEM)
                return step, np.float32(
                    float.fromhex((self.root / str(step) / "total").read_text())
                )
        return 0, np.float32(0)

    def save(self, step: int, total: np.float32) -> None:
        half, folder = self.root / f"{step}.tmp", self.root / str(step)
        for leftover in (half, folder):
            shutil.rmtree(leftover, ignore_errors=True)
        (half / ITEM).mkdir(parents=True)
        (half / "total").write_text(float(total).hex())
        self.records.write_record_list(half / ITEM, self.records.pin_versions(step))
        half.rename(folder)
        for old in self._steps()[:-2]:
            shutil.rmtree(self.root / str(old))
        self.records.begin_drain(folder / ITEM, self._steps())

    def close(self) -> None:
        self.records.close()


class OrbaxSteps:
    """Steps as `train.py` saves them."""

    def __init__(self, root: Path, records: RecordCheckpoints) -> None:
        self.checkpoints = Checkpoints(
            root / "checkpoints", CheckpointConfig(keep=2), records=records, timeout_s=60
        )

    def resume(self) -> tuple[int, np.float32]:
        step = self.checkpoints.latest_step()
        if step is None:
            return 0, np.float32(0)
        state, _, _ = self.checkpoints.restore(
            step, jax.eval_shape(lambda: {"total": jnp.float32(0)})
        )
        return step, np.float32(state["total"])

    def save(self, step: int, total: np.float32) -> None:
        self.checkpoints.save(step, {"total": jnp.float32(total)}, step, "{}")
        self.checkpoints.raise_save_error()

    def close(self) -> None:
        self.checkpoints.close()


def inject_everywhere(
    root: Path, make: Callable[..., Any], programs: tuple[str, ...], last: int, modes: Any
) -> None:
    """A fault at every call, one after the other: in a run that starts anew, and in one that
    resumes.
    """
    folder = root / "run"

    def run(disk: FailingDisk, last: int = last) -> dict[str, Any]:
        with disk.failing():
            return run_records(folder, lambda records: make(folder, records), last)

    def quiet() -> FailingDisk:
        return FailingDisk(folder, programs, None)

    whole = quiet()
    expected = run(whole)
    shutil.rmtree(folder)
    run(quiet(), 2)
    folder.rename(root / "half")
    counts = Counter[str]()
    outcomes = defaultdict[str, Counter[str]](Counter)
    problems = list[str]()
    for starts_at in ("step 0", "step 2"):
        at = 0
        while True:
            for code, for_ever in modes:
                shutil.rmtree(folder, ignore_errors=True)
                if starts_at == "step 2":
                    shutil.copytree(root / "half", folder, symlinks=True)
                disk = FailingDisk(folder, programs, at, code, for_ever)
                where = (
                    f"from {starts_at}, call {at},"
                    f" {errno.errorcode[code]}{' for ever' if for_ever else ''}"
                )
                try:
                    found = run(disk)
                except (OSError, ValueError, TimeoutError) as error:
                    outcome = "named error"
                    if str(folder) not in str(error):
                        problems.append(f"{where} ({disk.failed}): names no file: {error!r}")
                else:
                    outcome = "bit for bit the same"
                    if found != expected:
                        problems.append(f"{where} ({disk.failed}): another result without an error")
                if disk.failed is None:
                    break
                if not disk.raised:
                    continue  # no call that a full disk refuses
                counts[outcome] += 1
                outcomes[disk.failed][outcome] += 1
                try:
                    if run(quiet()) != expected:
                        problems.append(
                            f"{where} ({disk.failed}): {outcome}, then another result without the"
                            " fault"
                        )
                except (OSError, ValueError) as error:
                    problems.append(
                        f"{where} ({disk.failed}): {outcome}, then no restart: {error!r}"
                    )
            if disk.failed is None:
                break
            at += 1
    print(f"\nfaults at {', '.join(programs)}: {dict(counts)}", flush=True)
    for name, found_outcomes in sorted(outcomes.items()):
        print(f"  {name}: {dict(found_outcomes)}", flush=True)
    report = f"{len(problems)} problems:\n" + "\n".join(problems)
    print(report, flush=True)
    assert not problems, report


def test_a_fault_at_every_call_of_the_record_stores(tmp_path: Path) -> None:
    modes = ((errno.EIO, False), (errno.ENOSPC, False), (errno.ENOSPC, True))
    inject_everywhere(tmp_path, PlainSteps, ("jmoe/memory/",), LAST, modes)


def test_a_fault_at_every_call_of_a_checkpoint(tmp_path: Path) -> None:
    """Calls of `run/checkpoint.py`, and of what Orbax and the records do for it in the same
    thread.
    """
    modes = ((errno.EIO, False), (errno.ENOSPC, False))
    inject_everywhere(tmp_path, OrbaxSteps, ("jmoe/run/checkpoint",), 4, modes)


# ---- bit flips


def kind_of(path: Path, root: Path) -> str:
    """A file's kind: its place with all numbers and random parts taken out."""
    name = re.sub(r"[0-9a-f]{8,}", "#", str(path.relative_to(root)))
    return re.sub(r"\d+", "#", name)


def flip(path: Path, rng: random.Random) -> str:
    """Flip one bit of a file in place; says which."""
    bit = rng.randrange(8 * path.stat().st_size)
    damage.flip(path, bit // 8, bit % 8)
    return f"bit {bit} of {path}"


@pytest.mark.parametrize("kind", ["device", "nvme, gradients too", "nvme, updated on the host"])
def test_a_flipped_bit_in_every_kind_of_file(
    runs: TrainRuns, tmp_path: Path, run_python: Run, kind: str
) -> None:
    """The flipped run goes on to the same losses, or says which file is damaged."""
    output_dir, kept = tmp_path / "run", tmp_path / "kept"
    options = (*KINDS[kind], "--checkpoint.every-steps", 4)

    def run(steps: int) -> subprocess.CompletedProcess[str]:
        command = runs.command(output_dir, *options, "--num-steps", steps, data=runs.text)
        return run_python(command, runs.environment(), timeout=600)

    done = run(18)
    assert done.returncode == 0, done.stderr
    reference = last_losses(output_dir)
    shutil.rmtree(output_dir)
    done = run(10)
    assert done.returncode == 0, done.stderr
    output_dir.rename(kept)
    by_kind = defaultdict[str, list[Path]](list)
    for path in sorted(kept.rglob("*")):
        if path.is_file() and path.stat().st_size:
            by_kind[kind_of(path, kept)].append(path.relative_to(kept))
    rng, counts, problems = random.Random(SEED), Counter[str](), list[str]()
    newest = Path("checkpoints") / str(committed(kept)[-1])
    for name, paths in by_kind.items():
        paths = [path for path in paths if path.is_relative_to(newest)] or paths
        shutil.rmtree(output_dir, ignore_errors=True)
        subprocess.run(["cp", "-a", kept, output_dir], check=True)  # keeps hard links
        path = output_dir / rng.choice(paths)
        what = flip(path, rng)
        done = run(18)
        found = last_losses(output_dir) if not name.startswith("metrics") else {}
        if done.returncode != 0:
            counts["named error"] += 1
            last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""
            if (
                not any(part in last for part in (path.name, str(path.parent)))
                or "Traceback" in done.stderr
            ):
                problems.append(f"{what}: names no file: {done.stderr[-1500:]}")
        elif (
            all(found.get(step, loss) == loss for step, loss in reference.items())
            and found.keys() <= reference.keys()
        ):
            counts[
                (
                    "warned, bit for bit the same"
                    if path.name in done.stderr
                    else "bit for bit the same"
                )
            ] += 1
        else:
            problems.append(f"{what}: other losses without an error: {done.stderr[-500:]}")
        print(f"  {name}: {done.returncode} {done.stderr.strip()[-160:]!r}", flush=True)
    print(
        f"\nflipped bits, experts on {kind} (seed {SEED}), {len(by_kind)} kinds of files:"
        f" {dict(counts)}",
        flush=True,
    )
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problems)


# ---- machines


@pytest.mark.parametrize("kind", ["device", "nvme"])
def test_a_run_on_fuse(runs: TrainRuns, tmp_path: Path, run_python: Run, kind: str) -> None:
    """Output, text and the tokens of it where much is lacking; records on a disk, as they need
    hard links.
    """
    tiers = (*KINDS[kind], *(("--tiers.path", tmp_path / "records") if kind == "nvme" else ()))

    def run(output_dir: Path, steps: int, text: Path) -> subprocess.CompletedProcess[str]:
        command = runs.command(output_dir, *OFTEN, *tiers, "--num-steps", steps, data=text)
        return run_python(command, runs.environment(), timeout=600)

    done = run(tmp_path / "whole", 12, runs.text)
    assert done.returncode == 0, done.stderr
    lacks: tuple[Lack, ...] = (
        *("links", "O_DIRECT", "modes", "shared_mappings"),
        *("names", "fine_times"),
    )
    with fuse(tmp_path / "disk", tmp_path / "mount", *lacks) as mount:
        text = mount / "text"
        text.mkdir()
        for path in runs.text.iterdir():
            shutil.copyfile(path, text / path.name)
        for steps in (7, 12):
            done = run(mount / "run", steps, text)
            assert done.returncode == 0, done.stderr
        assert last_losses(mount / "run") == last_losses(tmp_path / "whole")
        if kind == "nvme":
            done = run_python(
                runs.command(mount / "other", *KINDS[kind], data=text),
                runs.environment(),
                timeout=600,
            )
            assert done.returncode == 1 and "has no hard links" in done.stderr, done.stderr


@pytest.mark.parametrize("kind", ["device", "nvme"])
def test_clocks_that_jump(runs: TrainRuns, tmp_path: Path, start_python: Start, kind: str) -> None:
    """By hours and by years, both ways, at every save, and at a restart after a kill; with
    snapshots in memory.
    """
    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
    if library is None:
        pytest.skip("libfaketime is not installed")
    offset, output_dir = tmp_path / "offset", tmp_path / "run"
    snapshots = (
        "--checkpoint.memory-dir",
        tmp_path / "memory",
        "--checkpoint.memory-every-steps",
        "2",
    )
    options = (*OFTEN, *KINDS[kind], *(snapshots if kind == "device" else ()), "--num-steps", 24)
    faked = {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
    }
    # no machine's clock does that
    environment = runs.environment() | faked | {"FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    jumps = itertools.cycle(["-3650d", "+3650d", "-1d", "+2h", "-2h", "+20000d"])

    def jump() -> None:
        new = offset.with_suffix(".new")
        new.write_text(next(jumps))
        new.rename(offset)

    def start() -> tuple[Child, set[int]]:
        process = start_python(runs.command(output_dir, *options), tmp_path / "log", environment)
        seen = set[int]()
        while process.poll() is None:
            new = set(committed(output_dir)) - seen
            if new:
                seen |= new
                jump()
            if len(seen) == 4 and not killed:
                break
            time.sleep(0.01)
        return process, seen

    jump()
    killed = False
    process, seen = start()
    assert len(seen) == 4, process.screen
    process.kill_now()
    jump()
    killed = True
    process, _ = start()
    assert process.returncode == 0, process.screen
    runs.finish(tmp_path / "whole", *OFTEN, *KINDS[kind], "--num-steps", 24)
    assert last_losses(output_dir) == last_losses(tmp_path / "whole")
