"""Snapshots in memory: written, decided on and read by one process, by three with a folder each,
by whole runs.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jmoe.cluster.overview import read_overview
from jmoe.config import CheckpointConfig, TrainConfig
from jmoe.config.tiers import TiersConfig
from jmoe.run import snapshots
from jmoe.run.snapshot_file import (
    allocate_file,
    layout_of_shards,
    map_verified_snapshot,
    read_description,
    read_state,
    snapshot_file_bytes,
    verify_snapshot,
    write_snapshot,
)
from jmoe.run.snapshots import Snapshots, choose_partners
from tests.train_runs import ENDLESS, Start, TrainRuns, committed, free_port, losses, resumes

Made = Callable[..., Any]


def state_of(step: int, devices: int = 4) -> dict[str, jax.Array]:
    """Arrays split over the devices, over some of them, over none; the values are the step's."""
    mesh = Mesh(
        np.asarray(jax.devices()[:devices]).reshape(2, -1),
        ("a", "b"),
        axis_types=(AxisType.Auto,) * 2,
    )

    def place(x: Any, *axes: Any) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

    return {
        "rows": place(np.arange(80, dtype=np.float32).reshape(8, 10) + step, ("a", "b")),
        "columns": place(jnp.full((3, 6), step, jnp.bfloat16), None, "a"),
        "step": place(np.int32(step)),
    }


def shapes(state: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def saved(
    tmp_path: Path, *steps: int, checkpoint: int = -1, starts: Sequence[str] = ("first",)
) -> Snapshots:
    """Snapshots of one process after saves of these steps, by the last of these starts."""
    made = Snapshots(CheckpointConfig(memory_dir=str(tmp_path / "memory")), "run", starts)
    for step in steps:
        assert made.save(step, state_of(step), {"at": step}, {"of": "run"}, checkpoint) == ""
    return made


def is_step(state: dict[str, jax.Array], step: int) -> bool:
    wanted = state_of(step)
    return all(np.array_equal(state[name], wanted[name]) for name in wanted) and all(
        state[name].sharding == wanted[name].sharding for name in wanted
    )


# The file


def test_file_has_what_was_written(tmp_path: Path) -> None:
    state = state_of(7)
    layout, path = layout_of_shards(state), tmp_path / "file"
    size_bytes = snapshot_file_bytes(layout, {"data": [1]})
    write_snapshot(allocate_file(path, size_bytes), state, layout, {"data": [1]})
    assert path.stat().st_size == size_bytes
    assert read_description(path) == {"data": [1], "layout": layout}
    assert is_step(read_state(map_verified_snapshot(path), shapes(state)), 7)
    # columns, rows, step: none twice
    assert [len(shards) for _, _, _, shards in layout] == [2, 4, 1]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-5], r"is damaged: it has [\d,]+ of [\d,]+ bytes"),
        (lambda data: data[:20], "is damaged: it has no header"),
        (lambda data: data[:100] + b"?" + data[101:], "is damaged: its description has changed"),
        (
            lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
            "is damaged: its content has changed",
        ),
        (lambda data: data[:8] + b"\0\0\0\2" + data[12:], "has version 2; this jmoe reads 1"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[bytes], bytes], reason: str) -> None:
    state = state_of(7)
    layout, path = layout_of_shards(state), tmp_path / "file"
    write_snapshot(allocate_file(path, snapshot_file_bytes(layout, {})), state, layout, {})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=reason):
        map_verified_snapshot(path)


def test_bytes_are_checked_as_a_file_is(tmp_path: Path) -> None:
    state = state_of(7)
    layout, path = layout_of_shards(state), tmp_path / "file"
    file = allocate_file(path, snapshot_file_bytes(layout, {}))
    write_snapshot(file, state, layout, {})
    assert verify_snapshot(file) == {"layout": layout}
    file[-1] ^= 1
    with pytest.raises(ValueError, match="its content has changed"):
        verify_snapshot(file)


# One process


def test_newest_is_restored_and_two_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 3, 6, 9)
    again = saved(tmp_path)
    assert sorted(path.name for path in again.folder.iterdir()) == ["6-of-0", "9-of-0"]
    snapshot, why = again.read_newest(shapes(state_of(0)), 5, 5)
    assert snapshot is not None and why == ""
    assert (snapshot.step, snapshot.data, snapshot.config) == (9, {"at": 9}, {"of": "run"})
    assert is_step(snapshot.state, 9)
    again.remove_other_steps(9)
    assert [path.name for path in again.folder.iterdir()] == ["9-of-0"]


def test_truncated_one_falls_back_to_the_one_before(tmp_path: Path) -> None:
    made = saved(tmp_path, 3, 6)
    newest = made.folder / "6-of-0"
    newest.write_bytes(newest.read_bytes()[:-1])
    snapshot, why = made.read_newest(shapes(state_of(0)), None, -1)
    assert snapshot is not None and snapshot.step == 3 and is_step(snapshot.state, 3)
    assert re.search(r"6-of-0 on \S+ is damaged: it has [\d,]+ of [\d,]+ bytes", why)


def test_a_snapshot_under_another_name_is_not_used(tmp_path: Path) -> None:
    """Each has good sums, but is not the step that it is called."""
    made = saved(tmp_path, 3, 6)
    three, six, other = (made.folder / name for name in ("3-of-0", "6-of-0", "other"))
    three.rename(other), six.rename(three), other.rename(six)
    (made.folder / "9-of-0").mkdir()
    snapshot, why = made.read_newest(shapes(state_of(0)), None, -1)
    assert snapshot is None
    assert (
        "3-of-0" in why
        and "is step 6 of process 0, under another name" in why
        and "Is a directory" in why
    )


def test_changed_content_falls_back_to_the_checkpoint(tmp_path: Path) -> None:
    made = saved(tmp_path, 3)
    file = np.memmap(made.folder / "3-of-0", np.uint8, mode="r+")
    file[-1] ^= 1
    file.flush()
    snapshot, why = made.read_newest(shapes(state_of(0)), 2, 2)
    assert (
        snapshot is None
        and "3-of-0" in why
        and "its content has changed since it was written" in why
    )


@pytest.mark.parametrize(
    ("checkpoint", "newest_folder", "reason"),
    [
        (8, 8, "step 6 is older than the checkpoint"),
        (None, 2, "checkpoint 4, which step 6 came after, has been deleted"),
    ],
)
def test_what_is_past_is_not_used(
    tmp_path: Path, checkpoint: int | None, newest_folder: int, reason: str
) -> None:
    assert saved(tmp_path, 6, checkpoint=4).read_newest(
        shapes(state_of(0)), checkpoint, newest_folder
    ) == (None, reason)


def test_as_new_as_the_checkpoint_is_enough(tmp_path: Path) -> None:
    snapshot, why = saved(tmp_path, 6).read_newest(shapes(state_of(0)), 6, 6)
    assert snapshot is not None and why == ""


def test_another_layout_falls_back(tmp_path: Path) -> None:
    snapshot, why = saved(tmp_path, 6).read_newest(shapes(state_of(0, devices=2)), None, -1)
    assert snapshot is None and "is of another layout: rows has other shards" in why


def test_of_starts_that_did_not_lead_here_none_is_used(tmp_path: Path) -> None:
    """As of two clones of a disk: both come from the first start, and each goes on in one of its
    own.
    """
    saved(tmp_path, 3)
    saved(tmp_path, 6, starts=("first", "of the clone"))
    snapshot, why = saved(tmp_path, starts=("first", "mine")).read_newest(
        shapes(state_of(0)), None, -1
    )
    assert snapshot is not None and snapshot.step == 3
    assert re.fullmatch(
        r"6-of-0 on \S+ is of a clone of this run: the start that wrote it is not in run.json", why
    )


def test_no_snapshots_are_no_news(tmp_path: Path) -> None:
    assert saved(tmp_path).read_newest(shapes(state_of(0)), None, -1) == (None, "")


def test_half_of_one_is_ignored_and_removed(tmp_path: Path) -> None:
    """As a kill leaves it in the middle of a save."""
    made = saved(tmp_path, 3)
    half = made.folder / "6-of-0.new"
    half.write_bytes(b"half")
    snapshot, why = made.read_newest(shapes(state_of(0)), None, -1)
    assert snapshot is not None and snapshot.step == 3 and why == ""
    made.remove_other_steps(3)
    assert [path.name for path in made.folder.iterdir()] == ["3-of-0"]


def test_no_room_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = saved(tmp_path)
    made.check_free_memory(shapes(state_of(0)))
    monkeypatch.setattr(snapshots, "DESCRIPTION_BYTES", 1 << 50)
    with pytest.raises(
        ValueError, match=r"checkpoint.memory_dir = '\S+': must have [\d,]+ bytes free on"
    ):
        made.check_free_memory(shapes(state_of(0)))


def test_a_full_folder_costs_the_snapshot_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = saved(tmp_path, 3)

    def full(path: Path, size_bytes: int) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshots, "allocate_file", full)
    assert "No space left on device" in made.save(6, state_of(6), None, {}, -1)
    assert [path.name for path in made.folder.iterdir()] == ["3-of-0"]


@pytest.mark.parametrize(
    ("error", "left"),
    [(None, False), (FloatingPointError("loss"), False), (OSError("disk full"), True)],
)
def test_an_end_in_order_leaves_nothing(
    tmp_path: Path, error: Exception | None, left: bool
) -> None:
    made = saved(tmp_path, 3)
    with made:
        pass
    assert not made.folder.exists()
    made = saved(tmp_path, 3)
    made.__exit__(None if error is None else type(error), error, None)
    assert made.folder.exists() == left


def test_bad_folders_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OSError, match=r"checkpoint.memory_dir = '\S+': must be a folder that can be written"
    ):
        Snapshots(CheckpointConfig(memory_dir=str(tmp_path / "file")), "run", ["first"])
    with pytest.raises(ValueError, match=r"checkpoint.memory_dir = '': must name a folder"):
        CheckpointConfig(memory_dir="")
    with pytest.raises(ValueError, match=r"memory_every_steps = 0: must be greater than 0"):
        CheckpointConfig(memory_every_steps=0)
    tiers = TiersConfig(experts="nvme", optimizer="nvme", path=str(tmp_path))
    with pytest.raises(
        ValueError, match=r"checkpoint.memory_dir = '/dev/shm': must not be set with"
    ):
        TrainConfig(tiers=tiers, checkpoint=CheckpointConfig(memory_dir="/dev/shm"))


@pytest.mark.parametrize(
    ("machines", "partners"),
    [
        ("a", [0]),
        ("aa", [1, 0]),
        ("ab", [1, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 0, 3, 2]),
        ("abc", [1, 2, 0]),
        ("aab", [2, 0, 1]),  # one of a's two has to do with a
    ],
)
def test_partners_are_on_other_machines(machines: str, partners: list[int]) -> None:
    assert choose_partners(machines) == partners


# Three processes, each with a folder of its own, as on three hosts


RANK = """
import shutil, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jmoe.cluster.processes import gather_json
from jmoe.config import CheckpointConfig, DistributedConfig
from jmoe.cluster.distributed import join_processes
from jmoe.run.snapshots import Snapshots

rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
join_processes(DistributedConfig(coordinator_address=f"127.0.0.1:{port}", num_processes=3, process_id=rank,
                        start_timeout_s=240, heartbeat_timeout_s=240))
mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
rows, whole = NamedSharding(mesh, PartitionSpec("d")), NamedSharding(mesh, PartitionSpec())
make = jax.jit(lambda n: {"rows": jnp.arange(60.0).reshape(6, 10) + n, "step": n},
               out_shardings={"rows": rows, "step": whole})
shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make(jnp.float32(0)))
config = CheckpointConfig(memory_dir=str(folder / str(rank)))
snapshots = Snapshots(config, "run", ["first"])
snapshots.check_free_memory(shapes)
for step in (2, 4, 6):
    assert snapshots.save(step, make(jnp.float32(step)), {"at": step}, {"rank": rank}, -1) == ""

def show(what, checkpoint=None):
    gather_json(None)  # what was done to the folders is done
    again = Snapshots(config, "run", ["first"])
    snapshot, why = again.read_newest(shapes, checkpoint, -1)
    if snapshot is not None:
        want = np.arange(60, dtype=np.float32).reshape(6, 10) + snapshot.step
        for shard in snapshot.state["rows"].addressable_shards:
            assert np.array_equal(shard.data, want[shard.index])
        assert snapshot.data == {"at": snapshot.step} and snapshot.config == {"rank": rank}
    print(f"{what}: {snapshot and snapshot.step}; {why}", flush=True)

own = snapshots.folder
print(f"files: {sorted(path.name for path in own.iterdir())}", flush=True)
show("whole")
if rank == 1:
    shutil.rmtree(own)
show("a host's memory is lost")
if rank == 2:
    path = own / "6-of-2"
    path.write_bytes(path.read_bytes()[:-3])
show("then half of another's")
if rank == 0:
    path = own / "6-of-2"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
show("and its copy is damaged")
show("the checkpoint is newer", 5)
gather_json(None)
if rank == 2:
    (own / "4-of-1").unlink()
show("no copy is left")
with snapshots:
    gather_json(None)
"""


def test_three_hosts_decide_together(start_python: Start, tmp_path: Path) -> None:
    port, environment = free_port(), {"JAX_NUM_CPU_DEVICES": "2", "PYTHONWARNINGS": "error"}
    ranks = [
        start_python(
            ["-c", RANK, str(rank), str(port), tmp_path], tmp_path / f"rank-{rank}", environment
        )
        for rank in range(3)
    ]
    for rank, child in enumerate(ranks):
        screen = child.end(300)
        files = sorted(f"{step}-of-{whose}" for step in (4, 6) for whose in (rank, (rank - 1) % 3))
        assert f"files: {files}\n" in screen
        assert "whole: 6; \n" in screen
        assert "a host's memory is lost: 6; \n" in screen
        assert re.search(
            r"then half of another's: 6; 6-of-2 on \S+ is damaged: it has [\d,]+ of [\d,]+ bytes\n",
            screen,
        )
        damaged = (
            r"and its copy is damaged: 4; 6-of-2 .* bytes; 6-of-2 on \S+ is damaged: its content"
            r" has changed"
        )
        assert re.search(damaged, screen)
        assert re.search(
            r"the checkpoint is newer: None; .*; step 4 is older than the checkpoint\n", screen
        )
        assert re.search(
            r"no copy is left: None; .*; step 6 lacks the shards of process 2\n", screen
        )
        assert list((tmp_path / str(rank)).iterdir()) == []


# A whole run


def in_memory(folder: Path) -> list[int]:
    """The steps of which there are snapshots, below a `memory_dir`."""
    return sorted(
        {int(path.name.partition("-")[0]) for path in folder.glob("*/*") if path.suffix != ".new"}
    )


@pytest.mark.slow  # the three hosts above, and the kills of test_train.py, are quick
def test_a_killed_run_goes_on_from_memory(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    """There is no checkpoint on disk; the losses are those of a run that nothing happened to."""
    run, memory = tmp_path / "run", tmp_path / "memory"
    options = ("--checkpoint.memory-dir", memory, "--checkpoint.memory-every-steps", 3)
    options += ("--checkpoint.every-steps", 1_000_000)
    process = start_python(
        runs.command(run, *options, *ENDLESS), tmp_path / "log", runs.environment()
    )
    process.wait_until(lambda: len(losses(run)) > 8)
    process.kill_now()
    newest, steps = in_memory(memory)[-1], len(losses(run)) + 5
    seen = read_overview(run).snapshot
    assert seen is not None and (seen.step, seen.ranks) == (newest, (0,))
    assert newest >= 6 and committed(run) == []
    screen = runs.finish(run, *options, "--num-steps", steps)
    assert f"resuming from step {newest} of {memory}" in screen
    assert resumes(run) == [newest] and committed(run) == [steps] and in_memory(memory) == []
    expected = dict(losses(runs.reference[0]))
    ours = {step: loss for step, loss in losses(run) if step in expected}
    assert len(ours) >= min(steps, len(expected)) and ours == {
        step: expected[step] for step in ours
    }
