"""Write a model as programs that need only JAX: python -m jmoe.deploy.lower MODEL --out FOLDER.

FOLDER gets a prefill and a decode program (StableHLO from `jax.export`, for CPUs and CUDA), their
weights, the tokenizer, and run.py, which generates tokens with JAX and numpy alone. Both programs
are plain XLA without jmoe's kernels, so that they compile on any machine.

Legend: P rows of a step, W blocks of a row of the cache, C tokens per row, V vocabulary, E experts
of a layer.
"""

import argparse
import contextlib
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import flax.nnx as nnx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jmoe.config import check
from jmoe.config.engine import EngineConfig
from jmoe.deploy import portable
from jmoe.deploy.cut import check_empty_or_new, copy_files_beside_weights, creating_folder
from jmoe.deploy.model_folder import hugging_face_folder
from jmoe.inference.cached_layers import CachePlaces, Hidden, attend_and_route_local, embed_local
from jmoe.inference.kv_cache import KVCache, LayerCache, empty_caches
from jmoe.layers.slot_experts import ExpertInputs, UnchosenInputs, add_expert_outputs_by_slot_table
from jmoe.mesh import path_names
from jmoe.models.functional import ModuleStructure, split_arrays
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.models.pretrained import MAX_SHARD_BYTES
from jmoe.models.safetensors_io import NewTensor, replace_text_durably, write_safetensors
from jmoe.models.tokenizer_file import TOKENIZER, open_tokenizer
from jmoe.runtime import end_at_once_on_interrupt
from jmoe.status import status
from jmoe.types import JsonObject
from kernels_pallas.formats import EXPERT_DTYPES

PLATFORMS = ("cpu", "cuda")
PREFILL_TOKENS = 128  # tokens of a prompt per call of the prefill program
TILE_ROWS = 64  # rows of one expert per iteration
RUNNER = "run.py"
Weights = Mapping[str, jax.Array]


class _NamedModule(NamedTuple):
    """A module's structure, and the names of its arrays among the weights."""

    structure: ModuleStructure
    names: tuple[str, ...]

    def select_arrays(self, weights: Weights) -> tuple[jax.Array, ...]:
        return tuple(weights[name] for name in self.names)


class _PortableLayer(NamedTuple):
    """A layer's block, its experts' array names by field (empty for a dense layer), and its
    attention window.
    """

    block: _NamedModule
    experts: dict[str, str]
    window: np.int32 | None


@partial(jax.jit, static_argnums=(0, 1))
def _apply_layer(
    structure: ModuleStructure,
    activation: str,
    arrays: tuple[jax.Array, ...],
    experts: Weights,
    cache: LayerCache,
    hidden: Hidden,
    places: CachePlaces,
) -> tuple[LayerCache, Hidden]:
    """Run one layer; return its cache with this step's keys and values, and its output.

    It is jitted so that equal layers share one function of the program.
    """
    places = places._replace(implementation="xla")
    x_PCD, cache, y = attend_and_route_local(structure, arrays, cache, hidden, places)
    if isinstance(y, ExpertInputs):
        table_E = jnp.arange(experts["w_up"].shape[0], dtype=jnp.int32)
        tile_rows = min(TILE_ROWS, y.h_TD.shape[0])
        y = add_expert_outputs_by_slot_table(
            y, experts, table_E, activation=activation, tile_rows=tile_rows, implementation="xla"
        )
    assert not isinstance(y, UnchosenInputs), "experts are chosen, by default"
    return cache, Hidden(x_PCD, y)


class PortablePrograms:
    """The programs of a checkpoint, and their weights by name."""

    def __init__(self, checkpoint: LazyCheckpoint) -> None:
        """Read the dense weights."""
        self.checkpoint, self.config = checkpoint, checkpoint.config
        embed_and_head, blocks = checkpoint.load_dense_modules()
        self._dense: dict[str, jax.Array] = {}
        self._embed_and_head = self._register_module("ends", embed_and_head)
        self._layers = []
        for i, (block, layer) in enumerate(zip(blocks, self.config.layers, strict=True)):
            fields = checkpoint.expert_fields if layer.has_experts else ()
            experts = {name: f"layers.{i}.experts.{name}" for name in fields}
            window = None if layer.window is None else np.int32(layer.window)
            self._layers.append(
                _PortableLayer(self._register_module(f"layers.{i}", block), experts, window)
            )

    def _register_module(self, prefix: str, module: nnx.Module) -> _NamedModule:
        structure, arrays = split_arrays(module)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(nnx.split(module)[1])]
        names = tuple(".".join((prefix, *path_names(path))) for path in paths)
        self._dense |= zip(names, arrays, strict=True)
        assert len(set(names)) == len(arrays)
        return _NamedModule(structure, names)

    def weight_tensors(self) -> list[NewTensor]:
        """Return all weights. Experts are read one layer at a time, when they are written."""
        tensors = [
            NewTensor(name, np.dtype(array.dtype), array.shape, partial(np.asarray, array))
            for name, array in self._dense.items()
        ]
        count, read = self.config.num_experts, _ExpertReader(self.checkpoint)
        for moe_layer, layer in enumerate(layer for layer in self._layers if layer.experts):
            for field, (shape, dtype) in self.checkpoint.expert_fields.items():
                data = partial(read, moe_layer, field)
                tensors.append(NewTensor(layer.experts[field], dtype, (count, *shape), data))
        return tensors

    def run_step(
        self,
        table_width: int,
        weights: Weights,
        caches: list[tuple[jax.Array, ...]],
        tokens_PC: jax.Array,
        rows_P: jax.Array,
        positions_PC: jax.Array,
        at_P: jax.Array,
    ) -> tuple[jax.Array, list[tuple[jax.Array, ...]]]:
        """Return (float32 logits [P, V] after token `at_P` of each row, the caches with this step's
        keys and values).

        table_width: blocks of a row of the caches, which lie one after the other.
        """
        blocks_PW = rows_P[:, None] * table_width + jnp.arange(table_width, dtype=jnp.int32)
        embed_and_head, written = self._embed_and_head.select_arrays(weights), []
        hidden = embed_local(
            self._embed_and_head.structure,
            embed_and_head,
            tokens_PC,
            positions_PC,
            self.checkpoint.dtype,
        )
        for layer, cache in zip(self._layers, caches, strict=True):
            experts = {field: weights[name] for field, name in layer.experts.items()}
            places = CachePlaces(blocks_PW, positions_PC, layer.window)
            static = (layer.block.structure, self.config.hidden_act)
            new, hidden = _apply_layer(
                *static,
                layer.block.select_arrays(weights),
                experts,
                KVCache(*cache),
                hidden,
                places,
            )
            written.append(tuple(jax.tree.leaves(new)))
        x_PD = hidden.sum()[jnp.arange(at_P.shape[0]), at_P]
        return self._embed_and_head.structure.merge(embed_and_head).logits(x_PD), written

    def cache_shapes(self, options: EngineConfig) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
        """Return shapes and dtypes of each layer's cache: keys and values, or latents alone."""
        sizes = options.num_cache_blocks(), self.checkpoint.dtype
        make = partial(empty_caches, self.config, *sizes, num_rows=options.max_batch)
        return [tuple(jax.tree.leaves(cache)) for cache in jax.eval_shape(make)]

    def export_step(
        self, options: EngineConfig, num_rows: int, width: int, platforms: Sequence[str]
    ) -> jax.export.Exported:
        """Return the exported program for `num_rows` rows of `width` tokens. Nothing is
        compiled.
        """
        weights = {
            tensor.name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
            for tensor in self.weight_tensors()
        }
        whole, row = (
            jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((num_rows, width), (num_rows,))
        )
        run_step = partial(self.run_step, options.num_cache_blocks() // options.max_batch)
        program = jax.export.export(jax.jit(run_step, donate_argnums=1), platforms=platforms)
        return program(weights, self.cache_shapes(options), whole, row, whole, row)


class _ExpertReader:
    """Returns one field of all experts of a layer, and keeps the arrays of the layer read last."""

    def __init__(self, checkpoint: LazyCheckpoint) -> None:
        self._checkpoint, self._layer = checkpoint, -1
        self._arrays: dict[str, np.ndarray] = {}

    def __call__(self, moe_layer: int, field: str) -> np.ndarray:
        if moe_layer != self._layer:
            count, fields = self._checkpoint.config.num_experts, self._checkpoint.expert_fields
            self._arrays = {
                name: np.empty((count, *shape), dtype) for name, (shape, dtype) in fields.items()
            }
            for expert in range(count):
                views = {name: array[expert, ...] for name, array in self._arrays.items()}
                self._checkpoint.fill_expert(moe_layer, expert, views)
            self._layer = moe_layer
        return self._arrays[field]


def lower(
    folder: Path,
    out: Path,
    options: EngineConfig,
    say: Callable[[str], None],
    platforms: Sequence[str] = PLATFORMS,
) -> None:
    """Write the portable form of the model in a Hugging Face folder.

    options: rows and positions of the cache, tokens of a prefill chunk, and dtypes. Raises
    ValueError naming the option, before anything is written.
    """
    check_empty_or_new(out)
    for platform in platforms:
        check(platform in PLATFORMS, "platforms", platform, f"must be of {', '.join(PLATFORMS)}")
    with LazyCheckpoint(folder, options.dtype, options.expert_dtype) as checkpoint:
        checkpoint.config.check_no_linear_attention("lowering")
        options = replace(
            options, max_seq_len=checkpoint.choose_sequence_length(options.max_seq_len)
        )
        assert options.max_seq_len is not None
        checkpoint.config.check_one_attention_chunk("max_seq_len", options.max_seq_len, "lowering")
        checkpoint.fix_sequence_length(options.max_seq_len)
        width = min(options.prefill_chunk_tokens, options.max_seq_len)
        with status(f"reading {folder}", say):
            programs = PortablePrograms(checkpoint)
        with creating_folder(out) as partly:
            entries = {}
            for name, shape in (("prefill", (1, width)), ("decode", (options.max_batch, 1))):
                with status(f"lowering {name}", say):
                    program = programs.export_step(options, *shape, platforms)
                entries[name] = _write_program(partly, name, shape, program)
            with status("writing the weights", say):
                write_safetensors(partly, programs.weight_tensors(), MAX_SHARD_BYTES)
            copy_files_beside_weights(folder, partly)
            if (folder / TOKENIZER).is_file():  # with the fixes of `open_tokenizer`
                open_tokenizer(folder / TOKENIZER).save(str(partly / TOKENIZER))
            shutil.copyfile(portable.__file__, partly / RUNNER)
            plan = {
                **_plan_settings(programs, options, platforms, program.calling_convention_version),
                "programs": entries,
                "files": portable.file_sizes_and_hashes(partly),
            }
            replace_text_durably(partly / portable.PLAN, portable.plan_json_text(plan))


def _write_program(
    folder: Path, name: str, shape: tuple[int, int], program: jax.export.Exported
) -> JsonObject:
    """Write an exported program into the folder; return its entry in the plan."""
    file = f"{name}.stablehlo"
    (folder / file).write_bytes(program.mlir_module_serialized)
    return {
        "file": file,
        "rows": shape[0],
        "width": shape[1],
        "kept_arguments": program.module_kept_var_idx,
        "uses_global_constants": program.uses_global_constants,
    }


def _plan_settings(
    programs: PortablePrograms,
    options: EngineConfig,
    platforms: Sequence[str],
    calling_convention: int,
) -> JsonObject:
    """Return the fields of plan.json except `programs` and `files`."""
    assert options.max_seq_len is not None
    checkpoint, caches = programs.checkpoint, programs.cache_shapes(options)
    return {
        "form": portable.PORTABLE,
        "jax": {"version": jax.__version__, "calling_convention": calling_convention},
        "platforms": platforms,
        "max_batch": options.max_batch,
        "max_seq_len": options.max_seq_len,
        "prefill_tokens": min(options.prefill_chunk_tokens, options.max_seq_len),
        "vocab_size": checkpoint.config.vocab_size,
        "eos_token_ids": checkpoint.eos_token_ids,
        "caches": [[x.shape for x in layer] for layer in caches],
        "cache_dtype": caches[0][0].dtype.name,
    }


def main(arguments: list[str]) -> None:
    """Write the portable form of the model that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m jmoe.deploy.lower",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a Hugging Face folder, or the output folder of a run"
    )
    parser.add_argument(
        "--out", required=True, type=Path, help="where the programs are written: no files yet"
    )
    parser.add_argument("--max-batch", type=int, default=8, help="sequences that run at once")
    parser.add_argument(
        "--max-seq-len", type=int, help="tokens of one; default: 2048, or the model's positions"
    )
    parser.add_argument(
        "--prefill-chunk-tokens", type=int, default=PREFILL_TOKENS, help="of a prompt at once"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of weights and computation; default: as stored",
    )
    parser.add_argument(
        "--expert-dtype",
        choices=EXPERT_DTYPES,
        help="default: as stored",
    )
    parser.add_argument(
        "--platforms", nargs="+", choices=PLATFORMS, default=PLATFORMS, help="default: all"
    )
    options = vars(parser.parse_args(arguments))
    model, out, platforms = options.pop("model"), options.pop("out"), options.pop("platforms")
    say = partial(print, flush=True)
    check_empty_or_new(out)
    engine = EngineConfig(native="off", **options)
    with contextlib.ExitStack() as stack:
        lower(
            stack.enter_context(hugging_face_folder(model, say, "MODEL")),
            out,
            engine,
            say,
            platforms,
        )
    say(f"python {out / RUNNER} --tokens 1,2,3 runs it with JAX and numpy alone")


if __name__ == "__main__":
    end_at_once_on_interrupt()
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"lower: {error}")
