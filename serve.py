"""Serve a Mixture-of-Experts model over HTTP, as OpenAI's API: python serve.py MODEL [--option
VALUE ...].

MODEL is a Hugging Face folder, a GGUF file, the output folder of a run of train.py, or a bundle of
jmoe.deploy.bundle.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jmoe.runtime import (
    end_at_once_on_interrupt,
    first_missing_package,
    hide_devices,
    ignore_output_errors,
    import_ahead,
    log_to_stderr,
    program_name,
    reexec_with_env,
)
from jmoe.serving import PACKAGES

if TYPE_CHECKING:
    from jmoe.config.engine import EngineConfig
    from jmoe.config.serving import ServeConfig
    from jmoe.deploy.bundle import OpenBundle
    from jmoe.inference.mesh.lockstep import Follower, Leader
    from jmoe.serving.api_keys import ApiKeys

say = partial(print, flush=True)


def run(arguments: Sequence[str]) -> None:
    """Serve the model that the command line names until a signal arrives; process 0 answers
    requests, other processes follow it.
    """
    from jmoe.command_line import parse_serve

    run_config(parse_serve(arguments))


def run_config(config: ServeConfig) -> None:
    """Serve as `config` says until a signal arrives."""
    from jmoe.cluster.distributed import check_gpus_found_and_used, start_jax_backend
    from jmoe.cluster.job import describe_hosts
    from jmoe.config import check
    from jmoe.deploy.model_folder import hugging_face_folder
    from jmoe.inference.mesh.lockstep import Follower, join_lockstep
    from jmoe.mesh import device_counts_of_hosts
    from jmoe.serving.api_keys import ApiKeys

    api_keys = ApiKeys(config.api_key_file)
    with contextlib.ExitStack() as stack:
        role = None
        if not (config.dry_run or config.estimate):
            role = stack.enter_context(
                join_lockstep(config.distributed) or contextlib.nullcontext()
            )
        if role is not None:
            say(describe_hosts(device_counts_of_hosts()))
        merged = role is None or not (Path(config.model).expanduser() / "checkpoints").is_dir()
        check(
            merged,
            "model",
            config.model,
            "must be a Hugging Face folder; python -m jmoe.deploy.merge makes one",
        )
        opened = open_bundle(config)
        if opened is not None:
            stack.enter_context(opened)
            config = replace(config, engine=opened.engine)
        if config.dry_run:
            start_jax_backend()
        else:
            check_gpus_found_and_used(config.distributed, config.engine.mesh.devices)
        if opened is not None:
            folder = opened.model
        else:
            cache_dir = config.engine.cache_dir
            folder = stack.enter_context(
                hugging_face_folder(config.model, say, cache_dir=cache_dir)
            )
        if isinstance(role, Follower):
            run_follower(config, folder, role)
        elif config.estimate:
            print_estimate(config, folder)
        else:
            serve(config, api_keys, folder, leader=role, programs=opened)


def open_bundle(config: ServeConfig) -> OpenBundle | None:
    """Return the verified bundle that `config.model` names, None if the model is a folder.

    Raises ValueError for options that do not go with a bundle, or that need one.
    """
    from jmoe.config import check
    from jmoe.deploy.bundle import OpenBundle, is_bundle
    from jmoe.status import status

    checks_contents = config.check_files == "contents"
    if not is_bundle(config.model):
        check(
            checks_contents,
            "check_files",
            config.check_files,
            "must be contents: the model is not a bundle",
        )
        return None
    check(not config.engine.lora, "lora", config.engine.lora, "must be empty with a bundle")
    whole = "must be a model, not a bundle, whose programs are for another device, with estimate"
    check(not config.estimate, "model", config.model, whole)
    with status(f"checking the files of {config.model}", say):
        return OpenBundle(config.model, config.engine, check_contents=checks_contents)


def print_estimate(config: ServeConfig, folder: Path) -> None:
    """Print the predicted step times and memory of the engine on the GPU `config.estimate`, which
    this machine need not have.
    """
    from jmoe.inference.engine_estimate import estimate_engine
    from jmoe.inference.loading import open_checkpoint, resolve_sequence_length
    from jmoe.status import status

    with open_checkpoint(folder, config.engine) as checkpoint:  # the headers alone
        engine = config.engine
        if engine.max_seq_len is None and engine.cache_tokens is None:
            engine = replace(engine, max_seq_len=checkpoint.choose_sequence_length(None))
        engine = resolve_sequence_length(checkpoint, engine)
        with status(f"compiling the engine's programs for {config.estimate}", say):
            print(estimate_engine(checkpoint, engine, config.estimate))


def run_follower(config: ServeConfig, folder: Path, follower: Follower) -> None:
    """Load this process's shards of the model, and run the steps that process 0 sends until it
    ends.
    """
    from jmoe.inference.loading import LoadedModel

    with LoadedModel(folder, config.engine, say=say) as model:
        say("following process 0")
        follower.run_leader_calls(model.runner)
    say("stopped")


def resolve_and_print_engine_config(
    config: ServeConfig, folder: Path, model_name: str
) -> EngineConfig:
    """Return the engine's options with `max_seq_len` set; print how many sequences of which length
    the engine takes and the model's sampling defaults.
    """
    from jmoe.inference.loading import open_checkpoint, plan_engine_memory, resolve_sequence_length

    with open_checkpoint(folder, config.engine) as checkpoint:  # the headers alone
        engine_config = resolve_sequence_length(checkpoint, config.engine)
        plan_engine_memory(checkpoint, engine_config)  # refuses what does not fit
        positions = checkpoint.max_positions
    print_capacity_and_sampling_defaults(config, folder, model_name, engine_config, positions)
    return engine_config


def print_capacity_and_sampling_defaults(
    config: ServeConfig, folder: Path, model_name: str, engine_config: EngineConfig, positions: int
) -> None:
    """Print how many sequences of which length the engine takes, and the model's sampling
    defaults. positions: of the model.
    """
    from jmoe.config.engine import CACHE_BLOCK
    from jmoe.serving.model_sampling import ModelSamplingDefaults

    length = engine_config.max_seq_len
    sampling = ModelSamplingDefaults.read(folder, config.sampling_defaults)
    say(
        f"{model_name} from {folder}: {engine_config.max_batch} sequences at once, {length:,}"
        f" tokens each, {engine_config.num_cache_blocks() * CACHE_BLOCK:,} in the cache"
    )
    if config.engine.max_seq_len is None and length != positions:
        say(
            f"the model has {positions:,} positions; --max-seq-len allows longer sequences,"
            " --cache-tokens sets the memory of all together"
        )
    say(str(sampling))


def print_dry_run(config: ServeConfig, folder: Path, model_name: str) -> None:
    """Print the memory plan and the tokens/s expected; the folder need not have the weights."""
    from jmoe.inference.dry_run import plan_dry_run
    from jmoe.models.announced import has_all_weights, read_announced
    from jmoe.models.lazy_checkpoint import LazyCheckpoint

    engine, announced = config.engine, None
    if not has_all_weights(folder):
        announced = read_announced(folder)
        announced.check_complete(folder)
    checkpoint = LazyCheckpoint(folder, engine.dtype, engine.expert_dtype, announced=announced)
    with checkpoint:
        planned = plan_dry_run(checkpoint, engine, config.machine)
        print_capacity_and_sampling_defaults(
            config, folder, model_name, planned.options, checkpoint.max_positions
        )
    if announced is not None:
        say("not all weights are here: sizes are those that config.json implies")
    print(planned)


def serve(
    config: ServeConfig,
    api_keys: ApiKeys,
    folder: Path,
    *,
    leader: Leader | None = None,
    programs: OpenBundle | None = None,
) -> None:
    """Plan the memory of the model in `folder` (a Hugging Face folder), load the model, and answer
    HTTP requests.

    leader: sends the engine's steps to other processes. programs: compiled programs of an opened
    bundle.
    """
    import jmoe
    from jmoe.inference.engine import Engine
    from jmoe.inference.mesh.lockstep import print_and_exit
    from jmoe.models.tokenizer_file import open_tokenizer, tokenizer_file
    from jmoe.serving.api_keys import RELOAD_S
    from jmoe.serving.app import make_app
    from jmoe.serving.http_server import HttpServer, allow_open_files, bind_socket
    from jmoe.serving.reload import Reloader
    from jmoe.serving.service import Service, choose_output_format, templates_starting_in_thread
    from jmoe.serving.tracing import check_otel_installed
    from jmoe.status import call_repeatedly

    check_otel_installed(config.otlp_traces_endpoint)
    name = config.model_name
    if config.dry_run:
        print_dry_run(config, folder, name)
        return
    engine_config = resolve_and_print_engine_config(config, folder, name)
    tokenizer = tokenizer_file(folder, "model")
    # report a damaged tokenizer or template before weights are read
    output_format = choose_output_format(
        folder, open_tokenizer(tokenizer), config.tool_parser, config.reasoning_parser
    )
    if output_format.template:
        say(str(output_format))
    allow_open_files(config.max_connections)
    listening = bind_socket(config.host, config.port)
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    with (
        templates_starting_in_thread(folder, config.max_body_bytes) as templates,
        # a link may lead elsewhere when the engine reads an expert
        Engine(folder.resolve(), engine_config, leader=leader, say=say) as engine,
    ):
        if programs is not None:
            engine.on_prepared = lambda: say(str(programs))
        service = Service(engine, config, folder, name, templates())
        app = make_app(service, api_keys, jmoe.__version__)
        newest = partial(open_newest_weights, config, one_process=leader is None, bundle=programs)
        reloader = Reloader(service.loop, folder, engine_config, newest, say)
        announce = partial(say, f"serving {url} (the API under {url}/v1)")
        server = HttpServer(app, service.loop, config, announce, reloader.request_reload)
        with call_repeatedly(api_keys.reload, RELOAD_S) if api_keys else contextlib.nullcontext():
            server.run(sockets=[listening])
        end_at_once_on_interrupt()  # asyncio has restored Python's handler
        if service.loop.lost_process.is_set():
            # other threads may wait for the lost process forever
            print_and_exit("ends: another process of the engine was lost")
    say("stopped" if programs is None else f"stopped; {programs}")


def open_newest_weights(
    config: ServeConfig, *, one_process: bool, bundle: OpenBundle | None
) -> contextlib.AbstractContextManager[Path]:
    """Return a context that yields the Hugging Face folder of the model's newest weights.

    Those of a run are its newest step, merged by another process.

    Raises ValueError if a server's weights cannot be replaced.
    """
    from jmoe.deploy.model_folder import hugging_face_folder, merge_in_subprocess

    if not one_process or bundle is not None:
        what = "a bundle" if bundle is not None else "a model on several processes"
        raise ValueError(f"{what} is not loaded again: start the server again")
    if config.engine.lora:
        words = "adapters belong to the weights that they were trained on: start the server again"
        raise ValueError(f"lora = {config.engine.lora}: {words}")
    if (Path(config.model).expanduser() / "checkpoints").is_dir():
        merge_in_subprocess(config.model, "model")
    return hugging_face_folder(config.model, say, cache_dir=config.engine.cache_dir)


def main() -> None:
    """Run the program. `--help` and mistakes are answered before JAX is imported."""
    reexec_with_env()  # before other imports, which would be done twice
    from jmoe.command_line import parse_serve, parse_with_default_sigpipe

    end_at_once_on_interrupt()  # until it serves
    config = parse_with_default_sigpipe(lambda: parse_serve(sys.argv[1:]))
    if (package := first_missing_package(PACKAGES)) is not None:
        sys.exit(
            f"{program_name()}: needs the package {package}, which is not installed: pip install"
            " 'jmoe[serve]'"
        )
    if config.estimate:
        hide_devices()
    else:
        import_ahead("jmoe.inference.engine", "jmoe.serving.app", "jmoe.serving.http_server")
    ignore_output_errors()
    log_to_stderr()
    try:
        run_config(config)
    except (ValueError, OSError) as error:
        sys.exit(f"{program_name()}: {error}")


if __name__ == "__main__":
    main()
