"""fio, the usual measure of a disk: as long as it takes itself, and beside something else."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.lib.report import JsonObject

COMMON = {"ioengine": "psync", "direct": 1, "thread": 1}


def is_installed() -> bool:
    """Return whether there is a command fio."""
    return shutil.which("fio") is not None


def _fio_command(*jobs: JsonObject) -> list[str]:
    """Return the command that runs these jobs, each a dict of fio's options."""
    return ["fio", *(f"--{key}={value}" for job in jobs for key, value in (job | COMMON).items())]


def _environment(*, huge_pages: bool) -> dict[str, str]:
    """Return fio's environment, in which malloc asks for transparent huge pages."""
    return os.environ | {"GLIBC_TUNABLES": f"glibc.malloc.hugetlb={int(huge_pages)}"}


def measure_transfer_s(
    files: list[Path], record_bytes: int, threads: int, *, write: bool, huge_pages: bool
) -> float:
    """Return fio's seconds to read or write these files.

    Whole records, O_DIRECT, as many at a time and flushed as jmoe does.
    """
    links = files[0].parent / "fio"
    links.mkdir()
    for n, path in enumerate(files):
        os.link(path, links / f"{n % threads}.{n // threads}")
    job = {
        "name": "records",
        "output-format": "json",
        "rw": "write" if write else "read",
        "directory": links,
        "filename_format": "$jobnum.$filenum",
        "nrfiles": len(files) // threads,
        "filesize": record_bytes,
        "size": len(files) // threads * record_bytes,
        "bs": record_bytes,
        "numjobs": threads,
        "file_service_type": "sequential",
        "fdatasync": int(write),
        "group_reporting": 1,
        "scramble_buffers": 0,
    }
    environment = _environment(huge_pages=huge_pages)
    done = subprocess.run(
        _fio_command(job), capture_output=True, text=True, check=True, env=environment
    )
    moved = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][
        "write" if write else "read"
    ]
    assert moved["io_bytes"] == len(files) * record_bytes, moved["io_bytes"]
    shutil.rmtree(links)
    return float(moved["runtime"]) / 1000


@contextmanager
def running_in_background(
    folder: Path, read_bytes_per_s: float, write_bytes_per_s: float
) -> Iterator[None]:
    """Run fio during the block, at these rates, past the page cache, 4 MiB a block."""
    folder.mkdir(exist_ok=True)
    place = {"directory": folder, "bs": "4m", "size": "256m", "time_based": 1, "runtime": 600}
    read = {"name": "read", "rw": "read", "rate": int(read_bytes_per_s)}
    write = {"name": "write", "rw": "write", "rate": int(write_bytes_per_s), "fdatasync": 1}
    command, environment = _fio_command(read | place, write | place), _environment(huge_pages=True)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    try:
        time.sleep(1.0)  # it lays out its files the first time
        yield
        assert process.poll() is None, f"fio ended with {process.returncode}"
    finally:
        process.kill()
        process.wait()
