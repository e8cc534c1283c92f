"""Generate tokens greedily from a folder of programs and weights, with JAX and numpy alone: python
FOLDER/run.py --tokens 1,2,3.

`python -m jmoe.deploy.lower` copies this file into the folder that it writes, as run.py, so the
file imports nothing of jmoe:

    from run import PortableModel
    (answer,) = PortableModel("FOLDER").generate([[1, 2, 3]], max_new_tokens=16)

Legend: P rows of a step, C tokens per row, V vocabulary, S positions of the cache.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

PLAN = "plan.json"  # lists the folder's files, and the versions and platforms that they need
PORTABLE = "portable"  # the value of `form` in plan.json
MAX_PLAN_BYTES = 64 << 20
SEAL = "sha256"  # field of the plan: checksum of its other fields
DTYPES: dict[str, Any] = {
    "F32": np.float32,
    "BF16": jnp.bfloat16,
    "F16": np.float16,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I32": np.int32,
}


def read_plan(folder: Path) -> dict[str, Any]:
    """Return a folder's plan.json without its checksum. Raises ValueError naming the file if it is
    missing or damaged.
    """
    file = folder / PLAN
    if not file.is_file():
        raise ValueError(f"{file}: is missing; a folder of programs has one")
    try:
        if (size := file.stat().st_size) > MAX_PLAN_BYTES:
            raise ValueError(f"{size} bytes")
        plan = json.loads(file.read_text())
        assert (
            isinstance(plan, dict)
            and isinstance(plan["form"], str)
            and isinstance(plan["files"], dict)
        )
        assert all(_is_valid_entry(name, entry) for name, entry in plan["files"].items()), "files"
        seal = plan.pop(SEAL)
    except (ValueError, KeyError, AssertionError, RecursionError) as error:
        raise ValueError(f"{file}: is damaged or of another version of jmoe: {error!r}") from error
    if seal != _plan_checksum(plan):
        raise ValueError(f"{file}: is damaged: its SHA-256 is not the one that it says")
    return plan


def _is_valid_entry(name: str, entry: Any) -> bool:
    """Return whether a plan's entry is valid: a path inside the folder, with its bytes and
    SHA-256.
    """
    inside = not Path(name).is_absolute() and ".." not in Path(name).parts
    kinds = isinstance(entry, dict) and {key: type(value) for key, value in entry.items()}
    return inside and kinds == {"bytes": int, "sha256": str}


def plan_json_text(plan: Mapping[str, Any]) -> str:
    """Return the text of `plan.json`, which lists a program folder's files and needs, with a
    checksum of its other fields.
    """
    return json.dumps({**plan, SEAL: _plan_checksum(plan)}, indent=2) + "\n"


def _plan_checksum(plan: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def file_sizes_and_hashes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return {path: {"bytes", "sha256"}} of all files in a folder and its subfolders."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": _file_sha256(path),
        }
        for path in files
    }


def check_files(
    folder: Path, files: Mapping[str, Mapping[str, Any]], *, contents: bool = True
) -> None:
    """Raise ValueError naming the first file that is missing, has another size or, with `contents`,
    another checksum.
    """
    for name, expected in files.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{file}: is missing; {PLAN} lists it")
        if (size := file.stat().st_size) != expected["bytes"]:
            raise ValueError(
                f"{file}: is damaged: has {size} bytes, {PLAN} says {expected['bytes']}"
            )
    for name, expected in files.items():
        if contents and _file_sha256(folder / name) != expected["sha256"]:
            raise ValueError(f"{folder / name}: is damaged: its SHA-256 is not the one in {PLAN}")


def _file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_versions(folder: Path, plan: Mapping[str, Any]) -> None:
    """Raise ValueError unless this JAX can run the programs on its default platform."""
    written = plan["jax"]
    version = written["calling_convention"]
    oldest = jax.export.minimum_supported_calling_convention_version
    newest = jax.export.maximum_supported_calling_convention_version
    if not oldest <= version <= newest:
        which = (
            f"{'a newer' if version > newest else 'an older'} JAX, such as the {written['version']}"
            " that wrote them"
        )
        raise ValueError(
            f"{folder / PLAN}: the programs have calling convention {version} of jax.export, and"
            f" JAX {jax.__version__} reads {oldest} to {newest}: they need {which}"
        )
    backend = jax.default_backend()
    platform = "cuda" if backend == "gpu" else backend
    if platform not in plan["platforms"]:
        raise ValueError(
            f"{folder / PLAN}: the programs run on {', '.join(plan['platforms'])}, JAX has"
            f" {platform} here"
        )


def _read_tensors(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) of each tensor in a safetensors file; an array is read when it is
    yielded. Raises ValueError naming the file, and the tensor whose entry is wrong.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(length, size)))
        header.pop("__metadata__", None)
        entries = list(header.items())
    except (ValueError, AttributeError, struct.error) as error:
        raise ValueError(f"{file}: is damaged: its header is none: {error}") from error
    for name, entry in entries:
        try:
            first, last = entry["data_offsets"]
            flat = np.fromfile(file, np.uint8, last - first, offset=8 + length + first)
            array = flat.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: tensor {name}: is damaged: {error!r}") from error
        yield name, array


def _check_programs(folder: Path, plan: Mapping[str, Any]) -> None:
    """Raise ValueError unless each program is one of the plan's files and takes what `generate`
    gives it.
    """
    wanted = {"decode": (plan["max_batch"], 1), "prefill": (1, plan["prefill_tokens"])}
    for name, shape in wanted.items():
        program = plan["programs"][name]
        if program["file"] not in plan["files"]:
            raise ValueError(
                f"{folder / PLAN}: programs.{name}.file = {program['file']!r}: must be one of the"
                " files that the plan lists"
            )
        if (program["rows"], program["width"]) != shape:
            raise ValueError(
                f"{folder / PLAN}: programs.{name}: takes {program['rows']} x {program['width']}"
                f" tokens, must take {shape[0]} x {shape[1]}"
            )


class PortableModel:
    """The programs and weights of a folder, loaded onto the first device."""

    def __init__(self, folder: str | Path, *, check_contents: bool = True) -> None:
        """Load the folder and compile its programs.

        check_contents: verify every file's checksum, not only its size. Raises ValueError naming a
        missing or damaged file, or the JAX version that the programs need.
        """
        folder = Path(folder)
        self.plan = plan = read_plan(folder)
        if plan["form"] != PORTABLE:
            raise ValueError(f"{folder / PLAN}: form = {plan['form']!r}: must be {PORTABLE!r}")
        try:
            _check_versions(folder, plan)
            check_files(folder, plan["files"], contents=check_contents)
            _check_programs(folder, plan)
            self._load(folder)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{folder / PLAN}: is damaged or of another version of jmoe: {error!r}"
            ) from error

    def _load(self, folder: Path) -> None:
        """Read the weights and compile the programs of the checked plan."""
        plan = self.plan
        self._weights = {
            name: jnp.array(array)
            for file in plan["files"]
            if file.endswith(".safetensors")
            for name, array in _read_tensors(folder / file)
        }
        shapes = [[tuple(shape) for shape in layer] for layer in plan["caches"]]
        self._caches = [
            tuple(jnp.zeros(shape, plan["cache_dtype"]) for shape in layer) for layer in shapes
        ]
        self.max_batch: int = plan["max_batch"]
        num_blocks, _, block_tokens, _ = shapes[0][0]
        # S, the position of padding tokens
        self._padding = num_blocks * block_tokens // self.max_batch
        self._programs = {name: self._load_and_compile(folder, name) for name in plan["programs"]}
        self.max_seq_len: int = plan["max_seq_len"]

    def _load_and_compile(self, folder: Path, name: str) -> Any:
        """Return a program, compiled.

        The folder stores StableHLO, since `Exported.serialize` would need another package. The
        other fields of `Exported` come from exporting a function with the same arguments and
        results.
        """
        entry, plan = self.plan["programs"][name], self.plan
        file, num_rows = folder / entry["file"], entry["rows"]
        whole, row = (
            jax.ShapeDtypeStruct(shape, jnp.int32)
            for shape in ((num_rows, entry["width"]), (num_rows,))
        )
        arguments = (self._weights, self._caches, whole, row, whole, row)

        def placeholder_step(weights: Any, caches: Any, *_: Any) -> Any:
            return jnp.zeros((num_rows, plan["vocab_size"]), jnp.float32), caches

        try:
            exported = dataclasses.replace(
                jax.export.export(jax.jit(placeholder_step), platforms=plan["platforms"])(
                    *arguments
                ),
                fun_name=name,
                mlir_module_serialized=file.read_bytes(),
                calling_convention_version=plan["jax"]["calling_convention"],
                module_kept_var_idx=tuple(entry["kept_arguments"]),
                uses_global_constants=entry["uses_global_constants"],
            )
            return jax.jit(exported.call, donate_argnums=1).lower(*arguments).compile()
        except Exception as error:
            written = plan["jax"]["version"]
            raise ValueError(
                f"{file}: JAX {jax.__version__} cannot take it, JAX {written} wrote it:"
                f" {str(error).partition(chr(10))[0]}"
            ) from error

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 16
    ) -> list[list[int]]:
        """Return the greedy continuation of each prompt: at most `max_new_tokens` tokens, up to an
        end token or `max_seq_len`.

        Raises ValueError for max_new_tokens < 1 and for a prompt that is empty, too long, or has
        tokens outside the vocabulary; FloatingPointError if logits are not finite.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {max_new_tokens}: must be at least 1")
        for number, prompt in enumerate(prompts):
            if not 0 < len(prompt) < self.max_seq_len:
                raise ValueError(
                    f"prompt {number}: has {len(prompt)} tokens: must have 1 to"
                    f" {self.max_seq_len - 1}"
                )
            outside = [token for token in prompt if not 0 <= token < self.plan["vocab_size"]]
            if outside:
                raise ValueError(
                    f"prompt {number}: token {outside[0]} must be below {self.plan['vocab_size']}"
                )
        answers: list[list[int]] = []
        for first in range(0, len(prompts), self.max_batch):
            answers += self._generate_batch(prompts[first : first + self.max_batch], max_new_tokens)
        return answers

    def logits(
        self, tokens_PC: np.ndarray, rows_P: np.ndarray, positions_PC: np.ndarray, at_P: np.ndarray
    ) -> Any:
        """Return float32 logits [P, V] after token `at_P` of each row, and write keys and values
        into the cache.

        Shapes must be those of the decode program, [max_batch, 1], or of the prefill program, [1,
        prefill_tokens]. Tokens at position S are padding.
        """
        name = "decode" if tokens_PC.shape[1] == 1 and len(rows_P) == self.max_batch else "prefill"
        logits_PV, self._caches = self._programs[name](
            self._weights, self._caches, tokens_PC, rows_P, positions_PC, at_P
        )
        return logits_PV

    def _generate_batch(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> list[list[int]]:
        """Return the answers to at most `max_batch` prompts, one per cache row."""
        answers = [
            [self._prefill_and_pick_token(row, prompt)] for row, prompt in enumerate(prompts)
        ]
        tokens_P1, ends = np.zeros((self.max_batch, 1), np.int32), set(self.plan["eos_token_ids"])
        rows_P, at_P = np.arange(self.max_batch, dtype=np.int32), np.zeros(self.max_batch, np.int32)
        while True:
            positions_P1 = np.full((self.max_batch, 1), self._padding, np.int32)
            for row, (prompt, answer) in enumerate(zip(prompts, answers)):
                length = len(prompt) + len(answer)
                if (
                    answer[-1] not in ends
                    and len(answer) < max_new_tokens
                    and length < self.max_seq_len
                ):
                    tokens_P1[row], positions_P1[row] = answer[-1], length - 1
            running = np.flatnonzero(positions_P1[:, 0] != self._padding)
            if not running.size:
                return answers
            drawn_P = _most_likely_tokens(
                self.logits(tokens_P1, rows_P, positions_P1, at_P), running
            )
            for row in running.tolist():
                answers[row].append(int(drawn_P[row]))

    def _prefill_and_pick_token(self, row: int, prompt: Sequence[int]) -> int:
        """Write a prompt's keys and values into a cache row and return the first token after the
        prompt.
        """
        width, logits_1V = self.plan["prefill_tokens"], None
        for start in range(0, len(prompt), width):
            chunk = prompt[start : start + width]
            tokens_1C = np.zeros((1, width), np.int32)
            positions_1C = np.full((1, width), self._padding, np.int32)
            tokens_1C[0, : len(chunk)] = chunk
            positions_1C[0, : len(chunk)] = np.arange(start, start + len(chunk))
            logits_1V = self.logits(
                tokens_1C,
                np.array([row], np.int32),
                positions_1C,
                np.array([len(chunk) - 1], np.int32),
            )
        return int(_most_likely_tokens(logits_1V, np.zeros(1, np.int32))[0])


def _most_likely_tokens(logits_PV: Any, checked_rows: np.ndarray) -> np.ndarray:
    values_PV = np.asarray(logits_PV)
    if not math.isfinite(values_PV[checked_rows].sum()):
        raise FloatingPointError("the model's logits are not finite, so no token can be chosen")
    return values_PV.argmax(axis=-1)


def _open_tokenizer(folder: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError(
            "--prompt: needs the package tokenizers; --tokens takes token ids without it"
        ) from error
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"--prompt: needs {file}, which is missing; --tokens takes token ids without it"
        )
    return Tokenizer.from_file(str(file))


def main(folder: Path, arguments: list[str]) -> None:
    """Print the answer to a prompt: token ids, or text for text."""
    parser = argparse.ArgumentParser(
        description="Continue a prompt with the model in this folder, by greedy decoding."
    )
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument(
        "--tokens", help="token ids with commas between; the answer is printed so, too"
    )
    either.add_argument("--prompt", help="text; needs the package tokenizers")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument(
        "--skip-checksums", action="store_true", help="compare the files' sizes alone"
    )
    options = parser.parse_args(arguments)
    tokenizer = None if options.prompt is None else _open_tokenizer(folder)
    try:
        tokens = (
            [int(t) for t in options.tokens.split(",")]
            if tokenizer is None
            else tokenizer.encode(options.prompt).ids
        )
    except ValueError as error:
        raise ValueError(
            f"--tokens = {options.tokens!r}: must be integers with commas between"
        ) from error
    model = PortableModel(folder, check_contents=not options.skip_checksums)
    (answer,) = model.generate([tokens], options.max_new_tokens)
    print(",".join(map(str, answer)) if tokenizer is None else tokenizer.decode(answer), flush=True)


if __name__ == "__main__":
    try:
        main(Path(__file__).resolve().parent, sys.argv[1:])
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"run: {error}")
