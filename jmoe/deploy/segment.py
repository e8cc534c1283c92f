"""Distribute a model's layers and experts over unequal devices: python -m jmoe.deploy.segment MODEL
--machines TOML --out FILE.

TOML has one table [[machines]] per machine, in the order of the processes: devices, their number;
device_bytes, free on each device; bytes_per_s, at which a device reads its memory. The optional
table [network] has inside_bytes_per_s, from a device to others of its machine, and
between_bytes_per_s, from a whole machine to others. FILE is the argument of --segments for
jmoe.deploy.bundle and serve.py; it may be edited by hand.
"""

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from jmoe.config import check
from jmoe.config.cluster import read_machines
from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.deploy.model_folder import hugging_face_folder
from jmoe.inference.loading import model_bytes, open_checkpoint
from jmoe.models.safetensors_io import replace_text_durably
from jmoe.planning.segmentation import SegmentBy, SegmentPlan, StepTokens, plan_segments
from jmoe.runtime import end_at_once_on_interrupt

BATCH = 8  # sequences by default, rounded up to a multiple of the number of devices


def segment(
    folder: Path, machines: Path, out: Path, by: SegmentBy | None = None, **options: Any
) -> SegmentPlan:
    """Write the JSON file `out` with the experts that each device holds of each layer; return the
    plan.

    by: experts: every layer is spread over all devices; layers: each layer is on one device; both:
    each layer is spread over the devices of one machine; None: the way whose decoding step (one
    token per sequence) is shortest. options: fields of `EngineConfig` for serving; its number of
    devices is that of the machines. Raises ValueError naming the machine or the option, before
    anything is written.
    """
    check(not out.exists(), "out", str(out), "must not be there yet: nothing is written over")
    check(out.parent.is_dir(), "out", str(out), f"must be in a folder, which {out.parent} is not")
    described = read_machines(machines)
    devices = sum(one.devices for one in described.machines)
    check(devices > 1, "machines", str(machines), "has one device: must have several")
    defaults: dict[str, Any] = {
        "max_batch": -(-BATCH // devices) * devices,
        "mesh": EngineMesh(devices=devices),
    }
    engine = EngineConfig(**(defaults | options))
    with open_checkpoint(folder, engine) as checkpoint:
        engine = replace(engine, max_seq_len=checkpoint.choose_sequence_length(engine.max_seq_len))
        token_bytes = checkpoint.config.hidden_size * np.dtype(checkpoint.dtype).itemsize
        tokens = StepTokens(engine.max_batch, token_bytes)
        plan = plan_segments(model_bytes(checkpoint, engine), described, tokens, by)
    replace_text_durably(out, json.dumps({"segments": plan.segments()}) + "\n")
    return plan


def main(arguments: list[str]) -> None:
    """Write the placement of experts that the command line asks for, and print it."""
    parser = argparse.ArgumentParser(
        prog="python -m jmoe.deploy.segment",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a Hugging Face folder, or the output folder of a run"
    )
    parser.add_argument(
        "--machines", required=True, type=Path, help="what the devices are, in TOML"
    )
    parser.add_argument(
        "--out", required=True, type=Path, help="the file to write, which must not be there"
    )
    parser.add_argument(
        "--by",
        choices=get_args(SegmentBy),
        help="what is split; default: what has the shortest step",
    )
    parser.add_argument(
        "--max-batch", type=int, help="sequences that will run at once; default: 8 or more"
    )
    parser.add_argument(
        "--max-seq-len", type=int, help="tokens of one; default: 2048, or the model's positions"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of weights and cache; default: as stored"
    )
    options = {
        name: value
        for name, value in vars(parser.parse_args(arguments)).items()
        if value is not None
    }
    model, machines, out, by = (
        options.pop(name, None) for name in ("model", "machines", "out", "by")
    )
    with hugging_face_folder(model, partial(print, flush=True), "MODEL") as folder:
        plan = segment(folder, machines, out, by, **options)
    for place in plan.places:
        print(
            f"{place.layers} layers with {', '.join(map(str, place.experts_N))} experts on the"
            " devices"
        )
    print(
        f"{out}: by {plan.by}, {plan.device_bytes / 1e6:,.1f} MB on each device; experts of a step"
        f" are read in {plan.read_s * 1e6:,.3g} us, its tokens sent in {plan.link_s * 1e6:,.3g}"
    )


if __name__ == "__main__":
    end_at_once_on_interrupt()
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"segment: {error}")
