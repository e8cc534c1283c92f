"""Preparation of a corpus on all cores of one machine, or of a Ray cluster.

Usage: python -m jmoe.data.prepare PATH... --tokenizer FILE --out SHARDS [--ray ADDRESS].

`work_units.py` divides the text into units, `unit_writer.py` writes each as one shard, and this
program deals the units out and writes what concerns all: held-out text and manifest. Started again
after any interruption, it does the units that are left.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import platform
import sys
import time

if __name__ == "__main__":  # before NumPy is imported
    # Each process, also the workers, which inherit this, is one thread: malloc takes locks in a
    # process that ever had a second one, which makes tokenizers 5 to 13 % slower.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from jmoe.config import DataConfig
from jmoe.data.chat_files import chat_files
from jmoe.data.output_folder import OutputFolder, open_output_folder
from jmoe.data.prepared_folder import finish_folder, is_finished
from jmoe.data.progress import PreparationProgress
from jmoe.data.record_shards import PLAN
from jmoe.data.text_options import add_text_options, data_config
from jmoe.data.tokenizer import load_tokenizer
from jmoe.data.unit_writer import MAX_VOCAB_SIZE, write_unit, write_unit_on_one_core
from jmoe.data.work_units import Job, Unit, claim_folder, find_file_pieces, job_key, plan_units
from jmoe.models.tokenizer_file import TOKENIZER
from jmoe.ray_cluster import check_same_everywhere, connect, jmoe_version, run_tasks
from jmoe.runtime import end_at_once_on_interrupt
from jmoe.types import JsonObject

UNIT_MB = 128.0
# rounds of workers that all died before one unit was done
MAX_FRUITLESS_ROUNDS = 3
LIBRARIES = ("tokenizers", "numpy", "array_record")  # their versions decide the bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Write token shards; return the exit status, 2 for a user's mistake."""
    options = _build_parser().parse_args(arguments)
    try:
        print(prepare(options))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def prepare(options: argparse.Namespace) -> str:
    """Prepare the corpus that the options name; return a sentence with its counts.

    Raises ValueError or OSError naming the option or the file at fault.
    """
    if options.workers < 1 or options.unit_mb <= 0:
        raise ValueError(
            f"--workers = {options.workers}, --unit-mb = {options.unit_mb}: must be positive"
        )
    ray = None if options.ray is None else connect(options.ray)
    report = PreparationProgress(_say).report
    config = data_config(options)
    job, units = _make_job(
        config, open_output_folder(options.out), round(options.unit_mb * 1e6), report
    )
    if is_finished(job, units):
        return f"{options.out}: has been prepared from these inputs; nothing is left to do"
    if ray is not None:
        check_same_everywhere(ray, options.ray, describe_node_environment, job.out, job.key)
    done = job.read_results(units)
    left = [unit for unit in units if unit not in done]
    if len(left) < len(units):
        _say(f"{options.out}: {len(done)} of {len(units)} units were done before")
    begun = time.monotonic()
    results: Iterable[JsonObject]
    if ray is not None:
        results = run_tasks(ray, write_unit_on_one_core, job, left)
    elif options.workers == 1:
        results = map(functools.partial(write_unit, job), left)
    else:
        work = functools.partial(write_unit_on_one_core, job)
        results = run_on_cores(work, left, options.workers)
    written = _report_and_sum_tokens(
        results, sum(p.num_bytes for unit in left for p in unit.pieces), report
    )
    manifest = finish_folder(job, units)
    seconds = time.monotonic() - begun
    return f"{_describe_prepared(options.out, manifest)}; {written / seconds:,.0f} tokens/s"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _make_job(
    config: DataConfig, out: OutputFolder, unit_bytes: int, report: Callable[[str, int, int], None]
) -> tuple[Job, list[Unit]]:
    """Claim the folder `out`; return the job with its units."""
    assert config.tokenizer is not None
    source = Path(config.tokenizer).expanduser()
    pieces, has_samples = find_file_pieces(config, report)
    encode_control = config.control_tokens or has_samples
    tokenizer = load_tokenizer(source, MAX_VOCAB_SIZE, encode_control=encode_control)
    key = job_key(pieces, unit_bytes, config, tokenizer)
    begun = claim_folder(out, key, datetime.now().isoformat())
    files = {TOKENIZER: source.read_bytes(), **(chat_files(config) if has_samples else {})}
    for name, content in files.items():
        out.write(name, content)
    all_bytes = sum(piece.size_bytes for piece in pieces)
    job = Job(
        out=out,
        tokenizer_files=tuple(files),
        config=dataclasses.replace(config, chat_template=None),  # it is among the chat files
        has_samples=has_samples,
        held_out_share=min(config.held_out_fraction, config.held_out_bytes / max(1, all_bytes)),
        key=key,
        begun=begun,
    )
    return job, plan_units(pieces, unit_bytes, config)


def describe_node_environment(out: OutputFolder, key: str) -> dict[str, str]:
    """Return {name: value} of this node's versions and shared folder, which must be equal on all
    nodes that write shards.
    """
    try:
        has_plan = str(key in out.read(PLAN).decode())
    except (OSError, ValueError) as error:
        has_plan = str(error)
    return {
        "jmoe": jmoe_version(),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        f"{out} (a folder shared by all nodes)": has_plan,
        **{name: version(name) for name in LIBRARIES},
    }


def run_on_cores(
    work: Callable[[Unit], JsonObject], units: Sequence[Unit], num_workers: int
) -> Iterator[JsonObject]:
    """Yield the results of `work`, in the order of completion, from processes of this machine.

    Workers that are killed are replaced, and their units done again. Raises ValueError if workers
    die again and again before any unit is done.
    """
    context = multiprocessing.get_context("spawn")
    left = {unit.number: unit for unit in units}
    fruitless = 0
    while left:
        before = len(left)
        pool = concurrent.futures.ProcessPoolExecutor(min(num_workers, len(left)), context)
        try:
            futures = {pool.submit(work, unit): number for number, unit in left.items()}
            for future in concurrent.futures.as_completed(futures):
                result = future.result()
                del left[futures[future]]
                yield result
        except concurrent.futures.process.BrokenProcessPool as error:
            fruitless = fruitless + 1 if len(left) == before else 0
            if fruitless >= MAX_FRUITLESS_ROUNDS:
                raise ValueError(
                    f"--workers = {num_workers}: workers died {fruitless} times before they wrote"
                    " a shard; the machine may lack memory for as many"
                ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _report_and_sum_tokens(
    results: Iterable[JsonObject], all_bytes: int, report: Callable[[str, int, int], None]
) -> int:
    """Report progress until all units are done; return the number of tokens written."""
    done_bytes = tokens = 0
    for result in results:
        done_bytes += result["unit_bytes"]
        tokens += result["shard"]["count"] if result["shard"] else 0
        report("tokenising", done_bytes, all_bytes)
    return tokens


def _describe_prepared(out: str, manifest: JsonObject) -> str:
    words = (
        f"{out}: {manifest['tokens']:,} tokens of {manifest['documents']:,} documents in"
        f" {len(manifest['shards']):,} shards, {manifest['held_out_documents']:,} documents held"
        f" out, {manifest['empty_documents']:,} empty"
    )
    if manifest["bad_documents"]:
        words += f", {manifest['bad_documents']:,} BAD ones left out, see {out}/bad_documents.jsonl"
    return words


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jmoe.data.prepare",
        description=(
            "Tokenise text or chats on all cores into token shards (ArrayRecord) that train.py"
            " --data.path SHARDS takes. Run the same command again after an interruption."
        ),
    )
    parser.add_argument(
        "path", nargs="+", help="files, folders, globs, or URLs of object stores (fsspec)"
    )
    parser.add_argument(
        "--out", required=True, metavar="SHARDS", help="a new folder: a path or a URL (fsspec)"
    )
    parser.add_argument("--tokenizer", required=True, metavar="FILE", help="a tokenizer.json")
    add_text_options(parser)
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes on this machine (%(default)s: one a core)",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run on this Ray cluster instead: HOST:PORT of its head, or auto",
    )
    parser.add_argument(
        "--unit-mb",
        type=float,
        default=UNIT_MB,
        metavar="MB",
        help="stored text that becomes one shard, done again if its worker is lost (%(default)s)",
    )
    return parser


if __name__ == "__main__":
    end_at_once_on_interrupt()
    sys.exit(main())
