"""Merge dropped experts into kept ones: each into the kept expert with the most similar router
column.

After M-SMoE (arXiv:2310.01334): hidden units are matched first, since their order is arbitrary, and
the average weights each expert by its tokens.

Legend: N layers with experts, E experts, n kept experts, D hidden, F expert hidden.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from jmoe.models.lazy_checkpoint import LazyCheckpoint

Arrays = dict[str, np.ndarray]


def assign_dropped_experts(
    kernel_DE: NDArray[np.float32], kept_n: NDArray[np.int64]
) -> dict[int, list[int]]:
    """Return {kept expert: dropped experts to merge into it}, by the cosine similarity of router
    columns.
    """
    # a term common to all logits does not affect the choice
    centred = kernel_DE - kernel_DE.mean(axis=1, keepdims=True)
    rows_ED = (centred / np.maximum(np.linalg.norm(centred, axis=0), 1e-20)).T
    groups: dict[int, list[int]] = {int(expert): [] for expert in kept_n}
    for expert in sorted({*range(len(rows_ED))} - groups.keys()):
        groups[int(kept_n[np.argmax(rows_ED[kept_n] @ rows_ED[expert])])].append(expert)
    return groups


def hidden_unit_weights(expert: Arrays) -> NDArray[np.float32]:
    """Return float32 [F, ...], all weights of each hidden unit of an expert."""
    hidden = expert["w_down"].shape[0]
    parts = [
        expert["w_up"].reshape(expert["w_up"].shape[0], -1, hidden).reshape(-1, hidden).T,
        expert["w_down"],
    ]
    if "b_up" in expert:
        parts.append(expert["b_up"].reshape(-1, hidden).T)
    return np.concatenate([part.astype(np.float32) for part in parts], axis=1)


def align_hidden_units(expert: Arrays, other: Arrays) -> Arrays:
    """Return `other` with its hidden units permuted to be most similar to those of `expert`."""
    _, order_F = linear_sum_assignment(
        hidden_unit_weights(expert) @ hidden_unit_weights(other).T, maximize=True
    )
    hidden = len(order_F)
    moved = dict(other) | {"w_down": other["w_down"][order_F]}
    for name in {"w_up", "b_up"} & other.keys():
        array = other[name]
        moved[name] = array.reshape(*array.shape[:-1], -1, hidden)[..., order_F].reshape(
            array.shape
        )
    return moved


class ExpertMerger:
    """Returns kept experts' arrays averaged with the experts merged into them: `merged(name, layer,
    expert)`.
    """

    def __init__(
        self, source: LazyCheckpoint, kept_Nn: NDArray[np.int64], use_NE: NDArray[np.int64]
    ) -> None:
        self._source, self._use_NE = source, use_NE
        kernels = next(
            a for path, a in source.load_dense_arrays().items() if path[-2:] == ("router", "kernel")
        )
        self._groups = [
            assign_dropped_experts(np.asarray(k, np.float32), kept)
            for k, kept in zip(kernels, kept_Nn, strict=True)
        ]
        # an expert's arrays are computed together: keep the last expert's
        self._last: tuple[tuple[int, int], Arrays] | None = None

    def __call__(self, name: str, layer: int, expert: int) -> np.ndarray:
        if self._last is None or self._last[0] != (layer, expert):
            self._last = (layer, expert), self._merge_expert(layer, expert)
        return self._last[1][name]

    def _merge_expert(self, layer: int, expert: int) -> Arrays:
        own = self._source.read_expert(layer, expert)
        share = max(1, int(self._use_NE[layer, expert]))
        total = {name: share * a.astype(np.float32) for name, a in own.items()}
        weight = share
        for other in self._groups[layer][expert]:
            count = int(self._use_NE[layer, other])
            if not count:
                continue
            for name, a in align_hidden_units(own, self._source.read_expert(layer, other)).items():
                total[name] += count * a.astype(np.float32)
            weight += count
        return {name: (total[name] / weight).astype(own[name].dtype) for name in own}
