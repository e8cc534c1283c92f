"""Runs the work of several devices at the same time, in a thread for each."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

Result = TypeVar("Result")


class DeviceWorkers:
    """Threads for the transfers of a process's devices: two for each, so that two callers at a
    time can use all devices. None with one device, whose jobs run in the caller's thread.
    """

    def __init__(self, num_devices: int) -> None:
        self._pool = ThreadPoolExecutor(2 * num_devices, "device") if num_devices > 1 else None

    def run(self, jobs: Sequence[Callable[[], Result]]) -> list[Result]:
        """Return the results of all jobs, which run at the same time; a single one runs in the
        caller's thread.

        Waits for all jobs, then raises the error of the first that failed. A KeyboardInterrupt
        returns to the caller while jobs still run.
        """
        if self._pool is None or len(jobs) <= 1:
            return [job() for job in jobs]
        futures = [self._pool.submit(job) for job in jobs]
        wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads after their jobs."""
        if self._pool is not None:
            self._pool.shutdown()
