"""Answer a file of requests in OpenAI's batch format, without a server:

python -m jmoe.programs.batch IN.jsonl OUT.jsonl --model MODEL [--option VALUE ...]

The same command goes on after an end of any kind.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import jmoe.runtime
from jmoe.serving import PACKAGES

if TYPE_CHECKING:
    from jmoe.command_line import BatchOptions
    from jmoe.config.serving import ServeConfig
    from jmoe.serving.batch_files import AnswersFile, BatchRequest

GO_ON = "the same command goes on with the requests without an answer"


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def run(options: BatchOptions) -> None:
    """Append an answer to `options.answers` for each request that has none.

    Raises ValueError for files or options that do not go together, before the model is read. Ends
    the process with status 1 if the engine fails.
    """
    from jmoe.serving.batch_files import AnswersFile, read_request_keys, read_requests

    config = options.serving_config()
    requests = Path(options.requests)
    keys = read_request_keys(requests)
    with AnswersFile(Path(options.answers), requests, keys) as answers:
        num_answered = len(answers.keys)
        if num_answered:
            say(f"{num_answered:,} of {len(keys):,} requests have an answer in {options.answers}")
        if num_answered < len(keys):
            waiting = (one for one in read_requests(requests) if one.key not in answers.keys)
            total = len(keys) - num_answered
            if options.ray is None:
                answer_with_model(config, waiting, total, answers)
            else:
                answer_on_ray(options, waiting, total, answers)


def answer_with_model(
    config: ServeConfig, requests: Iterable[BatchRequest], total: int, answers: AnswersFile
) -> None:
    """Load the model, and append its answers to all `requests`, of which there are `total`."""
    from jmoe.programs.service import opened_service
    from jmoe.serving.batch import BatchRunner, EngineFailedError

    with opened_service(config, say) as service:
        engine = service.loop.engine
        say(
            f"{service.name}: {total:,} requests, {engine.max_batch} sequences at once,"
            f" {engine.max_seq_len:,} tokens each"
        )
        try:
            asyncio.run(BatchRunner(service, answers, total).run(requests, say))
        except EngineFailedError as error:
            sys.exit(f"batch: {error}; {GO_ON}")


def answer_on_ray(
    options: BatchOptions, requests: Iterable[BatchRequest], total: int, answers: AnswersFile
) -> None:
    """Append the answers of a cluster's engines to all `requests`, of which there are `total`."""
    from jmoe.programs.batch_on_ray import ClusterBatch
    from jmoe.serving.batch import EngineFailedError

    batch = ClusterBatch(options.serving_config(), options.ray or "", options.ray_engines)
    try:
        batch.run(requests, total, answers, say)
    except EngineFailedError as error:
        sys.exit(f"batch: {error}; {GO_ON}")


def main() -> None:
    """Run the program. Exits with 0 if every request has an answer, and with 1 otherwise."""
    from jmoe.command_line import parse_batch, parse_with_default_sigpipe

    options = parse_with_default_sigpipe(lambda: parse_batch(sys.argv[1:]))
    if (package := jmoe.runtime.first_missing_package(PACKAGES)) is not None:
        sys.exit(
            f"batch: needs the package {package}, which is not installed: pip install 'jmoe[serve]'"
        )
    jmoe.runtime.ignore_output_errors()
    jmoe.runtime.log_to_stderr()
    try:
        run(options)
    except (ValueError, OSError) as error:
        sys.exit(f"batch: {error}")


if __name__ == "__main__":
    jmoe.runtime.reexec_with_env()  # before other imports, which would be done twice
    jmoe.runtime.end_at_once_on_interrupt()
    main()
