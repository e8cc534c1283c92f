"""The Hugging Face folder of a run of `train.py`: its newest checkpoint, merged once.

`model_folder.py` uses it for the output folder of a run.
"""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from jmoe.config import CheckpointConfig
from jmoe.deploy.merge import merge_run_to_hugging_face
from jmoe.memory.direct_io import NOT_SUPPORTED, UNWRITABLE, fsync, fsync_tree
from jmoe.memory.identity import sampled_content_hash
from jmoe.memory.record_store import folder_lock
from jmoe.run.checkpoint import MANIFEST, Checkpoints
from jmoe.status import status
from jmoe.training.finetune import MERGED

LOCK = "merge.lock"
LOCK_LIMIT_S = 3600.0  # another process may be writing a large model


@contextmanager
def merged_run_folder(
    path: str | os.PathLike[str],
    say: Callable[[str], None],
    option_name: str,
    cache_dir: str | os.PathLike[str] | None,
) -> Iterator[Path]:
    """Yield the merged newest checkpoint of a run's output folder; merge it unless that was done
    before.

    Other processes do not remove the merged folder before the block ends. Arguments and errors are
    those of `hugging_face_folder`.
    """
    folder = Path(path).expanduser()
    with Checkpoints(folder / "checkpoints", CheckpointConfig()) as checkpoints:
        step = checkpoints.latest_step()
    if step is None:
        raise ValueError(f"{option_name} = {str(path)!r}: the run has no checkpoint yet")
    places = [
        folder / MERGED,
        *([] if cache_dir is None else [Path(cache_dir).expanduser() / MERGED]),
    ]
    made = (place / _merged_folder_name(folder, step) for place in places)
    merged, use = next(
        ((m, use) for m in made if (use := _lock_against_removal(m)) is not None), (places[0], None)
    )
    if use is None:
        merges = _first_writable_folder(places, folder, f"{option_name} = {str(path)!r}")
        merged = merges / _merged_folder_name(folder, step)
        with (
            status(f"merging step {step} of {folder}", say),
            folder_lock(merges, LOCK_LIMIT_S, LOCK),
        ):
            if not merged.is_dir():  # another process may have merged it meanwhile
                merged = _merge_newest_step(folder, merges)
            use = _lock_against_removal(merged)
    assert use is not None, "nobody removes it without the lock"
    say(f"step {merged.name.split('-')[1]} of {folder} is in {merged}")
    try:
        yield merged
    finally:
        os.close(use)


def _merged_folder_name(run_dir: Path, step: int) -> str:
    """Return the name of a merged step's folder. It contains a hash of the checkpoint, since a
    deleted step may be trained again.
    """
    manifest = run_dir / "checkpoints" / str(step) / MANIFEST  # checksums of all files of the step
    return f"step-{step}-{sampled_content_hash({MANIFEST: manifest})[:12]}"


def _first_writable_folder(places: Sequence[Path], run_dir: Path, setting: str) -> Path:
    """Return the first of these folders that is writable; a missing one is created. Raises OSError
    if there is none.
    """
    for merges in places:
        try:
            merges.mkdir(parents=merges != run_dir / MERGED, exist_ok=True)
            (merges / LOCK).open("a").close()
            return merges
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            problem = error
    raise OSError(
        f"{setting}: its newest step cannot be merged in {problem.filename}: {problem.strerror};"
        f" merge it elsewhere by python -m jmoe.deploy.merge {run_dir} OUT_DIR and give OUT_DIR, or"
        " give serve.py a --cache-dir"
    ) from problem


def _lock_against_removal(merged: Path) -> int | None:
    """Return a descriptor that keeps a merged step from being removed until it is closed; None if
    the step does not exist.
    """
    try:
        use = os.open(merged, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    with suppress(OSError):  # on a file system without locks no process removes a merged step
        fcntl.flock(use, fcntl.LOCK_SH)  # waits for a process that is removing the step
    if merged.is_dir() and os.path.samestat(os.fstat(use), merged.stat()):
        return use
    os.close(use)
    return None


def _merge_newest_step(run_dir: Path, merges: Path) -> Path:
    """Merge a run's newest checkpoint into `merges`, remove older merged steps that no process
    uses, and return the new folder. The caller holds the lock.
    """
    for leftover in merges.glob("partial-*"):  # of a process that died
        shutil.rmtree(leftover)
    partial = merges / f"partial-{secrets.token_hex(4)}"
    merged = merges / _merged_folder_name(run_dir, merge_run_to_hugging_face(run_dir, partial))
    for older in merges.glob("step-*"):
        _remove_if_unused(older)
    if merged.is_dir():  # the newest step changed meanwhile to one that is merged already
        shutil.rmtree(partial)
    else:
        fsync_tree(partial)
        partial.rename(merged)
        fsync(merges)
    return merged


def _remove_if_unused(merged: Path) -> None:
    """Delete a merged step unless a process uses it."""
    use = os.open(merged, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # in use, or unknown: NFS cannot lock folders
            if error.errno not in (errno.EWOULDBLOCK, errno.EBADF, errno.ENOLCK, *NOT_SUPPORTED):
                raise
            return
        shutil.rmtree(merged)
    finally:
        os.close(use)
