"""TCP meeting of all ranks before JAX connects them, so that an error can name the missing ranks.

`jax.distributed.initialize` also waits for all ranks, but aborts the process without naming the
missing ones. `jmoe.cluster.distributed.join_and_connect_processes` calls `connect_ranks_to_rank_0`.
"""

from __future__ import annotations

import contextlib
import socket
import time


def connect_ranks_to_rank_0(
    address: str, processes: int, rank: int, timeout_s: float
) -> dict[int, socket.socket]:
    """Wait until all ranks are present; return connections by rank: rank 0 gets one to every other
    rank, another rank gets {0: connection}.

    Rank 0 listens at the address that JAX's coordinator uses afterwards, so no further port must be
    open. Raises `TimeoutError` naming the missing ranks, `ValueError` if the address is malformed
    or two processes claim the same rank, and `OSError` if rank 0 cannot listen.
    """
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"distributed.coordinator_address = {address!r}: must read HOST:PORT")
    if rank == 0:
        verdict, lines = _accept_ranks(address, int(port), processes, timeout_s)
    else:
        verdict, line = _connect_to_rank_0(
            (host.strip("[]"), int(port)), processes, rank, timeout_s
        )
        lines = {0: line}
    kind, _, rest = verdict.partition(" ")
    if kind != "go":
        for line in lines.values():
            line.close()
    if kind == "missing":
        raise TimeoutError(
            f"{rest} did not start within distributed.start_timeout_s = {timeout_s:g} s"
        )
    if kind == "conflict":
        raise ValueError(f"distributed: {rest}")
    for line in lines.values():
        line.settimeout(None)
    return lines


def _accept_ranks(
    address: str, port: int, processes: int, timeout_s: float
) -> tuple[str, dict[int, socket.socket]]:
    """Return (`go` or the reason why the run cannot start, the ranks' connections by rank), on rank
    0. Raises `OSError` if the port cannot be opened.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        server = socket.create_server(
            ("", port), family=family, backlog=processes, dualstack_ipv6=dual
        )
    except OSError as error:
        raise OSError(
            f"distributed.coordinator_address = {address!r}: process 0 cannot listen there: {error}"
        ) from error
    deadline = time.monotonic() + timeout_s
    callers: dict[int, socket.socket] = {}
    verdict = "go"
    with server:
        while len(callers) < processes - 1 and verdict == "go":
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                caller = server.accept()[0]
            except TimeoutError:
                missing = [rank for rank in range(1, processes) if rank not in callers]
                verdict = f"missing {ranks_text(missing)}"
                break
            try:
                caller.settimeout(2.0)
                words = caller.recv(64).decode(errors="replace").split()
                rank, count = int(words[1]), int(words[2])
            except (OSError, ValueError, IndexError):
                caller.close()  # not a rank of this run
                continue
            if count != processes:
                verdict = (
                    f"conflict rank {rank} was told num_processes = {count}, rank 0 {processes}"
                )
            elif rank in callers:
                verdict = f"conflict two processes were told process_id = {rank}"
            if rank in callers:
                _send_verdict(caller, verdict)
                caller.close()
            else:
                callers[rank] = caller
    for caller in callers.values():
        _send_verdict(caller, verdict)
    return verdict, callers


def _send_verdict(caller: socket.socket, verdict: str) -> None:
    """Send `go` or a reason to stop; do nothing if the connection is broken."""
    with contextlib.suppress(OSError):
        caller.sendall(f"{verdict}\n".encode())


def _connect_to_rank_0(
    address: tuple[str, int], processes: int, rank: int, timeout_s: float
) -> tuple[str, socket.socket]:
    """Return (rank 0's verdict: `go` or the reason why the run cannot start, the open connection).

    Raises `TimeoutError` if rank 0 does not answer within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    problem: OSError | None = None
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            with contextlib.ExitStack() as stack:
                line = stack.enter_context(socket.create_connection(address, timeout=left_s))
                line.sendall(f"jmoe {rank} {processes}\n".encode())
                # rank 0 may have started later
                line.settimeout(max(0.01, deadline + 5 - time.monotonic()))
                verdict = b""
                # byte by byte: later bytes belong to the connection's user
                while not verdict.endswith(b"\n") and (byte := line.recv(1)):
                    verdict += byte
                if verdict.endswith(b"\n"):
                    stack.pop_all()
                    return verdict.decode().strip(), line
        except OSError as error:
            problem = error
        time.sleep(0.2)
    raise TimeoutError(
        f"rank 0 (the coordinator, expected at {address[0]}:{address[1]}) did not start within "
        f"distributed.start_timeout_s = {timeout_s:g} s; last attempt: {problem}"
    )


def ranks_text(ranks: list[int]) -> str:
    """Return ranks as text: `rank 3`, `ranks 1, 2`."""
    shown = ", ".join(map(str, ranks[:32])) + (
        f" and {len(ranks) - 32} more" if len(ranks) > 32 else ""
    )
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
