"""The one place that uses Ray: a connection that names what is wrong with it, tasks and actors.

Ray is an optional library (`pip install 'jmoe[ray]'`), imported only once `connect` is called.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

CONNECT_TIMEOUT_S = 5.0
# tasks submitted at a time, for each core: one runs, and the next one waits
TASKS_PER_CORE, MIN_TASKS = 2, 1000
# Lost workers and nodes that a task survives. One that kills every worker by itself must end.
MAX_RETRIES = 20
MAX_CALLS = 10_000  # under way in one actor


def connect(address: str) -> Any:
    """Connect this process to a running cluster; return the module `ray`.

    address: `auto`, or HOST:PORT of the head. Raises ValueError that names `--ray` if Ray is not
    installed, nothing answers there, or the cluster has another version of Ray or Python.
    """
    where = f"--ray = {address!r}: "
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise ValueError(f"{where}needs Ray: pip install 'jmoe[ray]'") from error
    if address != "auto":
        _check_answers(address, where)
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().replace("\n", " ")
        raise ValueError(f"{where}{reason}") from error
    return ray


def _check_answers(address: str, where: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in address:
        raise ValueError(f"{where}must be auto, or HOST:PORT of the cluster's head")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"{where}no Ray head answers there: {error}; start one with ray start --head"
        ) from error


def jmoe_version() -> str:
    """Return the version of jmoe that this process imports."""
    own: str = import_module("jmoe").__version__
    return own


def describe_nodes(ray: Any, describe: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Return {address of a node: `describe(*arguments)` there} for every living node."""
    strategies = import_module("ray.util.scheduling_strategies")
    task = ray.remote(num_cpus=0, max_retries=3)(describe)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    described = {}
    for node in nodes:
        on_node = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        name = f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"
        described[name] = task.options(scheduling_strategy=on_node).remote(*arguments)
    return {name: _result(ray, reference) for name, reference in described.items()}


def check_same_everywhere(
    ray: Any, address: str, describe: Callable[..., dict[str, str]], *arguments: Any
) -> None:
    """Raise ValueError that names a node where `describe(*arguments)`, {name: value}, returns
    anything but what it returns here.
    """
    own = describe(*arguments)
    for node, other in describe_nodes(ray, describe, *arguments).items():
        for name in sorted({*own, *other}):
            if own.get(name) != other.get(name):
                raise ValueError(
                    f"--ray = {address!r}: node {node} has {name} = {other.get(name)}, this"
                    f" machine {own.get(name)}; they must be the same everywhere"
                )


def run_tasks(
    ray: Any, function: Callable[..., Any], common: Any, arguments: Iterable[Any]
) -> Iterator[Any]:
    """Yield `function(common, argument)` of every argument, in the order of completion.

    A task takes one core. If its worker or its node is lost, it runs again elsewhere. Raises the
    error of the first task that fails.
    """
    task = ray.remote(num_cpus=1, max_retries=MAX_RETRIES, scheduling_strategy="SPREAD")(function)
    left = iter(arguments)
    limit = max(MIN_TASKS, TASKS_PER_CORE * int(ray.cluster_resources().get("CPU", 0)))
    under_way = [task.remote(common, one) for one in itertools.islice(left, limit)]
    while under_way:
        ray.wait(under_way, num_returns=1)
        # all that have ended: a look at many tasks takes milliseconds
        done, under_way = ray.wait(under_way, num_returns=len(under_way), timeout=0)
        for reference in done:
            yield _result(ray, reference)
        under_way += [task.remote(common, one) for one in itertools.islice(left, len(done))]


def _result(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:  # the task's own error, without Ray's traceback
        raise (error.cause if isinstance(error.cause, Exception) else error) from None


class ActorLostError(Exception):
    """The process of an actor, or its node, was lost before the call had a result."""


def start_actor(ray: Any, kind: type, *arguments: Any, gpus: int) -> Any:
    """Start an actor of the class `kind` on some node with `gpus` GPUs, or with a core and no GPU;
    return its handle.
    """
    options = {"num_gpus": gpus} if gpus else {"num_cpus": 1}
    remote = ray.remote(kind).options(
        **options, scheduling_strategy="SPREAD", max_concurrency=MAX_CALLS, max_restarts=0
    )
    return remote.remote(*arguments)


def wait_for_one(ray: Any, references: Iterable[Any], timeout_s: float) -> Any | None:
    """Return a reference whose call has ended, or None after `timeout_s`."""
    done, _ = ray.wait(list(references), num_returns=1, timeout=timeout_s)
    return done[0] if done else None


def actor_result(ray: Any, reference: Any) -> Any:
    """Return the result of an actor's call. Raises the call's own error, or ActorLostError."""
    try:
        return _result(ray, reference)
    except ray.exceptions.RayActorError as error:
        raise ActorLostError(str(error).splitlines()[0]) from error


def count_places(ray: Any, gpus: int) -> int:
    """Return how many actors of `gpus` GPUs the cluster holds; without a GPU, its nodes."""
    total = int(ray.cluster_resources().get("GPU", 0))
    return total // gpus if total else sum(1 for node in ray.nodes() if node["Alive"])


def has_gpus(ray: Any) -> bool:
    """Return whether any node has a GPU."""
    return ray.cluster_resources().get("GPU", 0) > 0
