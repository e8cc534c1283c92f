"""Answer a file of requests in OpenAI's batch format, without a server:

python -m jmoe.programs.batch IN.jsonl OUT.jsonl --model MODEL [--option VALUE ...]

The same command goes on after an end of any kind.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import jmoe.runtime
from jmoe.serving import PACKAGES

if TYPE_CHECKING:
    from jmoe.command_line import BatchOptions
    from jmoe.config.serving import ServeConfig
    from jmoe.serving.batch_files import AnswersFile, BatchRequest


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def run(options: BatchOptions) -> None:
    """Append an answer to `options.answers` for each request that has none.

    Raises ValueError for files or options that do not go together, before the model is read. Ends
    the process with status 1 if the engine fails.
    """
    from jmoe.serving.batch_files import AnswersFile, read_keys, read_requests

    config = options.serving_config()
    requests = Path(options.requests)
    keys = read_keys(requests)
    with AnswersFile(Path(options.answers), requests, keys) as answers:
        num_answered = len(answers.keys)
        if num_answered:
            say(f"{num_answered:,} of {len(keys):,} requests have an answer in {options.answers}")
        if num_answered < len(keys):
            waiting = (one for one in read_requests(requests) if one.key not in answers.keys)
            answer_with_model(config, waiting, len(keys) - num_answered, answers)


def answer_with_model(
    config: ServeConfig, requests: Iterable[BatchRequest], total: int, answers: AnswersFile
) -> None:
    """Load the model, and append its answers to all `requests`, of which there are `total`."""
    from jmoe.cluster.distributed import check_gpus_found_and_used
    from jmoe.deploy.bundle import OpenBundle, is_bundle
    from jmoe.deploy.model_folder import hugging_face_folder
    from jmoe.inference.engine import Engine
    from jmoe.inference.loading import open_checkpoint, with_sequence_length
    from jmoe.models.tokenizer_file import open_tokenizer, tokenizer_file
    from jmoe.serving.batch import BatchRunner, EngineFailedError
    from jmoe.serving.service import Service, choose_output_format, starting_templates

    with ExitStack() as stack:
        engine_config, model = config.engine, Path(config.model)
        if is_bundle(model):
            opened = stack.enter_context(OpenBundle(model, engine_config))
            engine_config, model = opened.engine, opened.model
        check_gpus_found_and_used(config.distributed, engine_config.mesh.devices)
        folder = stack.enter_context(
            hugging_face_folder(model, say, cache_dir=engine_config.cache_dir)
        )
        # report a damaged tokenizer or template before weights are read
        tokenizer = open_tokenizer(tokenizer_file(folder, "model"))
        parsers = config.tool_parser, config.reasoning_parser
        output_format = choose_output_format(folder, tokenizer, *parsers)
        if output_format.template:
            say(str(output_format))
        with open_checkpoint(folder, engine_config) as checkpoint:
            engine_config = with_sequence_length(checkpoint, engine_config)
        name = config.served_model_name or Path(config.model).expanduser().resolve().name
        templates = stack.enter_context(starting_templates(folder, config.max_body_bytes))
        engine = stack.enter_context(Engine(folder, engine_config, say=say))
        config = replace(config, engine=engine_config)
        service = Service(engine, config, folder, name, templates())
        say(
            f"{name}: {total:,} requests, {engine.max_batch} sequences at once,"
            f" {engine.max_seq_len:,} tokens each"
        )
        try:
            asyncio.run(BatchRunner(service, answers, total).run(requests, say))
        except EngineFailedError as error:
            sys.exit(
                f"batch: {error}; the same command goes on with the requests without an answer"
            )


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
