"""Which experts of each layer are on which device for good, in a file.

It is JSON, {"segments": [[[expert, ...] of each layer with experts] of each device]}: a plan that a
person wrote, or the plan.json of a bundle. An expert may be on several devices, which then take
turns.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jmoe.config.engine import EngineMesh
from jmoe.planning.placement import EMPTY, Placement, place_as, shared_rows

FIELD = "mesh.segments"


def read_segments(mesh: EngineMesh, num_layers: int, num_experts: int) -> list[Placement]:
    """Return the placement of each layer that the file `mesh.segments` says.

    Layers on different devices share a row of slots (`shared_rows`), which has as many as the
    fullest device needs. Raises `ValueError` naming the file, and the device, layer and expert, for
    what is no such plan for this model.
    """
    assert mesh.segments is not None
    file = Path(mesh.segments).expanduser()
    try:
        devices = json.loads(file.read_text())["segments"]
    except OSError as error:
        raise ValueError(
            f"{FIELD} = {mesh.segments!r}: cannot be read: {error.strerror}"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{FIELD} = {mesh.segments!r}: must be a JSON object with segments"
        ) from error
    _check(mesh, devices, num_layers, num_experts)
    by_layer = [[set(layers[layer]) for layers in devices] for layer in range(num_layers)]
    rows = shared_rows([{n for n, experts in enumerate(layer) if experts} for layer in by_layer])
    # of each row, of which there are no more than layers
    slots = [mesh.slots_per_device or 1] * num_layers
    for row, experts_N in zip(rows, by_layer, strict=True):
        slots[row] = max(slots[row], *map(len, experts_N))
    placements = []
    for layer, row in enumerate(rows):
        experts_NS = np.full((mesh.devices, slots[row]), EMPTY, np.int32)
        for device, layers in enumerate(devices):
            experts_NS[device, : len(layers[layer])] = layers[layer]
        placements.append(place_as(experts_NS, np.ones(num_experts)))
    return placements


def as_segments(placements: Sequence[Placement]) -> list[list[list[int]]]:
    """Return the experts of each device, by device and layer, as the file has them."""
    devices = range(placements[0].num_devices)
    tables = [placement.physical_to_logical.tolist() for placement in placements]
    return [
        [[expert for expert in table[device] if expert != EMPTY] for table in tables]
        for device in devices
    ]


def _check(mesh: EngineMesh, devices: Any, num_layers: int, num_experts: int) -> None:
    def check(ok: bool, constraint: str) -> None:
        if not ok:
            raise ValueError(f"{FIELD} = {mesh.segments!r}: {constraint}")

    check(isinstance(devices, list), "segments must be a list, one entry a device")
    check(
        len(devices) == mesh.devices,
        f"has {len(devices)} devices: must have mesh.devices = {mesh.devices}",
    )
    for device, layers in enumerate(devices):
        fits = isinstance(layers, list) and len(layers) == num_layers
        check(
            fits, f"device {device}: must be a list of {num_layers} lists, one a layer with experts"
        )
        for layer, experts in enumerate(layers):
            where = f"device {device}, layer {layer}"
            check(isinstance(experts, list), f"{where}: must be a list of experts")
            for expert in experts:
                known = type(expert) is int and 0 <= expert < num_experts
                check(
                    known,
                    f"{where}: expert {expert!r} must be an integer from 0 to {num_experts - 1}",
                )
                check(experts.count(expert) == 1, f"{where}: expert {expert} must be there once")
    for layer in range(num_layers):
        missing = set(range(num_experts)) - {
            expert for layers in devices for expert in layers[layer]
        }
        check(not missing, f"layer {layer}: expert {min(missing, default=0)} must be on a device")
