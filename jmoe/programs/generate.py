"""Continue a prompt with the model in a folder, and report where its experts were.

python -m jmoe.programs.generate MODEL 'def f(' --policy ring --ring-slots 2
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import jmoe.runtime

SHORTEST_CACHE = 512  # positions


def parse_arguments() -> argparse.Namespace:
    from kernels_pallas.formats import EXPERT_DTYPES, describe_bits_per_weight

    parser = argparse.ArgumentParser(
        prog="python -m jmoe.programs.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", help="a Hugging Face folder, or the output folder of a run of train.py"
    )
    parser.add_argument("prompt")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--policy", choices=("auto", "resident", "ring", "experts", "hybrid"), default="auto"
    )
    parser.add_argument(
        "--ring-slots", type=int, help="layers on the device at once, of policy ring; default: half"
    )
    parser.add_argument("--device-bytes", type=int, help="for experts on the device")
    parser.add_argument(
        "--expert-dtype",
        choices=EXPERT_DTYPES,
        help=f"of the experts' matrices: wide, {describe_bits_per_weight()};"
        " default: as serve.py's",
    )
    return parser.parse_args()


def encode_prompt(folder: Path, prompt: str, max_new_tokens: int) -> list[int]:
    """Return the prompt's token ids.

    Raises ValueError if the prompt is empty, or if prompt and output exceed the model's positions.
    """
    from jmoe.config import check
    from jmoe.models.lazy_checkpoint import LazyCheckpoint
    from jmoe.models.tokenizer_file import open_tokenizer, tokenizer_file

    with LazyCheckpoint(folder) as checkpoint:
        limit = checkpoint.max_positions
    ids: list[int] = open_tokenizer(tokenizer_file(folder)).encode(prompt).ids
    check(bool(ids), "prompt", prompt, "must hold at least one token")
    shortened = prompt if len(prompt) <= 40 else prompt[:37] + "..."
    check(
        len(ids) < limit,
        "prompt",
        shortened,
        f"has {len(ids)} tokens; the model has {limit} positions",
    )
    room = (
        f"must be at most {limit - len(ids)}: the prompt has {len(ids)} tokens and the model"
        f" {limit} positions"
    )
    check(len(ids) + max_new_tokens <= limit, "max_new_tokens", max_new_tokens, room)
    return ids


def bucketed_cache_length(folder: Path, num_tokens: int) -> int:
    """Return the positions of a cache for `num_tokens`: a power of two, but at most the model's
    positions.

    Prompts of other lengths then run the same programs, which they find compiled.
    """
    from jmoe.models.lazy_checkpoint import LazyCheckpoint

    with LazyCheckpoint(folder) as checkpoint:
        limit = checkpoint.max_positions
    return min(limit, 1 << (max(SHORTEST_CACHE, num_tokens) - 1).bit_length())


def main() -> None:
    """Print the prompt and its continuation, and the engine's statistics on stderr."""
    a = parse_arguments()
    jmoe.runtime.import_ahead("jmoe.inference.engine")
    from jmoe.config.engine import EngineConfig
    from jmoe.deploy.model_folder import hugging_face_folder
    from jmoe.inference.engine import Engine
    from jmoe.inference.sampling_params import SamplingParams
    from jmoe.status import status

    sampling = SamplingParams(
        max_new_tokens=a.max_new_tokens, temperature=a.temperature, seed=a.seed
    )
    say = partial(print, file=sys.stderr, flush=True)
    with hugging_face_folder(a.model, say, "MODEL") as folder:
        ids = encode_prompt(folder, a.prompt, a.max_new_tokens)
        config = EngineConfig(
            max_batch=1,
            max_seq_len=bucketed_cache_length(folder, len(ids) + a.max_new_tokens),
            policy=a.policy,
            ring_slots=a.ring_slots,
            device_bytes=a.device_bytes,
            expert_dtype=a.expert_dtype,
        )
        with Engine(folder, config, say=say) as engine:
            with status("compiling and generating", say):
                (completion,) = engine.generate([ids], sampling)
            stats = engine.stats()
    print(a.prompt + completion.text)
    of = engine.config.num_moe_layers * engine.config.num_experts
    print(
        f"\n{len(completion.token_ids)} tokens in {stats.step_s:.2f} s; policy {stats.policy}:"
        f" {engine.residency.num_slots} of {of} experts on the device"
        f" ({stats.device_expert_bytes / 1e6:.1f} MB), {stats.bytes_per_token / 1e6:.2f} MB copied"
        " to it a token",
        file=sys.stderr,
    )


if __name__ == "__main__":
    jmoe.runtime.reexec_with_env()  # before other imports, which would be done twice
    jmoe.runtime.end_at_once_on_interrupt()
    try:
        main()
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"generate: {error}")
