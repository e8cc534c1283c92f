"""Checkpoints on a real disk: what was saved comes back, or an error says why not and what is
still intact.
"""

import asyncio
import contextlib
import gc
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from orbax.checkpoint._src.serialization.serialization import async_serialize_from_host

from jmoe.config import CheckpointConfig, TrainConfig
from jmoe.run.checkpoint import MANIFEST, Checkpoints
from tests.arrays import on_host
from tests.fakes import wait_for_text
from tests.train_runs import Start, free_port

Open = Callable[..., Checkpoints]
RunRanks = Callable[..., tuple[list[int], list[str]]]
CONFIG = TrainConfig(num_steps=7)
DATA_STATE = {"epoch": 3, "position": [1, 2**40], "name": "größe"}


class Moments(NamedTuple):
    m: Any
    v: Any


@pytest.fixture
def open_checkpoints(tmp_path: Path) -> Iterator[Open]:
    """`open_checkpoints(keep=2)` of tmp_path/checkpoints; closed at the end, whatever happened."""
    opened: list[Checkpoints] = []

    def open_them(keep: int = 2) -> Checkpoints:
        opened.append(
            Checkpoints(tmp_path / "checkpoints", CheckpointConfig(keep=keep), timeout_s=60)
        )
        return opened[-1]

    yield open_them
    for checkpoints in opened:
        with contextlib.suppress(OSError):
            checkpoints.close()


def make_mesh(*shape: int) -> jax.sharding.Mesh:
    names = ("a", "b")[: len(shape)]
    return jax.make_mesh(
        shape,
        names,
        axis_types=(AxisType.Auto,) * len(shape),
        devices=jax.devices()[: np.prod(shape)],
    )


def make_state(seed: int, mesh: jax.sharding.Mesh | None = None) -> dict[str, Any]:
    """A state like a model's: nested, a named tuple, several dtypes and placements."""
    rng = np.random.default_rng(seed)
    mesh = mesh or make_mesh(8)
    rows, whole = (
        NamedSharding(mesh, spec) for spec in (PartitionSpec(mesh.axis_names[-1]), PartitionSpec())
    )
    w = rng.standard_normal((16, 300)).astype(np.float32)
    return {
        "params": {
            "embed": jax.device_put(w, rows),
            "layers": [jax.device_put(w.astype(jnp.bfloat16), whole)],
        },
        "moments": Moments(m=jax.device_put(w * 2, rows), v=jax.device_put(w**2, rows)),
        "step": jax.device_put(np.int32(seed), whole),
        "empty": {},
    }


def abstract(state: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


# Round trips


def test_everything_comes_back(open_checkpoints: Open, tmp_path: Path) -> None:
    checkpoints = open_checkpoints()
    assert checkpoints.latest_step() is None
    assert not (tmp_path / "checkpoints").exists()  # looking changes nothing
    state = make_state(1)
    checkpoints.save(1, state, DATA_STATE, CONFIG.to_json())
    checkpoints.close()
    again = open_checkpoints()
    assert again.latest_step() == 1
    restored, data_state, config = again.restore(1, abstract(state))
    assert_same(restored, state)
    assert data_state == DATA_STATE
    assert config == again.saved_config(1) == json.loads(CONFIG.to_json())
    assert all(
        a.sharding == b.sharding
        for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True)
    )


def test_the_state_may_be_donated_at_once(open_checkpoints: Open) -> None:
    """Buffers are overwritten while the save is still writing them: the saved values are those
    of the call.
    """
    checkpoints = open_checkpoints(keep=20)
    update = jax.jit(
        lambda s: jax.tree.map(lambda x: x * jnp.asarray(0.5, x.dtype) + 1, s), donate_argnums=0
    )
    state = {f"w{i}": jax.random.normal(jax.random.key(i), (200, 1000)) for i in range(8)}
    expected = {}
    for step in range(1, 6):
        state = update(state)
        expected[step] = on_host(state)
        del state["w7"]  # nothing but the checkpoint and the step holds the arrays
        state["w7"] = jnp.asarray(expected[step]["w7"].copy())
        checkpoints.save(step, state, {}, "{}")
        for _ in range(3):
            state = update(state)
        jax.block_until_ready(state)
    checkpoints.wait_for_save()
    for step, values in expected.items():
        assert_same(on_host(checkpoints.restore(step, abstract(state))[0]), values)


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 4), (4, 2)])
def test_restores_onto_another_mesh(open_checkpoints: Open, shape: tuple[int, ...]) -> None:
    checkpoints = open_checkpoints()
    state = make_state(2, make_mesh(8))
    checkpoints.save(5, state, None, "{}")
    checkpoints.wait_for_save()
    target = abstract(make_state(0, make_mesh(*shape)))
    restored, data_state, _ = checkpoints.restore(5, target)
    assert data_state is None
    assert_same(on_host(restored), on_host(state))
    assert jax.tree.leaves(restored)[0].sharding.mesh.devices.shape == shape


def test_the_newest_are_kept(open_checkpoints: Open, tmp_path: Path) -> None:
    checkpoints = open_checkpoints(keep=2)
    for step in (10, 20, 30, 110):
        checkpoints.save(step, make_state(step), step, "{}")
    # again, as a run's last step may be: nothing happens
    checkpoints.save(110, make_state(110), 110, "{}")
    checkpoints.wait_for_save()
    assert checkpoints.steps() == [30, 110]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["110", "30"]
    again = open_checkpoints(keep=2)
    assert again.latest_step() == 110
    state, _, _ = again.restore(110, abstract(make_state(0)))
    again.save(110, state, 110, "{}")  # nothing to do after the restore: again nothing happens
    with pytest.raises(ValueError, match=r"step = 30: already saved in .*checkpoints"):
        again.save(30, state, 30, "{}")
    with pytest.raises(ValueError, match=r"step = 105: .*checkpoints has got step 110 meanwhile"):
        again.save(105, state, 105, "{}")
    assert again.steps() == [30, 110]
    again.save(120, state, 120, "{}")
    again.wait_for_save()
    assert again.steps() == [110, 120]


# Damage


@pytest.fixture
def two_steps(open_checkpoints: Open) -> Checkpoints:
    checkpoints = open_checkpoints()
    for step in (1, 2):
        checkpoints.save(step, make_state(step), step, CONFIG.to_json())
    checkpoints.close()
    return checkpoints


def test_an_incomplete_step_is_skipped_and_set_aside(
    two_steps: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half-deleted (by hand, by a crash while an old step was deleted) or half-copied."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "2", folder / "3")
    shutil.copytree(folder / "2", folder / "4")
    shutil.copytree(folder / "2", folder / "5")
    (folder / "3" / MANIFEST).unlink()
    shutil.rmtree(folder / "4" / "state")
    (folder / "5" / MANIFEST).write_text('{"step": 5, "fil')
    (folder / "6.orbax-checkpoint-tmp").mkdir()  # killed in mid-save
    assert two_steps.latest_step() == 2
    errors = capsys.readouterr().err
    assert f"{folder}/3 is incomplete: it has no {MANIFEST}; skipped" in errors
    assert re.search(rf"{folder}/4 is incomplete: state/\S+ is missing; skipped", errors)
    assert f"{folder}/5 is incomplete: its {MANIFEST} cannot be read; skipped" in errors
    state, _, _ = two_steps.restore(2, abstract(make_state(0)))
    two_steps.save(3, state, 3, "{}")
    two_steps.wait_for_save()
    assert two_steps.steps() == [2, 3]
    names = {path.name for path in folder.iterdir()}
    assert names == {"2", "3", "incomplete-3-1", "incomplete-4-1", "incomplete-5-1"}
    (folder / "incomplete-notes").mkdir()
    for step in (10, 11, 12):  # what is older than every complete step goes
        two_steps.save(step, state, step, "{}")
    two_steps.wait_for_save()
    assert {path.name for path in folder.iterdir()} == {
        *map(str, two_steps.steps()),
        "incomplete-notes",
    }
    assert f"{folder}/incomplete-4-1: removed" in capsys.readouterr().out


def test_every_damaged_file_is_noticed(two_steps: Checkpoints, tmp_path: Path) -> None:
    """Truncated, or one bit changed: OCDBT alone returns garbage for a flipped bit in an array."""
    folder = tmp_path / "checkpoints" / "2"
    older = {path: path.read_bytes() for path in (folder.parent / "1").rglob("*") if path.is_file()}
    files = json.loads((folder / MANIFEST).read_text())["files"]
    assert any("ocdbt.process_0/d/" in name for name in files)
    for name in files:
        path = folder / name
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        for damaged, words in (
            (content[:-1], f"{name} has {len(content) - 1} of {len(content)} bytes"),
            (bytes(flipped), f"the content of {name} has changed"),
        ):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=re.escape(words)) as caught:
                two_steps.restore(2, abstract(make_state(0)))
            assert f"checkpoint {folder} is damaged" in str(caught.value)
            assert f"step 1 is intact: delete {folder} to go on from it" in str(caught.value)
        if name.startswith("config/"):
            with pytest.raises(ValueError, match=re.escape(name)):
                two_steps.saved_config(2)
        path.write_bytes(content)
    assert_same(two_steps.restore(2, abstract(make_state(0)))[0], make_state(2))
    assert older == {
        path: path.read_bytes() for path in (folder.parent / "1").rglob("*") if path.is_file()
    }


def test_a_step_under_another_name_is_refused(two_steps: Checkpoints, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (folder / "2").rename(folder / "7")
    words = re.escape(f"checkpoint {folder / '7'} is step 2: rename it to {folder / '2'}")
    with pytest.raises(ValueError, match=words):
        two_steps.restore(7, abstract(make_state(0)))
    with pytest.raises(ValueError, match=words):
        two_steps.saved_config(7)
    (folder / "7").rename(folder / "2")
    assert_same(two_steps.restore(2, abstract(make_state(0)))[0], make_state(2))


def test_a_damaged_manifest_is_never_believed(
    two_steps: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every byte changed, one after the other, and tables of other things: the older step is
    taken each time.
    """
    path = tmp_path / "checkpoints" / "2" / MANIFEST
    content = path.read_bytes()
    others = [
        b"[]",
        b'{"files": 5, "arrays": {}}',
        b'{"files": {"a": 1}, "arrays": {}, "step": 2}',
        b"\xff\xfe",
        b"",
    ]
    flipped = [
        content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :] for i in range(len(content))
    ]
    for damaged in others + flipped:
        path.write_bytes(damaged)
        assert two_steps.latest_step() == 1, damaged
        assert (
            f"{path.parent} is incomplete: its {MANIFEST} cannot be read; skipped"
            in capsys.readouterr().err
        )
    path.write_bytes(content)
    assert two_steps.latest_step() == 2
    manifest = json.loads(content)
    del manifest["crc32"]  # as jmoe wrote it before
    path.write_text(json.dumps(manifest))
    assert two_steps.latest_step() == 2
    assert manifest.pop("packing") == two_steps.newest_packing() == 1
    path.write_text(json.dumps(manifest))  # and before that
    assert (two_steps.latest_step(), two_steps.newest_packing()) == (2, 1)
    path.write_text(json.dumps(manifest | {"packing": "2"}))
    assert two_steps.latest_step() == 1


def test_no_step_can_be_restored(two_steps: Checkpoints, tmp_path: Path) -> None:
    """The run must not begin anew as if there had been none."""
    for step in (1, 2):
        (tmp_path / "checkpoints" / str(step) / MANIFEST).write_text("")
    with pytest.raises(
        ValueError,
        match=r"no checkpoint in .*checkpoints can be restored.*; delete .* to start anew",
    ):
        two_steps.latest_step()


def test_no_intact_step_is_left(two_steps: Checkpoints, tmp_path: Path) -> None:
    for step in (1, 2):
        name = next(
            iter(json.loads((tmp_path / "checkpoints" / str(step) / MANIFEST).read_text())["files"])
        )
        (tmp_path / "checkpoints" / str(step) / name).write_bytes(b"")
    with pytest.raises(ValueError, match="there is no intact older step"):
        two_steps.restore(2, abstract(make_state(0)))
    with pytest.raises(ValueError, match=r"step = 9: no such checkpoint in .*; there are \[1, 2\]"):
        two_steps.restore(9, abstract(make_state(0)))


def test_other_arrays_are_listed(two_steps: Checkpoints) -> None:
    target = abstract(make_state(0))
    embed = target["params"]["embed"]
    target["params"]["embed"] = jax.ShapeDtypeStruct(
        (16, 301), embed.dtype, sharding=embed.sharding
    )
    target["step"] = jax.ShapeDtypeStruct((), jnp.float32, sharding=target["step"].sharding)
    target["router"] = target["params"]["layers"].pop()
    with pytest.raises(ValueError, match="holds other arrays") as caught:
        two_steps.restore(2, target)
    message = str(caught.value)
    assert "params.embed: float32[16, 300] -> float32[16, 301]" in message
    assert "step: int32[] -> float32[]" in message
    assert "params.layers.0: bfloat16[16, 300] -> absent" in message
    assert "router: absent -> bfloat16[16, 300]" in message


# Disks that fail


FILL = """
import resource, sys
from pathlib import Path
import jax.numpy as jnp, numpy as np
from jmoe.config import CheckpointConfig
from jmoe.run.checkpoint import Checkpoints
folder, limited = Path(sys.argv[1]), sys.argv[2] == "limited"
checkpoints = Checkpoints(folder, CheckpointConfig(keep=2))
small = {"w": jnp.arange(1000.0)}
checkpoints.save(1, small, 1, "{}")
checkpoints.wait_for_save()
before = sorted((path, path.read_bytes()) for path in folder.rglob("*") if path.is_file())
if limited:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, resource.RLIM_INFINITY))
big = {"w": jnp.asarray(np.random.default_rng(0).random(4_000_000, np.float32))}
try:
    checkpoints.save(2, big, 2, "{}")
    print("went on", flush=True)
    checkpoints.save(3, small, 3, "{}")
except OSError as error:
    print("OSError:", error, flush=True)
assert before == sorted((path, path.read_bytes()) for path in folder.glob("1/**/*") if path.is_file())
assert checkpoints.latest_step() == 1
assert np.array_equal(checkpoints.restore(1, small)[0]["w"], small["w"])
checkpoints.save(3, small, 3, "{}")  # there is room for this one
checkpoints.close()
print("steps", checkpoints.steps(), sorted(path.name for path in folder.iterdir()))
"""


@pytest.mark.parametrize("how", ["full", "limited"])
def test_a_full_disk_is_an_error_and_the_older_step_stays(tmp_path: Path, how: str) -> None:
    """A file system of 8 MB (where this user may mount one), or a limit on the size of files."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = [sys.executable, "-c", FILL, str(folder), how]
    if how == "full":
        mount = f"mount -t tmpfs -o size=8m tmpfs {folder}"
        if subprocess.run(
            ["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False
        ).returncode:
            pytest.skip("this user may not mount a file system")
        command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", *command]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=root
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "went on"  # the error is that of the background save
    assert lines[1].startswith(f"OSError: checkpoint of step 2 in {folder} was not written: ")
    assert lines[1].endswith("; step 1 is complete")
    assert ("No space left" if how == "full" else "File too large") in lines[1]
    assert lines[2] == "steps [1, 3] ['1', '3']"


def test_writes_that_end_after_the_first_failed_are_not_reported(
    open_checkpoints: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They find the event loop of their save closed; whatever else nobody can catch is reported
    as before.
    """
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    open_checkpoints().save(1, {"w": jnp.zeros(2)}, None, "{}")
    late, other = (
        SimpleNamespace(exc_value=RuntimeError(text)) for text in ("Event loop is closed", "other")
    )
    for unraisable in (late, other):
        sys.unraisablehook(unraisable)  # type: ignore[arg-type]
    assert reported == [other]


async def _fail(*_: Any) -> None:
    raise ValueError("No space left on device")


@pytest.mark.parametrize(("write", "num_reported"), [(async_serialize_from_host, 0), (_fail, 1)])
def test_later_arrays_that_fail_are_not_reported(
    open_checkpoints: Open,
    caplog: pytest.LogCaptureFixture,
    write: Callable[..., Any],
    num_reported: int,
) -> None:
    """Orbax raises what the first array met and leaves the other tasks alone; other tasks are
    reported as before.
    """
    open_checkpoints().save(1, {"w": jnp.zeros(2)}, None, "{}")

    async def leave_alone() -> None:
        await asyncio.wait([asyncio.ensure_future(write(SimpleNamespace(is_on_host=False), {}))])

    asyncio.run(leave_alone())
    gc.collect()
    assert len([record for record in caplog.records if record.name == "asyncio"]) == num_reported


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints", CheckpointConfig())
    assert checkpoints.latest_step() is None
    with pytest.raises(
        OSError, match=r"checkpoint folder .*/file/checkpoints cannot be written: .*Not a directory"
    ):
        checkpoints.save(1, make_state(1), None, "{}")


# Real processes


SAVE_FOR_EVER = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from jmoe.config import CheckpointConfig
from jmoe.run.checkpoint import Checkpoints
checkpoints = Checkpoints(Path(sys.argv[1]), CheckpointConfig(keep=2))
begin = checkpoints.latest_step() or 0
make = jax.jit(lambda step: {f"w{i}": jnp.full((300_000,), step * 100 + i, jnp.int32) for i in range(6)})
for step in range(begin + 1, 100_000):
    checkpoints.save(step, make(jnp.int32(step)), {"step": step}, "{}")
    print("saving", step, flush=True)
    checkpoints.wait_for_save()
    print("saved", step, flush=True)
"""


def test_a_kill_at_any_moment_loses_nothing_saved(
    start_python: Start, open_checkpoints: Open, tmp_path: Path
) -> None:
    target = {f"w{i}": jax.ShapeDtypeStruct((300_000,), jnp.int32, sharding=None) for i in range(6)}
    reader = open_checkpoints()
    newest = 0
    for attempt in range(5):
        process = start_python(
            ["-c", SAVE_FOR_EVER, tmp_path / "checkpoints"], tmp_path / f"{attempt}.log"
        )
        wait_for_text(process.log, f"saved {newest + 1}\n")
        time.sleep(0.06 * attempt)
        process.kill_now()
        saved = int(re.findall(r"saved (\d+)", process.screen)[-1])
        newest = reader.latest_step() or 0
        assert newest >= saved
        state, data_state, _ = reader.restore(newest, target)
        assert data_state == {"step": newest}
        assert all((np.asarray(state[f"w{i}"]) == newest * 100 + i).all() for i in range(6))


RANK = """
import json, os, sys, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jmoe.config import CheckpointConfig, DistributedConfig
from jmoe.run import checkpoint
from jmoe.run.checkpoint import Checkpoints
from jmoe.cluster.distributed import join_processes
from jmoe.cluster.watchdog import Watchdog

rank, processes, port, folder, mode = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
if processes > 1:
    join_processes(DistributedConfig(coordinator_address=f"127.0.0.1:{port}", num_processes=processes, process_id=rank,
                            start_timeout_s=240, heartbeat_timeout_s=240))
mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
rows, whole = NamedSharding(mesh, PartitionSpec("d")), NamedSharding(mesh, PartitionSpec())
width = {"fail": 500_000, "bytes": 2_000_000}.get(mode, 5000)
make = jax.jit(lambda n: {"rows": jnp.arange(8.0 * width).reshape(8, width) + n, "step": n},
               out_shardings={"rows": rows, "step": whole})
train = jax.jit(lambda s: {"rows": s["rows"] + s["rows"].mean() * 0 + 1, "step": s["step"] + 1}, donate_argnums=0)
checkpoints = Checkpoints(Path(folder), CheckpointConfig(keep=3), timeout_s=5 if mode == "fail" else 120)
target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make(jnp.float32(0)))
with Watchdog(60) as watchdog:
    newest = checkpoints.latest_step()
    state = make(jnp.float32(0))
    if newest is not None:
        print("config", checkpoints.saved_config(newest), flush=True)
        state, data_state, _ = checkpoints.restore(newest, target)
        assert data_state == newest
        for shard in state["rows"].addressable_shards:
            want = (np.arange(8.0 * width, dtype=np.float32).reshape(8, width) + newest)[shard.index]
            assert np.array_equal(shard.data, want)
    begin = newest or 0
    print("begin", begin, jax.device_count(), flush=True)
    if mode == "fail" and rank == 1:
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    for step in range(begin + 1, begin + (6 if mode == "bytes" else 41)):
        with watchdog.waiting_for("training step", step):
            state = train(state)
            jax.block_until_ready(state)
        checkpoints.raise_save_error()
        if step % 5 == 0:
            with watchdog.waiting_for("checkpoint", step):
                checkpoints.save(step, state, step, '{"made": "by %d processes"}' % processes)
    checkpoints.close()
    if mode == "bytes":
        verified, crc32 = [], checkpoint.file_crc32
        checkpoint.file_crc32 = lambda path: verified.append(str(path.relative_to(Path(folder) / str(step)))) or crc32(path)
        read = lambda: int(Path("/proc/self/io").read_text().split()[1])
        before = read()
        Checkpoints(Path(folder), CheckpointConfig(keep=3)).restore(step, target)
        print("read", json.dumps({"verified": verified, "bytes": read() - before}), flush=True)
print("steps", checkpoints.steps(), flush=True)
"""


@pytest.fixture
def run_ranks(start_python: Start, tmp_path: Path) -> RunRanks:
    """`run_ranks(processes, devices, mode="", folders=None)` -> exit statuses and outputs of all
    ranks.
    """

    def run(
        processes: int, devices: int, mode: str = "", folders: list[Path] | None = None
    ) -> tuple[list[int], list[str]]:
        port = free_port()
        environment = {"JAX_NUM_CPU_DEVICES": str(devices), "PYTHONWARNINGS": "error"}
        ranks = [
            start_python(
                ["-c", RANK, rank, processes, port, folder, mode],
                tmp_path / f"{processes}-{rank}",
                environment,
            )
            for rank, folder in enumerate(folders or [tmp_path / "shared"] * processes)
        ]
        return [rank.wait(timeout=300) for rank in ranks], [rank.screen for rank in ranks]

    return run


@pytest.mark.slow
def test_other_numbers_of_processes_go_on(run_ranks: RunRanks, tmp_path: Path) -> None:
    """2 processes x 2 devices, then 1 x 4, then 4 x 1; saves go on under collectives of the
    training step.
    """
    begin, made = 0, ""
    for processes, devices in ((2, 2), (1, 4), (4, 1)):
        statuses, logs = run_ranks(processes, devices)
        assert statuses == [0] * processes, logs
        for log in logs:
            assert f"begin {begin} 4\n" in log
            assert f"steps [{begin + 30}, {begin + 35}, {begin + 40}]" in log
            assert not made or f"config {{'made': '{made}'}}" in log
        begin, made = begin + 40, f"by {processes} processes"
        manifest = json.loads((tmp_path / "shared" / str(begin) / MANIFEST).read_text())
        written_by = {name.split("/")[1] for name in manifest["files"] if "/d/" in name}
        assert written_by == {"d", *(f"ocdbt.process_{rank}" for rank in range(processes))}


def test_a_rank_reads_its_own_files(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Once for their sums and once for the arrays, and next to nothing of another rank's; every
    file is verified.
    """
    statuses, logs = run_ranks(2, 1, mode="bytes")
    assert statuses == [0, 0], logs
    files = json.loads((tmp_path / "shared" / "5" / MANIFEST).read_text())["files"]
    verified = []
    for rank, log in enumerate(logs):
        read = json.loads(re.findall(r"read (.*)", log)[0])
        own_bytes = sum(
            size for name, (size, _) in files.items() if f"ocdbt.process_{rank}/" in name
        )
        other_bytes = sum(
            size for name, (size, _) in files.items() if f"ocdbt.process_{1 - rank}/" in name
        )
        assert own_bytes > 10e6 and not [
            name for name in read["verified"] if f"ocdbt.process_{1 - rank}/" in name
        ]
        assert read["bytes"] < 2 * own_bytes + 0.2 * other_bytes
        verified += read["verified"]
    assert sorted(verified) == sorted(files)


def test_folders_that_are_not_shared_are_an_error(run_ranks: RunRanks, tmp_path: Path) -> None:
    statuses, logs = run_ranks(2, 1, folders=[tmp_path / "a", tmp_path / "b"])
    assert statuses == [1, 1]
    assert all("processes [1] do not see what process 0 writes" in log for log in logs), logs


def test_a_save_that_fails_on_one_rank_ends_all(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Rank 1 cannot write: no rank waits longer than the limit, and rank 1 says what the matter
    is.
    """
    statuses, logs = run_ranks(2, 1, mode="fail")
    assert 0 not in statuses
    assert re.search(
        r"OSError: checkpoint of step 5 in \S+/shared was not written: .*File too large", logs[1]
    ), logs
    # a traceback, or its line alone where rank 1's end was known in time to explain it
    assert re.search(
        r"checkpoint of step 5 in .* process 0 waited for the others at .* names: 1 ", logs[0]
    ), logs
    assert not list((tmp_path / "shared").glob("[0-9]"))


SAVE_UNDER_SIGNALS = """
import sys
from pathlib import Path
import jax.numpy as jnp
from jmoe.config import CheckpointConfig
from jmoe.run.checkpoint import Checkpoints
from jmoe.cluster.signals import PreemptionSignal
with PreemptionSignal() as preemption:
    print("ready", flush=True)
    checkpoints = Checkpoints(Path(sys.argv[1]), CheckpointConfig(keep=100))
    step = 0
    while step < 30 or not Path(sys.argv[2]).exists():
        step += 1
        checkpoints.save(step, {"w": jnp.arange(300_000)}, step, "{}")
        checkpoints.wait_for_save()
    checkpoints.close()
    assert preemption.must_stop_after(step)
print(f"saved {step} of {checkpoints.steps()[-1]}", flush=True)
"""


def test_signals_do_not_stop_a_save(start_python: Start, tmp_path: Path) -> None:
    told = tmp_path / "told"
    process = start_python(
        ["-c", SAVE_UNDER_SIGNALS, tmp_path / "checkpoints", told], tmp_path / "log"
    )
    wait_for_text(process.log, "ready\n")
    for number in range(20):
        process.send_signal((signal.SIGTERM, signal.SIGUSR1)[number % 2])
        time.sleep(0.05)
    told.touch()
    (saved,) = re.findall(r"saved (\d+ of \d+)", process.end(300))
    step, newest = saved.split(" of ")
    assert step == newest and int(step) >= 30
