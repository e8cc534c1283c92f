"""JAX's coordinator: its key-value store, results of rank 0 for every rank, and whether it still
answers.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import jax

from jmoe.status import first_error_line
from jmoe.types import Json

ANSWERS = "jmoe/answer/"  # + name: rank 0's result of a `result_from_rank_0` call
CALL_TIMEOUT_S = 3.0
NO_COORDINATOR = "rank 0 (the coordinator) does not answer: dead, stopped or out of reach"
# the kinds of rank 0's errors that the other ranks raise too; they raise RuntimeError for others
SHARED_ERRORS = {kind.__name__: kind for kind in (OSError, ValueError, RuntimeError)}


def result_from_rank_0(name: str, call: Callable[[], str], timeout_s: float) -> str:
    """Run `call` on rank 0 and return its result on every rank. Each `name` may be used once per
    run.

    If `call` raises, rank 0 raises that error. The other ranks raise `OSError` or `ValueError` with
    the same text if rank 0's error is one of these, otherwise `RuntimeError`. Raises `TimeoutError`
    on the other ranks after `timeout_s`.
    """
    store = key_value_client()
    if store is None:
        return call()
    if jax.process_index() == 0:
        try:
            value = call()
        except Exception as error:
            answer = json.dumps(
                {"error": _shared_error_name(error), "words": _shared_error_arguments(error)}
            )
            store.key_value_set(f"{ANSWERS}{name}", answer)
            raise
        store.key_value_set(f"{ANSWERS}{name}", json.dumps({"value": value}))
        return value
    try:
        answer = json.loads(store.blocking_key_value_get(f"{ANSWERS}{name}", int(timeout_s * 1000)))
    except jax.errors.JaxRuntimeError as error:
        raise TimeoutError(
            f"waited {timeout_s:g} s for rank 0: {name}: {first_error_line(error)}"
        ) from error
    if "error" in answer:
        raise SHARED_ERRORS[answer["error"]](*answer["words"])
    return str(answer["value"])


def _shared_error_name(error: Exception) -> str:
    """Return the name of the error class that the other ranks raise for rank 0's `error`: OSError,
    ValueError, or RuntimeError for every other kind.
    """
    kinds = (name for name, kind in SHARED_ERRORS.items() if isinstance(error, kind))
    return next(kinds, RuntimeError.__name__)


def _shared_error_arguments(error: Exception) -> list[Any]:
    """Return the constructor arguments of the other ranks' error, such that its text is that of
    rank 0's `error`; of an error that becomes a RuntimeError, after the words `rank 0: KIND`.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return [
            error.errno,
            error.strerror,
            None if error.filename is None else str(error.filename),
        ]
    is_shared = isinstance(error, tuple(SHARED_ERRORS.values()))
    return [str(error) if is_shared else f"rank 0: {type(error).__name__}: {error}"]


def key_value_client() -> Any:
    """Return the client of JAX's key-value store, or None in a run of one process."""
    if jax.process_count() == 1:
        return None
    from jax._src import distributed  # the store has no public name

    return distributed.global_state.client


def coordinator_address() -> tuple[str, int]:
    """Return (host, port) of JAX's coordinator."""
    from jax._src import distributed

    host, _, port = str(distributed.global_state.coordinator_address).rpartition(":")
    return host.strip("[]"), int(port)


def is_coordinator_silent() -> bool:
    """Return True if nothing answers at the coordinator's address. A live gRPC server sends the
    first byte at once.
    """
    try:
        with socket.create_connection(coordinator_address(), timeout=0.5) as line:
            return not line.recv(1)
    except OSError:
        return True


def is_connection_refused() -> bool:
    """Return True only if the coordinator's host refuses the connection; False if the host does not
    answer.
    """
    try:
        with socket.create_connection(coordinator_address(), timeout=CALL_TIMEOUT_S):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def read_json_by_rank(store: Any, folder: str) -> dict[int, Json]:
    return {
        int(key.rpartition("/")[2]): json.loads(value)
        for key, value in store.key_value_dir_get(folder)
    }
