"""The Hugging Face folder of a model to serve or convert; the output folder of a run is merged
automatically.

`python -m jmoe.deploy.model_folder RUN NAME` merges the newest step of a run; NAME is the option
that messages name.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from jmoe.models.gguf.folder import gguf_folder
from jmoe.models.other_tokenizers import write_missing_tokenizer
from jmoe.models.pretrained import unreadable_model_hint


@contextmanager
def hugging_face_folder(
    path: str | os.PathLike[str],
    say: Callable[[str], None],
    option_name: str = "model",
    cache_dir: str | os.PathLike[str] | None = None,
) -> Iterator[Path]:
    """Yield `path` if it is a Hugging Face folder, the merged newest checkpoint if it is a run's
    folder, or a folder that describes and links a GGUF file.

    A folder without a `tokenizer.json` gets one if jmoe reads its tokenizer. A checkpoint is merged
    once. Other processes do not remove the merged folder before the block
    ends. say: a function called with each line of progress. option_name: the option that errors
    name.
    cache_dir: holds the merged folder if the run's folder is not writable. Raises ValueError if
    `path` is neither, OSError if no place for the merged folder is writable.
    """
    folder = Path(path).expanduser()
    if folder.suffix == ".gguf" and folder.is_file():
        yield gguf_folder(folder, cache_dir)
        return
    if not folder.is_dir():
        instead = unreadable_model_hint(folder) or "`make train` leaves a model in runs/tiny"
        raise ValueError(f"{option_name} = {str(path)!r}: must be a folder; {instead}")
    if not (folder / "checkpoints").is_dir():
        inside = folder / "model"
        if (inside / "config.json").is_file() and not (folder / "config.json").is_file():
            raise ValueError(
                f"{option_name} = {str(path)!r}: is a bundle: must be a Hugging Face folder, such"
                f" as its {inside}"
            )
        write_missing_tokenizer(folder, say)
        yield folder
        return
    # only a run needs Orbax and the trainer's state, whose import takes half a second
    from jmoe.deploy.merged_run import merged_run_folder

    with merged_run_folder(path, say, option_name, cache_dir) as merged:
        yield merged


def merge_in_subprocess(run_dir: str, option_name: str) -> None:
    """Merge the newest step of a run, unless done before, in a separate process.

    JAX stays uninitialised in this process, which may still have to join a distributed run.
    option_name: the option that names the run. Raises ValueError as `hugging_face_folder` does.
    """
    command = [sys.executable, "-m", "jmoe.deploy.model_folder", run_dir, option_name]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}  # the caller uses the accelerators
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [
            f"{option_name} = {run_dir!r}: merging ended with {done.returncode}"
        ]
        raise ValueError(lines[-1])


if __name__ == "__main__":
    try:
        with hugging_face_folder(sys.argv[1], partial(print, flush=True), option_name=sys.argv[2]):
            pass
    except (ValueError, OSError) as error:
        sys.exit(str(error))
