"""Write a smaller model with some of a larger model's layers and experts, one expert at a time.

`prune` and `distil` call `write_cut_model`. Every stage that writes a folder uses
`creating_folder`, which creates it whole or not at all.

Legend: N kept layers with experts, n experts of each, D hidden, F expert hidden.
"""

import dataclasses
import fcntl
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jmoe.config import STACKS, ModelConfig, check
from jmoe.memory.direct_io import fsync, fsync_tree
from jmoe.models.huggingface import updated_hf_config
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.models.pretrained import write_pretrained
from jmoe.models.quantization import MODELOPT_FILE
from jmoe.models.tokenizer_file import find_additional_chat_templates
from jmoe.models.weights import Names, StoredExperts

# (name of an array, layer among those with experts, expert), numbered in the larger model -> array
ReadExpert = Callable[[str, int, int], np.ndarray]
WEIGHTS = (".safetensors", ".index.json", ".gguf")


def check_empty_or_new(folder: Path, option_name: str = "out") -> None:
    """Raise ValueError naming the option unless the folder is empty or can be created."""
    check(
        folder.name not in ("", ".."),
        option_name,
        str(folder),
        "must end in a name, which the new folder gets",
    )
    is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    constraint = "must be an empty folder or none: nothing is written over"
    check(is_new and not folder.is_symlink(), option_name, str(folder), constraint)
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    writable = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
    check(
        writable,
        option_name,
        str(folder),
        f"must be where a folder can be made, and {above} is no folder to write to",
    )


def weight_bytes(folder: Path) -> int:
    """Return the total bytes of a folder's safetensors files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@contextmanager
def creating_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `out`, which is renamed to `out` when the block ends. After an
    error nothing remains.
    """
    with scratch_folder(out.with_name(f".{out.name}.partial"), out) as partial:
        yield partial
        fsync_tree(partial)
        if out.exists():
            out.rmdir()  # it is empty
        partial.rename(out)
    fsync(out.parent)


@contextmanager
def scratch_folder(folder: Path, out: Path) -> Iterator[Path]:
    """Yield an empty folder `folder` for this process; delete whatever is left of it when the block
    ends.

    Leftovers of a killed process are deleted first. out: named in errors. Raises ValueError if
    another process uses the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, is_own = -1, True
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        is_own = _try_lock(descriptor)
        check(is_own, "out", str(out), f"another process is writing it, in {folder}")
        for leftover in folder.iterdir():
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        yield folder
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        # errors of `write`, such as a full disk, do not name a file
        raise OSError(error.errno, error.strerror, str(out)) from error
    finally:
        if is_own:
            shutil.rmtree(folder, ignore_errors=True)
        if descriptor >= 0:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Lock a folder for this process until the descriptor is closed; return False if another
    process holds the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        pass
    return True


@contextmanager
def creating_model_folder(out: Path, source: Path) -> Iterator[Path]:
    """Yield a `creating_folder` for a model's configuration and weights; at the end copy the other
    files of `source` into it, such as the tokenizer.
    """
    with creating_folder(out) as partial:
        yield partial
        copy_files_beside_weights(source, partial)


def copy_files_beside_weights(source: Path, target: Path) -> None:
    """Copy a Hugging Face folder's files except weights and what describes them, such as the
    tokenizer.
    """
    names = model_file_names(source)
    described = ("config.json", MODELOPT_FILE)
    beside = (name for name in names if not name.endswith(WEIGHTS) and name not in described)
    copy_files(source, target, beside)


def model_file_names(folder: Path) -> list[str]:
    """Return the names, relative to a Hugging Face folder, of its files and additional chat
    templates.
    """
    files = [file for file in folder.iterdir() if file.is_file()]
    files += find_additional_chat_templates(folder).values()
    return [file.relative_to(folder).as_posix() for file in files]


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy files of `source`, named relative to it, into `target`."""
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)


def cut_config(
    config: ModelConfig, layers: Sequence[int], dense: Collection[int] = (), **changes: int
) -> ModelConfig:
    """Return the configuration of a decoder with the layers `layers` of `config`.

    dense: numbers, in the new decoder, of layers that become dense. changes: num_experts,
    num_experts_per_tok, intermediate_size.
    """
    kinds = ["dense" if n in dense else config.layers[i].kind for n, i in enumerate(layers)]
    types = tuple(config.layer_types[i] for i in layers) if config.layer_types else ()
    first = (
        next((i for i, kind in enumerate(kinds) if kind == "moe"), 0)
        if config.first_k_dense_replace
        else 0
    )
    return dataclasses.replace(
        config,
        num_hidden_layers=len(layers),
        layer_types=types,
        first_k_dense_replace=first,
        decoder_sparse_step=1,
        mlp_only_layers=tuple(i for i, kind in enumerate(kinds) if kind == "dense" and i >= first),
        **changes,  # type: ignore[arg-type]
    )


def write_cut_model(
    source: LazyCheckpoint,
    out: Path,
    config: ModelConfig,
    layers: Sequence[int],
    kept_Nn: NDArray[np.int64],
    read_expert: ReadExpert | None = None,
    dense: Mapping[int, Mapping[str, np.ndarray]] | None = None,
) -> None:
    """Write the decoder `config`, with the layers `layers` of `source` and the experts `kept_Nn` of
    each layer that has experts.

    The router loses the columns of dropped experts, so its softmax is over the kept ones.
    read_expert: a function of (array's name, layer among those with experts, expert) that returns
    the array; None: the checkpoint's own. dense: MLP arrays, by layer number in `config`, of layers
    that had experts and become dense. Files beside the weights, such as the tokenizer, are copied.
    """
    whole = source.config
    described, dense = updated_hf_config(source.fields, config), dense or {}
    rest, read_expert = source.load_dense_arrays(), read_expert or source.read_expert_array
    of_whole = [whole.layers[i] for i in layers]
    records = [of_whole[n].record for n, layer in enumerate(config.layers) if layer.has_experts]
    arrays: dict[Names, jax.Array | StoredExperts] = {
        path: array for path, array in rest.items() if path[0] not in STACKS.values()
    }
    for path in _stacked_array_paths(rest, dense):
        mine = [n for n, layer in enumerate(config.layers) if layer.stack_name == path[0]]
        parts = []
        for n in mine:
            if n in dense and path[1] == "mlp":
                parts.append(jnp.asarray(dense[n][path[-1]]))
            else:
                parts.append(rest[(of_whole[n].stack_name, *path[1:])][of_whole[n].number])
        if "router" in path:
            parts = [one[..., kept] for one, kept in zip(parts, kept_Nn, strict=True)]
        if parts:
            arrays[path] = jnp.stack(parts)
    for path, dtype in source.decompressed_expert_dtypes.items():

        def read_kept_expert(layer: int, expert: int, name: str = path[-1]) -> np.ndarray:
            return read_expert(name, records[layer], int(kept_Nn[layer, expert]))

        arrays[path] = StoredExperts(read_kept_expert, dtype)
    assert whole.num_moe_layers >= config.num_moe_layers == len(kept_Nn)
    with creating_model_folder(out, source.folder) as partial:
        write_pretrained(partial, config, arrays, described)


def _stacked_array_paths(
    rest: Mapping[Names, jax.Array], dense: Mapping[int, Mapping[str, np.ndarray]]
) -> list[Names]:
    """Return the paths of all stacked arrays of the new model, including those of layers that
    become dense.
    """
    paths = {path: None for path in rest if path[0] in STACKS.values()}
    for arrays in dense.values():
        common = [
            path[1:]
            for path in rest
            if path[0] == STACKS["moe"] and path[1] not in ("moe", "shared_expert")
        ]
        paths |= {
            (STACKS["dense"], *path): None
            for path in [*common, *(("mlp", name) for name in arrays)]
        }
    return list(paths)
