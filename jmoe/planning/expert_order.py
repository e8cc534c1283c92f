"""Orders of a layer's experts that give all devices similar numbers of tokens. Pure functions,
called by `jmoe.training.expert_order`.

Device d holds the experts at neighbouring places of the order, equally many on each device. Source:
Lina (USENIX ATC '23), section 5, which places experts by popularity in inference.

Legend: L layers with experts, E experts of a layer, N devices that split them.
"""

import numpy as np
from numpy.typing import NDArray

LEAST_GAIN = 1.05  # of the busiest device's load, before to after, for which a layer's experts move


def balanced_orders(load_LE: NDArray[np.float64], num_devices: int) -> NDArray[np.int32]:
    """Return int32 [L, E]: the expert that comes to each place of each layer.

    Experts are exchanged in pairs between the busiest device and another one, the pair that lowers
    the larger of their loads the most, until no pair does: most experts stay where they are. A
    layer whose busiest device would not become `LEAST_GAIN` times as fast keeps its order.
    """
    num_experts = load_LE.shape[1]
    if num_experts % num_devices:
        raise ValueError(
            f"num_devices = {num_devices}: must divide the {num_experts} experts of a layer"
        )
    identity = np.arange(num_experts, dtype=np.int32)
    orders = []
    for load_E in load_LE:
        order_E = _exchange_pairs(load_E, num_devices)
        before, after = (busiest_share(load_E[order], num_devices) for order in (identity, order_E))
        orders.append(order_E if before >= LEAST_GAIN * after else identity)
    return np.stack(orders)


def busiest_share(load_E: NDArray[np.float64], num_devices: int) -> float:
    """Return the load of the busiest device over the mean; 1 if there is no load."""
    load_N = load_E.reshape(num_devices, -1).sum(axis=1)
    mean = load_N.mean()
    return float(np.max(load_N) / mean) if mean else 1.0


def _exchange_pairs(load_E: NDArray[np.float64], num_devices: int) -> NDArray[np.int32]:
    order_NL = np.arange(load_E.size, dtype=np.int32).reshape(num_devices, -1)
    if num_devices == 1:
        return order_NL.ravel()
    while True:
        own_NL = load_E[order_NL]
        load_N = own_NL.sum(axis=1)
        busy = int(np.argmax(load_N))
        # what the busiest device would give away, by (its expert, other device, the other's expert)
        moved = own_NL[busy][:, None, None] - own_NL[None]
        larger = np.maximum(load_N[busy] - moved, load_N[None, :, None] + moved)
        larger[:, busy] = np.inf
        best = int(np.argmin(larger))
        if larger.ravel()[best] >= load_N[busy] * (1 - 1e-9):
            return order_NL.ravel()
        sent, other, received = np.unravel_index(best, larger.shape)
        order_NL[busy, sent], order_NL[other, received] = (
            order_NL[other, received],
            order_NL[busy, sent],
        )
