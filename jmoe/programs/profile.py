"""Count which experts a model's tokens choose after which paths, and save the counts beside the
checkpoint.

python -m jmoe.programs.profile MODEL --text FILE

The streaming engine reads them with the estimator "paths"; an engine on several devices places
experts by them.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jmoe.runtime
from jmoe.config import check

if TYPE_CHECKING:
    from jmoe.inference.engine import Engine
    from jmoe.inference.path_table import PathCounter

PATH_LENGTH = 3  # Lina's choice
MAX_TOKENS = 100_000
CHUNK_TOKENS = 2048  # tokens of a prompt that one step runs


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jmoe.programs.profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", help="a Hugging Face folder, or the output folder of a run of train.py"
    )
    parser.add_argument(
        "--text", type=Path, required=True, help="a UTF-8 text like those that will be served"
    )
    parser.add_argument(
        "--path-length",
        type=int,
        default=PATH_LENGTH,
        help="layers of a path (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, help="of the text (default: %(default)s)"
    )
    parser.add_argument(
        "--whole", action="store_true", help="keep all experts of a path, not only its top k"
    )
    parser.add_argument(
        "--max-seq-len",
        type=int,
        help="tokens of a piece of the text; default: 2048, or the model's",
    )
    return parser.parse_args()


def split_tokens(tokens: Sequence[int], length: int) -> Iterator[list[int]]:
    """Yield consecutive pieces of `length` tokens; the last one may be shorter."""
    for start in range(0, len(tokens), length):
        yield list(tokens[start : start + length])


def count_paths(engine: "Engine", prompts: Iterable[list[int]], path_length: int) -> "PathCounter":
    """Run prompts through an engine; return how often tokens chose each expert, by path.

    A prefix that the engine reuses from its KV cache is not run, and so not counted again.
    """
    from jmoe.inference.path_table import PathCounter
    from jmoe.inference.sampling_params import SamplingParams

    config = engine.config
    sizes = (config.num_moe_layers, config.num_experts, config.num_experts_per_tok)
    counter = PathCounter(*sizes, path_length)
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_new_tokens=1, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
        counter.count_step(engine.last_expert_choices())
    return counter


def main() -> None:
    """Write the path table of a text's tokens beside the checkpoint; print the numbers of paths,
    experts and tokens in the table and its size in bytes.
    """
    a = _parse_arguments()
    from jmoe.config.engine import EngineConfig
    from jmoe.deploy.model_folder import hugging_face_folder
    from jmoe.inference.engine import Engine
    from jmoe.inference.path_table import TableHeader
    from jmoe.models.lazy_checkpoint import LazyCheckpoint
    from jmoe.models.tokenizer_file import tokenizer_file

    check(a.max_tokens > 0, "max_tokens", a.max_tokens, "must be greater than 0")
    text = a.text.read_text(encoding="utf-8", errors="replace")
    with hugging_face_folder(a.model, lambda line: print(line, file=sys.stderr), "MODEL") as folder:
        with LazyCheckpoint(folder) as checkpoint:
            fingerprint, config = checkpoint.routing_fingerprint, checkpoint.config
            length = checkpoint.choose_sequence_length(a.max_seq_len)
        sizes = (
            config.num_moe_layers,
            config.num_experts,
            config.num_experts_per_tok,
            a.path_length,
        )
        header = TableHeader(*sizes, kept=config.num_experts, fingerprint=fingerprint, tokens=0)
        tokenizer_file(folder)
        options = EngineConfig(
            max_batch=1, max_seq_len=length, prefill_chunk_tokens=CHUNK_TOKENS, estimator=None
        )
        with Engine(folder, options) as engine:
            assert engine.tokenizer is not None
            tokens = engine.tokenizer.encode(text).ids[: a.max_tokens]
            check(bool(tokens), "text", str(a.text), "must hold at least one token")
            counter = count_paths(
                engine, split_tokens(tokens, engine.max_seq_len - 1), a.path_length
            )
        table = counter.make_table(fingerprint, header.num_experts if a.whole else None)
        file = table.save(folder)
    of = (
        f"{len(table.keys):,} paths of up to {a.path_length} layers, {table.header.kept} experts of"
        " each"
    )
    print(f"{file}: {of}, from {table.header.tokens:,} tokens ({file.stat().st_size:,} bytes)")


if __name__ == "__main__":
    jmoe.runtime.reexec_with_env()
    jmoe.runtime.end_at_once_on_interrupt()
    try:
        main()
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"profile: {error}")
