"""Hugging Face folders as other programs write them: their tensors read, changed and written
again, in NumPy alone.
"""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jmoe.models.safetensors_io import DTYPES, NewTensor, read_headers, write_safetensors

Tensors = dict[str, np.ndarray]
# Published names of a gate's, up and down projection; after `.experts.N.`.
EXPERT_NAMES = dict.fromkeys(("mixtral", "minimax_m2", "phimoe"), ("w1", "w3", "w2"))


def read_tensors(folder: Path) -> Tensors:
    """Return {name: array} of a folder's files."""
    arrays = {}
    for tensor in read_headers(folder).values():
        dtype = DTYPES[tensor.dtype]
        count = int(np.prod(tensor.shape))
        raw = np.fromfile(tensor.file, np.uint8, count * dtype.itemsize, offset=tensor.offset)
        arrays[tensor.name] = raw.view(dtype).reshape(tensor.shape)
    return arrays


def write_variant(
    source: Path,
    folder: Path,
    change: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    **fields: Any,
) -> Path:
    """Write a folder with changed tensors and fields of `config.json`; a field of value `...` is
    left out.
    """
    folder.mkdir()
    for file in source.iterdir():
        if file.name.endswith(".json") and not file.name.endswith(".index.json"):
            shutil.copy(file, folder)
    described = json.loads((source / "config.json").read_text()) | fields
    described = {name: value for name, value in described.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(described))
    made = change(read_tensors(source))
    tensors = [
        NewTensor(name, array.dtype, array.shape, partial(np.asarray, array))
        for name, array in made.items()
    ]
    write_safetensors(folder, tensors, 1 << 30)
    return folder


def fused(tensors: Tensors, family: str) -> Tensors:
    """Return the tensors as transformers 5 writes them where it keeps its own names: all experts
    of a layer in one, and the scales of FP8 experts in another.
    """
    if family == "granitemoe":
        return {_granite_name_in_memory(name): array for name, array in tensors.items()}
    gate, up, down = EXPERT_NAMES.get(family, ("gate_proj", "up_proj", "down_proj"))
    made = {name: array for name, array in tensors.items() if ".experts." not in name}
    expert = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight(_scale_inv)?")
    found = [match for name in tensors if (match := expert.fullmatch(name))]
    for layer, ending in sorted({(match[1], match[4] or "") for match in found}):
        numbers = sorted({int(match[2]) for match in found if match[1] == layer})
        of = {
            kind: np.stack([tensors[f"{layer}.{n}.{kind}.weight{ending}"] for n in numbers])
            for kind in (gate, up, down)
        }
        made[f"{layer}.gate_up_proj{ending}"] = np.concatenate([of[gate], of[up]], axis=1)
        made[f"{layer}.down_proj{ending}"] = of[down]
    in_memory = {".block_sparse_moe.": ".mlp.", ".mlp.moe_statics.": ".mlp.gate.moe_statics."}
    if family == "phimoe":
        in_memory |= {".gate.weight": ".router.weight"}
    for stored, held in in_memory.items():
        made = {name.replace(stored, held): array for name, array in made.items()}
    return made


def _granite_name_in_memory(name: str) -> str:
    for stored, held in (
        (".input_linear.weight", ".experts.gate_up_proj"),
        (".output_linear.weight", ".experts.down_proj"),
        (".router.layer.", ".router."),
    ):
        name = name.replace(stored, held)
    return name


def with_head(tensors: Tensors, seed: int = 5) -> Tensors:
    """Return the tensors with a head that differs from the embedding."""
    embedding = tensors["model.embed_tokens.weight"]
    head = np.random.default_rng(seed).normal(0, 0.2, embedding.shape).astype(embedding.dtype)
    return tensors | {"lm_head.weight": head}
