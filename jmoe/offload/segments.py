"""Reads and writes expert placements as a JSON file: which experts of each layer each device holds.

The file is {"segments": S} with S[device][layer] a list of expert numbers, one layer entry per MoE
layer. A person writes it, or it is the plan.json of a bundle. An expert may be on several devices,
which then share its tokens.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jmoe.config.engine import EngineMesh
from jmoe.planning.placement import EMPTY, Placement, assign_shared_slot_rows, placement_from_slots
from jmoe.types import Json

FIELD = "mesh.segments"


def read_segments(mesh: EngineMesh, num_layers: int, num_experts: int) -> list[Placement]:
    """Return the placement of each layer from the file `mesh.segments`.

    Layers on disjoint devices share a row of slots (`assign_shared_slot_rows`); the fullest device
    sets the row's number of slots. Raises `ValueError` naming the file, and the device, layer and
    expert, if the file is unreadable or does not fit the model and mesh.
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
    _check_segments(mesh, devices, num_layers, num_experts)
    by_layer = [[set(layers[layer]) for layers in devices] for layer in range(num_layers)]
    rows = assign_shared_slot_rows(
        [{n for n, experts in enumerate(layer) if experts} for layer in by_layer]
    )
    # slots per device of each row; there are at most as many rows as layers
    slots = [mesh.slots_per_device or 1] * num_layers
    for row, experts_N in zip(rows, by_layer, strict=True):
        slots[row] = max(slots[row], *map(len, experts_N))
    placements = []
    for layer, row in enumerate(rows):
        experts_NS = np.full((mesh.devices, slots[row]), EMPTY, np.int32)
        for device, layers in enumerate(devices):
            experts_NS[device, : len(layers[layer])] = layers[layer]
        placements.append(placement_from_slots(experts_NS, np.ones(num_experts)))
    return placements


def placements_to_segments(placements: Sequence[Placement]) -> list[list[list[int]]]:
    """Return the expert numbers of each device and layer, [device][layer][...], as in the file."""
    devices = range(placements[0].num_devices)
    tables = [placement.physical_to_logical.tolist() for placement in placements]
    return [
        [[expert for expert in table[device] if expert != EMPTY] for table in tables]
        for device in devices
    ]


def _check_segments(mesh: EngineMesh, devices: Json, num_layers: int, num_experts: int) -> None:
    """Raise `ValueError` naming device, layer and expert if the file does not fit the model and
    mesh.
    """

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
