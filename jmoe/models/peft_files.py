"""Read and write adapters as PEFT does: `adapter_config.json` and `adapter_model.safetensors`.

The names are those of PEFT on a model of transformers 5, in which a layer's experts are two
parameters [E, ...] of one module. PEFT wraps such a parameter, and a second one of the same module
around the first, so that the adapter of `gate_up_proj` lies below `base_layer`. A linear layer's A
is stored as [r, I] and its B as [O, r]; those of experts as [E r, I] and [O, r E], where E varies
slowest in A and fastest in B.

Legend: N layers of a kind, E experts, P tensors of a weight, I inputs, O outputs, r rank.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import NoneType

import numpy as np

from jmoe.config import LORA_TARGETS, LoraConfig, ModelConfig, check
from jmoe.memory.direct_io import name_file_in_errors
from jmoe.models.lora import (
    adapted_parameters,
    adapter_shapes,
    get_at_path,
    lora_target_of,
    set_at_path,
)
from jmoe.models.pretrained import read_json_object
from jmoe.models.safetensors_io import (
    DTYPES,
    NewTensor,
    StoredTensor,
    TensorReader,
    read_header,
    replace_text_durably,
    write_safetensors_file,
)
from jmoe.models.weights import Parameter
from jmoe.types import JsonObject, PyTree

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# options of PEFT that change what an adapter computes, with the values that mean the same here
PLAIN: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    # others (pissa, olora, corda, loftq) change the weights that the adapter is added to
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "kasa_config": (None,),
    "velora_config": (None,),
}


@dataclass(frozen=True)
class AdapterFolder:
    """The content of an adapter's folder. adapters: see `jmoe.models.lora.initial_adapters`, as
    float32 NumPy arrays.
    """

    lora: LoraConfig
    parameters: Sequence[Parameter]
    adapters: PyTree


@dataclass(frozen=True)
class AdapterHeader:
    """An adapter's options, and its tensors without their values.

    parameters: those of the parts of a layer of which the file has tensors.
    """

    lora: LoraConfig
    parameters: Sequence[Parameter]
    stored: Mapping[str, StoredTensor]

    def count_tensors(self, parameter: Parameter) -> int:
        """Return how many of the tensors that fill the parameter's columns have an adapter."""
        return len(
            {
                p.number
                for p in _peft_tensor_pairs(parameter)
                if not self.stored.keys().isdisjoint(p.names)
            }
        )


@dataclass(frozen=True)
class _PeftTensorPair:
    """The two PEFT tensors of one Hugging Face tensor, and their place in the parameter's adapter.

    number: the place of the Hugging Face tensor in the parameter's columns.
    """

    name: str
    layer: int
    number: int
    columns: tuple[int, int]

    @property
    def names(self) -> tuple[str, str]:
        """The names of A and B in the file."""
        return f"{self.name}.lora_A.weight", f"{self.name}.lora_B.weight"


def _peft_tensor_pairs(parameter: Parameter) -> Iterator[_PeftTensorPair]:
    spans = parameter.source.column_spans(parameter.shape[-1])
    for entry, layer in enumerate(parameter.layers):
        for number, (name, span) in enumerate(zip(parameter.source.names, spans, strict=True)):
            module = name.format(layer=layer).removesuffix(".weight")
            if parameter.experts:
                module, _, matrix = module.rpartition(".")
                module += ".base_layer" * (matrix == "gate_up_proj")
            yield _PeftTensorPair(f"{PREFIX}{module}", entry, number, span)


def _stored_column_order(parameter: Parameter) -> np.ndarray:
    """Return the column of the parameter at each output of the stored tensor: its columns
    alternate between the parameter's halves if it is interleaved.
    """
    columns = np.arange(parameter.shape[-1])
    return columns.reshape(2, -1).T.reshape(-1) if parameter.source.interleaved else columns


def write_adapter_folder(
    folder: Path, parameters: Sequence[Parameter], adapters: PyTree, lora: LoraConfig, base: str
) -> None:
    """Write adapters as a new folder that PEFT loads onto the model `base`.

    adapters: nested dictionaries of arrays that this process holds whole.
    """
    tensors = []
    for parameter in parameters:
        own = {name: np.asarray(x) for name, x in get_at_path(adapters, parameter.path).items()}
        for piece in _peft_tensor_pairs(parameter):
            a, b = own["a"][piece.layer], own["b"][piece.layer]
            low, high = piece.columns
            a, b = a[..., piece.number, :, :], b[..., low:high]
            if parameter.source.interleaved:
                b = b[..., _stored_column_order(parameter)]
            a, b = (_expert_a_to_peft(a), _expert_b_to_peft(b)) if parameter.experts else (a.T, b.T)
            for name, x in zip(piece.names, (a, b), strict=True):
                tensors.append(NewTensor(name, x.dtype, x.shape, partial(np.asarray, x)))
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors_file(folder / WEIGHTS, sorted(tensors, key=lambda t: t.name))
    text = json.dumps(adapter_config(parameters, lora, base), indent=2) + "\n"
    replace_text_durably(folder / CONFIG, text)


def _expert_a_to_peft(a: np.ndarray) -> np.ndarray:
    """Return [E r, I] of an expert layer's A [E, I, r]."""
    return np.ascontiguousarray(a.transpose(0, 2, 1)).reshape(-1, a.shape[1])


def _expert_b_to_peft(b: np.ndarray) -> np.ndarray:
    """Return [O, r E] of an expert layer's B [E, r, O]."""
    return np.ascontiguousarray(b.transpose(2, 1, 0)).reshape(b.shape[2], -1)


def adapter_config(parameters: Sequence[Parameter], lora: LoraConfig, base: str) -> JsonObject:
    """Return the `adapter_config.json` of these parameters' adapters.

    Only attention is named as modules. The others are named as parameters, because PEFT takes a
    module `gate_proj` of a family with experts for these experts.
    """
    modules, weights = set[str](), set[str]()
    for parameter in parameters:
        for name in parameter.source.names:
            inside = name.partition("{layer}.")[2]
            if lora_target_of(parameter.path) == "attention":
                modules.add(inside.removesuffix(".weight"))
            else:
                weights.add(inside)
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "bias": "none",
        "target_modules": sorted(modules),
        "target_parameters": sorted(weights) or None,
        "inference_mode": True,
    }


def read_adapter_folder(folder: Path, config: ModelConfig, family: str) -> AdapterFolder:
    """Return the adapters in a folder that PEFT or `write_adapter_folder` wrote for this model.

    Raises ValueError naming the file and the option that is not supported, or the tensor that is
    missing, unexpected or of another shape, as in an adapter of another model.
    """
    header = read_adapter_header(folder, config, family)
    return AdapterFolder(header.lora, header.parameters, _read_adapters(folder, header))


def read_adapter_header(folder: Path, config: ModelConfig, family: str) -> AdapterHeader:
    """Return the header of an adapter's folder; reads no values.

    Raises ValueError naming the file and the option that is not supported, or if no tensor fits the
    model.
    """
    file = folder / CONFIG
    check(file.is_file(), "adapter", str(folder), f"must be a folder with {CONFIG}")
    fields = read_json_object(file)
    kind = fields.get("peft_type")
    check(kind == "LORA", f"{file}: peft_type", kind, "must be LORA")
    for name, values in PLAIN.items():
        if name in fields:
            allowed = f"is not supported, only {values[0]!r}"
            check(fields[name] in values, f"{file}: {name}", fields[name], allowed)
    with name_file_in_errors(folder / WEIGHTS):
        stored = read_header(folder / WEIGHTS)
    targets = _stored_targets(stored, config, family)
    check(
        bool(targets),
        f"{folder / WEIGHTS}: tensors",
        sorted(stored)[:1],
        "fit no part of the model",
    )
    lora = _read_options(file, fields, targets)
    return AdapterHeader(lora, adapted_parameters(config, family, targets), stored)


def _read_options(file: Path, fields: JsonObject, targets: tuple[str, ...]) -> LoraConfig:
    """Return the rank and scale of an `adapter_config.json`. Raises ValueError naming the field."""
    rank, alpha, rslora = fields.get("r"), fields.get("lora_alpha"), fields.get("use_rslora")
    check(type(rank) is int, f"{file}: r", rank, "must be a whole number")
    known = isinstance(rslora, bool | NoneType)
    check(known, f"{file}: use_rslora", rslora, "must be true or false")
    if not isinstance(alpha, int | float):
        raise ValueError(f"{file}: lora_alpha = {alpha!r}: must be a number")
    return LoraConfig(rank, float(alpha), bool(rslora), targets)


def _stored_targets(
    stored: Mapping[str, StoredTensor], config: ModelConfig, family: str
) -> tuple[str, ...]:
    """Return the parts of a layer of which the file has tensors."""
    names = {name.rpartition(".lora_")[0] for name in stored}
    parameters = adapted_parameters(config, family, LORA_TARGETS)
    stored_parts = {
        lora_target_of(p.path)
        for p in parameters
        if names & {piece.name for piece in _peft_tensor_pairs(p)}
    }
    return tuple(name for name in LORA_TARGETS if name in stored_parts)


def _read_adapters(folder: Path, header: AdapterHeader) -> PyTree:
    """Return all adapters of a file. Projections of a part that the file lacks have B = 0."""
    tree: dict[str, PyTree] = {}
    used: set[str] = set()
    stored, rank = header.stored, header.lora.rank
    assert rank is not None
    with TensorReader() as reader:
        for parameter in header.parameters:
            shapes = adapter_shapes(parameter, rank)
            own = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
            for piece in _peft_tensor_pairs(parameter):
                if stored.keys().isdisjoint(piece.names):
                    continue
                a, b = (
                    _read_tensor(folder, reader, stored, name, shape)
                    for name, shape in zip(
                        piece.names, _peft_shapes(parameter, piece, rank), strict=True
                    )
                )
                used |= set(piece.names)
                _store_pair_in_adapter(own, parameter, piece, a, b, rank)
            set_at_path(tree, parameter.path, own)
    for name in sorted(stored.keys() - used):
        raise stored[name].error("is unexpected: the model has no place for it")
    return tree


def _peft_shapes(
    parameter: Parameter, piece: _PeftTensorPair, rank: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    inputs, outputs = parameter.matrix_shape[0], piece.columns[1] - piece.columns[0]
    rows = rank * max(1, parameter.experts)
    return (rows, inputs), (outputs, rows)


def _read_tensor(
    folder: Path,
    reader: TensorReader,
    stored: Mapping[str, StoredTensor],
    name: str,
    shape: tuple[int, int],
) -> np.ndarray:
    """Return a float32 copy of a tensor."""
    if name not in stored:
        raise ValueError(f"{folder / WEIGHTS}: tensor {name!r} is missing")
    tensor = stored[name]
    if tensor.shape != shape:
        raise tensor.error(
            f"has shape {list(tensor.shape)}, must have {list(shape)}: the adapter is of another"
            " model"
        )
    if tensor.dtype not in DTYPES:
        raise tensor.error(f"has dtype {tensor.dtype}, must have one of {', '.join(DTYPES)}")
    out = np.empty(shape, np.float32)
    for first, end, values in reader.read_chunks(tensor, 0, shape[0]):
        out[first:end] = values
    if not np.isfinite(out).all():
        raise tensor.error("has values that are not finite")
    return out


def _store_pair_in_adapter(
    own: dict[str, np.ndarray],
    parameter: Parameter,
    piece: _PeftTensorPair,
    a: np.ndarray,
    b: np.ndarray,
    rank: int,
) -> None:
    """Write PEFT's A and B of one tensor to their place in a parameter's adapter."""
    low, high = piece.columns
    if parameter.experts:
        a = a.reshape(parameter.experts, rank, -1).transpose(0, 2, 1)
        b = b.reshape(-1, rank, parameter.experts).transpose(2, 1, 0)
        if parameter.source.interleaved:
            b = b[..., np.argsort(_stored_column_order(parameter))]
    else:
        a, b = a.T, b.T
    own["a"][piece.layer][..., piece.number, :, :] = a
    own["b"][piece.layer][..., low:high] = b
