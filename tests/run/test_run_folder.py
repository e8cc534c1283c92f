"""The lock on a run's output folder. A lock belongs to who opened the file: two in one process
exclude each other.
"""

import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from jmoe.run import run_folder
from jmoe.run.run_folder import IDENTITY, LOCK, RunFolder
from tests.fuse import fuse


def test_one_run_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunFolder(tmp_path):
        with (
            pytest.raises(OSError, match=r"is in use by process \d+ on \S+ since 20"),
            RunFolder(tmp_path, wait_s=0.1),
        ):
            pass
        assert "waiting for it to end, at most 0.1 s" in capsys.readouterr().out
    with RunFolder(tmp_path, wait_s=0):
        pass
    assert (tmp_path / LOCK).is_file()  # the folder was there before


def test_a_lock_can_be_taken_by_whom_the_umask_lets_write(tmp_path: Path) -> None:
    """A group that shares its runs goes on with one of another member."""
    before = os.umask(0o002)
    try:
        with RunFolder(tmp_path / "run") as folder:
            assert (folder.path / LOCK).stat().st_mode & 0o777 == 0o664
    finally:
        os.umask(before)


def test_a_folder_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 0 is on another host and has taken the folder of that name there."""
    elsewhere = json.dumps({"token": "of process 0", "run": "run-1"})
    monkeypatch.setattr(run_folder, "result_from_rank_0", lambda *_: elsewhere)
    clock = itertools.count(0.0, 3.0)
    monkeypatch.setattr(
        run_folder, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None)
    )
    with (
        pytest.raises(OSError, match="it must lie on a file system that all processes share"),
        RunFolder(tmp_path),
    ):
        pass


def test_many_starts_at_once(tmp_path: Path) -> None:
    """Taking the lock for all processes of a run is no single step: of twelve starts, one at a
    time is inside.
    """
    inside, done = threading.Lock(), []

    def run(number: int) -> None:
        with RunFolder(tmp_path / "run", wait_s=100) as folder:
            assert inside.acquire(blocking=False)
            time.sleep(0.01)
            folder.check_still_owned()
            (folder.path / str(number)).touch()
            inside.release()
        done.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(12))


def test_where_the_file_system_has_no_locks_the_earlier_run_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_lock(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_lock)
    with RunFolder(tmp_path) as first:
        first.check_still_owned()
        with RunFolder(tmp_path) as second:
            with pytest.raises(OSError, match="was taken over by process"):
                first.check_still_owned()
            second.check_still_owned()
    assert "cannot be locked (Function not implemented)" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    nowhere = Path("/proc/nowhere/run")  # nobody may make a folder there
    for folder, why in ((tmp_path / "run", "File exists"), (nowhere, "No such file or directory")):
        words = f"output_dir = '{folder}': must be a folder that can be written: {why}"
        with pytest.raises(OSError, match=f"^{words}$"), RunFolder(folder):
            pass
    assert (tmp_path / "run").read_text() == "mine"


def test_a_folder_made_for_nothing_is_removed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a mistake"), RunFolder(tmp_path / "new"):
        raise ValueError("a mistake")
    assert not (tmp_path / "new").exists()
    with RunFolder(tmp_path / "new") as folder:
        (folder.path / "result").touch()
    assert sorted(path.name for path in folder.path.iterdir()) == ["result", IDENTITY, LOCK]


def test_on_fuse_a_folder_made_for_nothing_is_removed_and_the_mistake_is_named(
    tmp_path: Path,
) -> None:
    """A deleted file stays in its folder there while it is open, as on NFS."""
    with fuse(tmp_path / "disk", tmp_path / "mount", "links", "fsync_of_folders") as mount:
        with pytest.raises(ValueError, match="a mistake"), RunFolder(mount / "new"):
            raise ValueError("a mistake")
        assert not list(mount.iterdir())


def test_a_copy_is_another_run_and_a_moved_one_is_not(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "one") as first:
        (first.path / "result").touch()
    with RunFolder(tmp_path / "one") as again:
        assert again.run_name == first.run_name
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    with RunFolder(tmp_path / "copy") as copy:
        assert copy.run_name != first.run_name and copy.run_name.startswith("copy-")
    (tmp_path / "one").rename(tmp_path / "moved")
    for _ in range(2):
        with RunFolder(tmp_path / "moved") as moved:
            assert moved.run_name == first.run_name


@pytest.mark.parametrize("copy_starts_first", [True, False])
def test_a_copy_is_another_run_when_the_first_has_moved(
    tmp_path: Path, copy_starts_first: bool
) -> None:
    """`cp -r A B; mv A C`: there is no A any more, and only C has what A had outside of its
    folder.
    """
    with RunFolder(tmp_path / "A") as first:
        (first.path / "result").touch()
    shutil.copytree(tmp_path / "A", tmp_path / "B")
    (tmp_path / "A").rename(tmp_path / "C")
    names = {}
    for name in ("B", "C") if copy_starts_first else ("C", "B"):
        with RunFolder(tmp_path / name) as folder:
            names[name] = folder.run_name
    assert names["C"] == first.run_name != names["B"]


def test_of_a_copy_by_hard_links_no_two_are_one_run(tmp_path: Path) -> None:
    """`cp -al A B; mv A C`: both have the very file."""
    with RunFolder(tmp_path / "A") as first:
        (first.path / "result").touch()
    shutil.copytree(tmp_path / "A", tmp_path / "B", copy_function=os.link)
    (tmp_path / "A").rename(tmp_path / "C")
    with RunFolder(tmp_path / "B") as one:
        pass
    with RunFolder(tmp_path / "C") as other:
        assert other.run_name != one.run_name


def test_starts_are_noted_when_they_have_a_state(tmp_path: Path) -> None:
    """A copy has none of them, as it is another run; a clone of the disk has those before it was
    made.
    """
    with RunFolder(tmp_path) as first:
        before = (tmp_path / IDENTITY).read_bytes()
        first.note_start()
        assert len(first.start_tokens) == 1
    cloned = (tmp_path / IDENTITY).read_bytes()
    assert cloned != before
    with RunFolder(tmp_path) as refused:
        assert refused.start_tokens[:-1] == first.start_tokens
    assert (tmp_path / IDENTITY).read_bytes() == cloned, "it did not come so far"
    with RunFolder(tmp_path) as second:
        second.note_start()
        assert (
            second.start_tokens[:-1] == first.start_tokens
            and second.start_tokens[-1] != refused.start_tokens[-1]
        )
    shutil.copytree(tmp_path, tmp_path / "copy")
    with RunFolder(tmp_path / "copy") as copy:
        assert len(copy.start_tokens) == 1


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_lock_that_was_removed_is_written_again(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    with RunFolder(tmp_path) as folder:
        other = RunFolder(tmp_path)  # another process of the same run
        other._owner = folder._owner
        other._lock_shared()
        written = json.loads((tmp_path / LOCK).read_bytes())
        damage(tmp_path / LOCK)
        folder.check_still_owned()
        assert json.loads((tmp_path / LOCK).read_bytes()) == written
        other.check_still_owned()
        folder._file.close()  # type: ignore[union-attr]
        with pytest.raises(OSError, match="is in use by process"), RunFolder(tmp_path, wait_s=0.1):
            pass  # the other one holds what was written anew
        other.__exit__()
    with RunFolder(tmp_path, wait_s=0):
        pass


def test_who_came_while_the_lock_was_gone_has_the_folder(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as first:
        (tmp_path / LOCK).unlink()
        with RunFolder(tmp_path) as second:
            with pytest.raises(OSError, match="was taken over by process"):
                first.check_still_owned()
            second.check_still_owned()


def test_a_folder_that_was_removed_is_named(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(
            OSError, match=r"output_dir = '.*run': was removed; this run saves no more"
        ):
            folder.check_still_owned()
        (tmp_path / "run").mkdir()
