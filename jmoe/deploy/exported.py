"""The Hugging Face folder to serve from, which the output folder of a run gets by itself."""

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jmoe.config import CheckpointConfig
from jmoe.deploy.export import export_run
from jmoe.memory.record_store import locked
from jmoe.run.checkpoint import Checkpoints
from jmoe.status import status

EXPORTED = "exported"
LOCK = "export.lock"
LOCK_LIMIT_S = 3600.0  # another process may just write a large model


@contextmanager
def hugging_face_folder(
    path: str | os.PathLike[str], say: Callable[[str], None], name: str = "model"
) -> Iterator[Path]:
    """Yield the folder itself, or the newest checkpoint of a run, exported once, which stays until the block ends.

    say: takes lines about the export. name: of the option that the folder is named by, for messages. Raises
    `ValueError` if the folder is neither.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{name} = {str(path)!r}: must be a folder; `make train` leaves a model in runs/tiny")
    if not (folder / "checkpoints").is_dir():
        yield folder
        return
    with Checkpoints(folder / "checkpoints", CheckpointConfig()) as checkpoints:
        step = checkpoints.latest_step()
    if step is None:
        raise ValueError(f"{name} = {str(path)!r}: the run has no checkpoint yet")
    exports = folder / EXPORTED
    exported = exports / f"step-{step}"
    use = _in_use(exported)  # also where nothing may be written
    if use is None:
        exports.mkdir(exist_ok=True)
        with status(f"exporting step {step} of {folder}", say), locked(exports, LOCK_LIMIT_S, LOCK):
            if not exported.is_dir():  # another process may have exported it meanwhile
                exported = _export(folder, exports)
            use = _in_use(exported)
    assert use is not None, "nobody removes it without the lock"
    say(f"{exported.name.replace('-', ' ')} of {folder} is in {exported}")
    try:
        yield exported
    finally:
        os.close(use)


def _in_use(exported: Path) -> int | None:
    """Keep an exported step from being removed until the descriptor is closed; None if it is not there."""
    try:
        use = os.open(exported, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    fcntl.flock(use, fcntl.LOCK_SH)  # waits for who is removing it
    if exported.is_dir() and os.path.samestat(os.fstat(use), exported.stat()):
        return use
    os.close(use)
    return None


def _export(run_dir: Path, exports: Path) -> Path:
    """Write the newest checkpoint of a run and remove older ones that nobody uses; the lock is held."""
    for leftover in exports.glob("partial-*"):  # of a process that died
        shutil.rmtree(leftover)
    partial = exports / f"partial-{secrets.token_hex(4)}"
    exported = exports / f"step-{export_run(run_dir, partial)}"
    for older in exports.glob("step-*"):
        _remove_unused(older)
    if exported.is_dir():  # a newer step than was looked for, exported before
        shutil.rmtree(partial)
    else:
        partial.rename(exported)
    return exported


def _remove_unused(exported: Path) -> None:
    """Delete an exported step unless a process serves from it."""
    use = os.open(exported, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(BlockingIOError):
            fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(exported)
    finally:
        os.close(use)
