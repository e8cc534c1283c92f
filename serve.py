"""Serve a Mixture-of-Experts model over HTTP, as OpenAI's API: python serve.py MODEL [--option VALUE ...].

MODEL is a Hugging Face folder, or the output folder of a run of train.py.
"""

import sys

from jmoe.command_line import answer_early, parse_serve
from jmoe.runtime import end_at_once_on_interrupt, start_anew

if __name__ == "__main__":
    start_anew()  # before JAX is imported
    end_at_once_on_interrupt()  # until it serves
    answer_early(lambda: parse_serve(sys.argv[1:]))

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import jmoe
from jmoe.config import check
from jmoe.config.serving import ServeConfig
from jmoe.deploy.exported import hugging_face_folder
from jmoe.inference.engine import Engine
from jmoe.inference.expert_tiers import memory_plan
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.planning.capacity import MemoryPlan
from jmoe.serving.app import make_app, make_service
from jmoe.serving.http_server import HttpServer, bind
from jmoe.serving.middleware import read_api_keys
from jmoe.status import status


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def plan(folder: Path, config: ServeConfig) -> tuple[MemoryPlan, ServeConfig]:
    """What will lie where, by the headers alone, and the settings with the length that the model allows."""
    with LazyCheckpoint(folder, config.dtype) as checkpoint:
        config = dataclasses.replace(config, max_seq_len=checkpoint.sequence_length(config.max_seq_len))
        memory = memory_plan(
            checkpoint,
            max_batch=config.max_batch,
            max_seq_len=config.max_seq_len,
            policy=config.policy,
            ring_slots=config.ring_slots,
            device_bytes=config.device_bytes,
            expert_tier=config.expert_tier,
            host_cache_bytes=config.host_cache_bytes,
        )
    check((folder / "tokenizer.json").is_file(), "model", str(folder), "must hold a tokenizer.json")
    return memory, config


def load(folder: Path, config: ServeConfig) -> Engine:
    """The engine, ready for requests."""
    return Engine.from_pretrained(
        folder,
        max_batch=config.max_batch,
        max_seq_len=config.max_seq_len,
        policy=config.policy,
        ring_slots=config.ring_slots,
        device_bytes=config.device_bytes,
        expert_tier=config.expert_tier,
        host_cache_bytes=config.host_cache_bytes,
        cache_dir=config.cache_dir,
        dtype=config.dtype,
        estimator=config.estimator,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        max_prefill_tokens=config.max_prefill_tokens,
    )


def main(arguments: Sequence[str]) -> None:
    """Plan, load, serve."""
    config = parse_serve(arguments)
    api_keys = read_api_keys(config.api_key_file)
    with hugging_face_folder(config.model, say) as folder:
        serve(config, api_keys, folder)


def serve(config: ServeConfig, api_keys: list[str], folder: Path) -> None:
    """Serve the model in a Hugging Face folder, until a signal ends it."""
    name = config.served_model_name or Path(config.model).expanduser().resolve().name
    memory, config = plan(folder, config)
    print(f"{name} from {folder}: {config.max_batch} sequences at once, {config.max_seq_len:,} tokens each", flush=True)
    if config.dry_run:
        print(memory)
        return
    listening = bind(config.host, config.port)
    host, port = listening.getsockname()[:2]
    with status(f"loading {folder}", say):
        loaded = load(folder, config)
    with loaded as engine:
        with status("compiling", say):
            service = make_service(engine, config, folder, name)
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        server = HttpServer(
            make_app(service, api_keys, jmoe.__version__),
            service.loop,
            config,
            lambda: print(f"serving {url} (the API under {url}/v1)", flush=True),
        )
        server.run(sockets=[listening])
        end_at_once_on_interrupt()  # asyncio has put Python's handler back
    print("stopped", flush=True)


if __name__ == "__main__":
    # force: a library imported here has set handlers of its own
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger("jmoe").setLevel(logging.INFO)
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"serve.py: {error}")
