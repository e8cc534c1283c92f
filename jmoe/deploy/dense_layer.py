"""Replace a layer of experts by a dense layer: one MLP that joins the shared expert and the most
used experts.

Legend: N layers with experts, E experts, n kept experts, D hidden, F hidden of a part, U = 2F
(SwiGLU: gate, up) or F (GELU), P parts.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from jmoe.config import ModelConfig, check
from jmoe.deploy.expert_scores import best_experts
from jmoe.deploy.similar import ExpertMerger
from jmoe.models.lazy_checkpoint import LazyCheckpoint

Arrays = Mapping[str, np.ndarray]
DenseFrom = Literal["most_used", "average"]


def dense_width_and_num_joined(teacher: ModelConfig, has_dense: bool) -> tuple[int, int]:
    """Return (hidden size of a dense layer made of experts, number of experts that it joins).

    has_dense: the student has other dense layers; the new layer then has their size, else that of
    the shared expert and one expert. Raises ValueError naming the field if no such layer exists.
    """
    shared = teacher.shared_expert_intermediate_size
    size = teacher.moe_intermediate_size
    experts = teacher.num_experts
    gate = "has no value where all tokens are treated alike: a layer with it cannot be dense"
    check(not teacher.shared_expert_gate, "shared_expert_gate", teacher.shared_expert_gate, gate)
    if not has_dense:
        return shared + size, 1
    count, rest = divmod(teacher.intermediate_size - shared, size)
    whole = (
        f"must be {shared} of the shared expert and a multiple of moe_intermediate_size = {size},"
        f" {experts} at most"
    )
    check(
        rest == 0 and 1 <= count <= experts, "intermediate_size", teacher.intermediate_size, whole
    )
    return teacher.intermediate_size, count


def make_dense_mlp(
    source: LazyCheckpoint,
    layer: int,
    use_NE: NDArray[np.int64],
    num_experts: int,
    made_from: DenseFrom,
) -> dict[str, np.ndarray]:
    """Return the arrays of an MLP for one layer with experts: its shared expert joined with its
    `num_experts` most used experts.

    Each expert is weighted by its share of the tokens that chose any of these experts. use_NE:
    tokens that chose each expert, for all layers. made_from: `average` merges each other expert
    into the most similar of these first (`similar.py`).
    """
    kept_Nn = best_experts(use_NE.astype(np.float64), num_experts)
    merged = ExpertMerger(source, kept_Nn, use_NE) if made_from == "average" else None
    parts: list[Arrays] = []
    for expert in kept_Nn[layer].tolist():
        own = source.read_expert(layer, expert)
        parts.append(own if merged is None else {name: merged(name, layer, expert) for name in own})
    used = use_NE[layer, kept_Nn[layer]].astype(np.float64)
    shares = used / used.sum() if used.any() else np.full(num_experts, 1 / num_experts)
    weights = (source.config.router.routed_scaling_factor * shares).tolist()
    shared = {
        path[-1]: np.asarray(array[layer])
        for path, array in source.load_dense_arrays().items()
        if path[1:2] == ("shared_expert",)
    }
    if shared:
        parts, weights = [shared, *parts], [1.0, *weights]
    return join_mlps(parts, weights, source.config.hidden_act)


def join_mlps(
    parts: Sequence[Arrays], weights: Sequence[float], activation: str
) -> dict[str, np.ndarray]:
    """Return the arrays, by name, of an MLP whose output is the weighted sum of the outputs of P
    MLPs.
    """
    made: dict[str, np.ndarray] = {}
    halves = 1 if activation == "gelu" else 2
    for name in ("w_up", "b_up"):
        if name in parts[0]:
            split = [np.split(part[name], halves, axis=-1) for part in parts]
            made[name] = np.concatenate(
                [one[half] for half in range(halves) for one in split], axis=-1
            )
    weighed = {
        name: [
            weight * part[name].astype(np.float32)
            for weight, part in zip(weights, parts, strict=True)
        ]
        for name in ("w_down", "b_down")
        if name in parts[0]
    }
    made["w_down"] = np.concatenate(weighed["w_down"]).astype(parts[0]["w_down"].dtype)
    if "b_down" in weighed:
        made["b_down"] = np.sum(weighed["b_down"], axis=0).astype(parts[0]["b_down"].dtype)
    return made
