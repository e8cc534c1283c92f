"""Clusters, devices and links, read from TOML files (`--cluster`, `--comm.links`).

Standard library only.
"""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from jmoe.config.checks import (
    check,
    check_field,
    check_field_types,
    check_not_negative,
    check_positive,
)
from jmoe.config.tiers import MachineConfig

T = TypeVar("T")


@dataclass(frozen=True)
class NetworkConfig:
    """Links of the devices inside a node, and of a node to other nodes.

    inside: from a device to the other devices of its node. between: from a whole node to other
    nodes.
    """

    inside_bytes_per_s: float
    between_bytes_per_s: float
    inside_latency_s: float = 5e-6
    between_latency_s: float = 1e-5

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(self, "inside_bytes_per_s", "between_bytes_per_s")
        check_not_negative(self, "inside_latency_s", "between_latency_s")


@dataclass(frozen=True)
class LinkConfig:
    """A link: bandwidth in one direction, and latency in seconds of a collective with next to no
    data.
    """

    bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(self, "bytes_per_s")
        check_not_negative(self, "latency_s")


@dataclass(frozen=True)
class LinksConfig:
    """Links from a device to others, by distance, nearest first.

    inside: in the same node. rail: same position in another node below the same leaf switch. leaf:
    another position in such a node. spine: below another leaf switch. nodes_per_leaf: nodes below a
    leaf switch; 0: all nodes. message_s: overhead in seconds of each message, at any distance.
    """

    inside: LinkConfig
    rail: LinkConfig
    leaf: LinkConfig
    spine: LinkConfig
    message_s: float = 0.0
    nodes_per_leaf: int = 0

    def __post_init__(self) -> None:
        check_field_types(self)
        check_not_negative(self, "message_s", "nodes_per_leaf")


@dataclass(frozen=True)
class StorageConfig:
    """The file system shared by all nodes that holds the checkpoints."""

    write_bytes_per_s: float  # of all nodes together

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(self, "write_bytes_per_s")


@dataclass(frozen=True)
class ClusterConfig:
    """A cluster of identical nodes, and the numbers of nodes to plan for.

    machine: a node's host memory and disk, and its devices. batch: `fixed` uses batch_size
    sequences a step for any number of nodes; `per_node` uses batch_size for the first number and
    scales with the number of nodes. grows: the mesh axis that grows with the number of nodes:
    `data`, or `experts` (expert_inter), which experts off the device require.
    """

    nodes: tuple[int, ...]
    devices_per_node: int
    network: NetworkConfig
    storage: StorageConfig
    machine: MachineConfig = field(default_factory=MachineConfig)
    batch: Literal["fixed", "per_node"] = "fixed"
    grows: Literal["data", "experts"] = "data"

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(self, "devices_per_node")
        rising = sorted({*self.nodes}) == [*self.nodes] and min(self.nodes, default=0) > 0
        check_field(rising, self, "nodes", "must be numbers of nodes, from the fewest on")
        for name in ("host_bytes", "nvme_bytes"):
            check_field(
                getattr(self.machine, name) > 0,
                self.machine,
                f"machine.{name}",
                "must be greater than 0",
            )
        described = self.machine.accelerator or all(
            getattr(self.machine, name)
            for name in ("device_bytes", "flops", "link_bytes_per_s", "memory_bytes_per_s")
        )
        constraint = (
            "must be given, or else device_bytes, flops, link_bytes_per_s and memory_bytes_per_s"
        )
        check(bool(described), "machine.accelerator", self.machine.accelerator, constraint)


@dataclass(frozen=True)
class DevicesConfig:
    """Identical devices of one machine.

    device_bytes: free memory of each device. bytes_per_s: memory bandwidth of each device.
    """

    devices: int
    device_bytes: int
    bytes_per_s: float

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(self, "devices", "device_bytes", "bytes_per_s")


@dataclass(frozen=True)
class MachinesConfig:
    """Machines in order of their process indices, and the links between their devices.

    network: None if unknown.
    """

    machines: tuple[DevicesConfig, ...]
    network: NetworkConfig | None = None


def read_cluster(path: Path) -> ClusterConfig:
    """Return the cluster described by a TOML file. Raises ValueError naming the file and the
    field.
    """
    return _read_toml(
        "cluster", path, lambda table: _dataclass_from_table(ClusterConfig, table, "")
    )


def read_links(path: Path) -> LinksConfig:
    """Return the links in a TOML file. Raises ValueError naming the file and the field."""
    return _read_toml(
        "comm.links", path, lambda table: _dataclass_from_table(LinksConfig, table, "")
    )


def links_to_toml(links: LinksConfig) -> str:
    """Return the content of a TOML file that `read_links` parses to these links."""
    lines = []
    for name, value in dataclasses.asdict(links).items():
        if isinstance(value, dict):
            value = "{" + ", ".join(f"{part} = {number!r}" for part, number in value.items()) + "}"
        lines.append(f"{name} = {value}\n")
    return "".join(lines)


def read_machines(path: Path) -> MachinesConfig:
    """Return the machines in [[machines]] and [network] of a TOML file.

    Raises ValueError naming the file and the field.
    """
    return _read_toml("machines", path, _parse_machines)


def _parse_machines(table: dict[str, Any]) -> MachinesConfig:
    """Return the machines of a parsed TOML file. Raises ValueError naming the field."""
    for name, value in table.items():
        check(name in ("machines", "network"), name, value, "is neither machines nor network")
    tables = table.get("machines")
    is_list = isinstance(tables, list) and tables and all(isinstance(one, dict) for one in tables)
    check(bool(is_list), "machines", tables, "must be tables, [[machines]]")
    assert tables is not None
    machines = tuple(
        _dataclass_from_table(DevicesConfig, one, f"machines[{n}].") for n, one in enumerate(tables)
    )
    network = table.get("network")
    check(
        network is None or isinstance(network, dict),
        "network",
        network,
        "must be a table, [network]",
    )
    return MachinesConfig(
        machines,
        None if network is None else _dataclass_from_table(NetworkConfig, network, "network."),
    )


def _read_toml(option: str, path: Path, make: Callable[[dict[str, Any]], T]) -> T:
    """Return `make` of a TOML file's content; its errors name `option` and the file."""
    try:
        return make(tomllib.loads(path.read_text(encoding="utf-8-sig")))
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"must be TOML: {error}"
        raise ValueError(f"{option} = {str(path)!r}: {reason}") from error
    except ValueError as error:
        raise ValueError(f"{option} = {str(path)!r}: {error}") from error


def _dataclass_from_table(kind: Any, values: dict[str, Any], section: str) -> Any:
    """Return a dataclass of type `kind` with the values of a TOML table.

    Raises ValueError for unknown fields, missing fields and wrong types.
    """
    hints, made = typing.get_type_hints(kind), {}
    for name, value in values.items():
        check(name in hints, f"{section}{name}", value, f"is none of {', '.join(hints)}")
        if dataclasses.is_dataclass(hints[name]):
            check(
                isinstance(value, dict),
                f"{section}{name}",
                value,
                f"must be a table, [{section}{name}]",
            )
            made[name] = _dataclass_from_table(hints[name], value, f"{section}{name}.")
        else:
            made[name] = _convert_value(value, hints[name], f"{section}{name}")
    for field_ in dataclasses.fields(kind):
        required = (
            field_.default is dataclasses.MISSING and field_.default_factory is dataclasses.MISSING
        )
        if required and field_.name not in made:
            raise ValueError(f"{section}{field_.name}: is missing")
    try:
        return kind(**made)
    except ValueError as error:
        named = not section or str(error).startswith(section)
        raise ValueError(f"{'' if named else section}{error}") from error


def _convert_value(value: Any, hint: Any, name: str) -> Any:
    """Return a TOML value converted to the type `hint`: a number, a string or a tuple of whole
    numbers. Raises ValueError `name = value: …` for a value of another type.

    A whole number may be written as 2e12.
    """
    if hint is int or hint is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        check(
            number and (hint is float or value == int(value)),
            name,
            value,
            f"must be a {_NUMBERS[hint]}",
        )
        return hint(value)
    if typing.get_origin(hint) is tuple:
        whole = isinstance(value, list) and all(
            isinstance(v, int) and not isinstance(v, bool) for v in value
        )
        check(whole, name, value, "must be a list of whole numbers")
        return tuple(value)
    check(isinstance(value, str), name, value, "must be a text")
    return value


_NUMBERS = {int: "whole number", float: "number"}
