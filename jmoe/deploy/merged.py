"""The Hugging Face folder to serve from, which the output folder of a run gets by itself."""

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jmoe.config import CheckpointConfig
from jmoe.deploy.merge import merge_run
from jmoe.memory.record_store import locked
from jmoe.run.checkpoint import Checkpoints
from jmoe.status import status

MERGED = "merged"
LOCK = "merge.lock"
LOCK_LIMIT_S = 3600.0  # another process may just write a large model


@contextmanager
def hugging_face_folder(
    path: str | os.PathLike[str], say: Callable[[str], None], name: str = "model"
) -> Iterator[Path]:
    """Yield the folder itself, or the newest checkpoint of a run, merged once, which stays until the block ends.

    say: takes lines about the merge. name: of the option that the folder is named by, for messages. Raises
    `ValueError` if the folder is neither.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{name} = {str(path)!r}: must be a folder; `make train` leaves a model in runs/tiny")
    if not (folder / "checkpoints").is_dir():
        inside = folder / "model"
        if (inside / "config.json").is_file() and not (folder / "config.json").is_file():
            raise ValueError(
                f"{name} = {str(path)!r}: is a bundle: must be a Hugging Face folder, such as its {inside}"
            )
        yield folder
        return
    with Checkpoints(folder / "checkpoints", CheckpointConfig()) as checkpoints:
        step = checkpoints.latest_step()
    if step is None:
        raise ValueError(f"{name} = {str(path)!r}: the run has no checkpoint yet")
    merges = folder / MERGED
    merged = merges / f"step-{step}"
    use = _in_use(merged)  # also where nothing may be written
    if use is None:
        merges.mkdir(exist_ok=True)
        with status(f"merging step {step} of {folder}", say), locked(merges, LOCK_LIMIT_S, LOCK):
            if not merged.is_dir():  # another process may have merged it meanwhile
                merged = _merge(folder, merges)
            use = _in_use(merged)
    assert use is not None, "nobody removes it without the lock"
    say(f"{merged.name.replace('-', ' ')} of {folder} is in {merged}")
    try:
        yield merged
    finally:
        os.close(use)


def _in_use(merged: Path) -> int | None:
    """Keep a merged step from being removed until the descriptor is closed; None if it is not there."""
    try:
        use = os.open(merged, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    fcntl.flock(use, fcntl.LOCK_SH)  # waits for who is removing it
    if merged.is_dir() and os.path.samestat(os.fstat(use), merged.stat()):
        return use
    os.close(use)
    return None


def _merge(run_dir: Path, merges: Path) -> Path:
    """Write the newest checkpoint of a run and remove older ones that nobody uses; the lock is held."""
    for leftover in merges.glob("partial-*"):  # of a process that died
        shutil.rmtree(leftover)
    partial = merges / f"partial-{secrets.token_hex(4)}"
    merged = merges / f"step-{merge_run(run_dir, partial)}"
    for older in merges.glob("step-*"):
        _remove_unused(older)
    if merged.is_dir():  # a newer step than was looked for, merged before
        shutil.rmtree(partial)
    else:
        partial.rename(merged)
    return merged


def _remove_unused(merged: Path) -> None:
    """Delete a merged step unless a process serves from it."""
    use = os.open(merged, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(BlockingIOError):
            fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(merged)
    finally:
        os.close(use)
