"""A disk that fails in a step or a save: a new trainer in the same process goes on from the last
checkpoint to the bit.
"""

import dataclasses
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from test_train_stores import NVME, SAVED, Opened

from tests.arrays import differing
from tests.training.streamed.test_streamed_step import BY_XLA, HOST, STEPS, Trained, train

FAILURES = {
    "pwritev": errno.ENOSPC,
    "posix_fallocate": errno.ENOSPC,
    "fdatasync": errno.EIO,
    "fsync": errno.EIO,
}


def fail_below(folder: Path, name: str, code: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let every call of `os.NAME` on a file below `folder` fail; return the files, as they come."""
    real: Callable[..., Any] = getattr(os, name)
    failed: list[str] = []

    def call(descriptor: int, *arguments: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if not Path(path).is_relative_to(folder):
            return real(descriptor, *arguments)
        failed.append(path)
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(os, name, call)
    return failed


@pytest.fixture(scope="module")
def undisturbed() -> Trained:
    """In host memory, updated on the device, and never saved."""
    return train(BY_XLA, HOST)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["device", "host"])
@pytest.mark.parametrize("name", FAILURES)
def test_a_new_trainer_goes_on_after_a_failure(
    name: str,
    update: Literal["device", "host"],
    undisturbed: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = FAILURES[name]
    tiers = dataclasses.replace(NVME, update=update)
    with Opened(tmp_path, tiers, BY_XLA) as run:
        state = run.steps(run.program.init(), SAVED)
        run.save(state)
        with monkeypatch.context() as patch:
            failed = fail_below(tmp_path / "records", name, code, patch)
            with pytest.raises(OSError, match=os.strerror(code)):
                run.save(run.steps(state, STEPS))
    assert failed
    with Opened(tmp_path, tiers, BY_XLA) as run:
        state = run.steps(run.restore(SAVED), STEPS)
        assert run.losses == undisturbed.losses[SAVED:]
        assert differing(run.whole(state), undisturbed.state) == []
