"""The service of a server without its HTTP server, for programs that call its routes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jmoe.config.serving import ServeConfig
    from jmoe.serving.service import Service


@contextlib.contextmanager
def opened_service(config: ServeConfig, say: Callable[[str], None]) -> Iterator[Service]:
    """Load the model of `config`, and yield its service.

    say: prints a line of progress. Raises ValueError or OSError for a model or options that do not
    go together, before weights are read where possible.
    """
    from jmoe.cluster.distributed import check_gpus_found_and_used
    from jmoe.deploy.bundle import OpenBundle, is_bundle
    from jmoe.deploy.model_folder import hugging_face_folder
    from jmoe.inference.engine import Engine
    from jmoe.inference.loading import open_checkpoint, resolve_sequence_length
    from jmoe.models.tokenizer_file import open_tokenizer, tokenizer_file
    from jmoe.serving.service import Service, choose_output_format, templates_starting_in_thread

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
            engine_config = resolve_sequence_length(checkpoint, engine_config)
        name = config.model_name
        templates = stack.enter_context(templates_starting_in_thread(folder, config.max_body_bytes))
        engine = stack.enter_context(Engine(folder, engine_config, say=say))
        yield Service(engine, replace(config, engine=engine_config), folder, name, templates())
