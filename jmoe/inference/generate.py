"""Continue a prompt with the model in a folder, and say where its experts were.

python -m jmoe.inference.generate FOLDER 'def f(' --policy ring --ring-slots 2
"""

import argparse
import sys
from pathlib import Path

import jmoe.runtime


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jmoe.inference.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", type=Path, help="a Hugging Face folder, such as `python -m jmoe.training.export` writes"
    )
    parser.add_argument("prompt")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", choices=("auto", "resident", "ring", "experts"), default="auto")
    parser.add_argument("--ring-slots", type=int, help="layers on the device at once, of policy ring; default: half")
    parser.add_argument("--device-bytes", type=int, help="for experts on the device")
    return parser.parse_args()


def main() -> None:
    a = arguments()
    from jmoe.inference.engine import Engine

    engine = Engine.from_pretrained(
        a.folder, max_batch=1, max_seq_len=1024, policy=a.policy, ring_slots=a.ring_slots, device_bytes=a.device_bytes
    )
    with engine:
        options = {"max_new_tokens": a.max_new_tokens, "temperature": a.temperature, "seed": a.seed}
        (completion,) = engine.generate([a.prompt], **options)
        stats = engine.stats()
    print(a.prompt + completion.text)
    of = engine.config.num_moe_layers * engine.config.num_experts
    print(
        f"\n{len(completion.token_ids)} tokens in {stats.step_s:.2f} s; policy {stats.policy}: "
        f"{engine.residency.slots.num_slots} of {of} experts on the device ({stats.device_expert_bytes / 1e6:.1f} MB), "
        f"{stats.bytes_per_token / 1e6:.2f} MB copied to it a token",
        file=sys.stderr,
    )


if __name__ == "__main__":
    jmoe.runtime.start_anew()
    jmoe.runtime.end_at_once_on_interrupt()
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"generate: {error}")
