"""Train a Mixture-of-Experts language model: python train.py PRESET [--section.field VALUE ...]."""

from jmoe.runtime import start_anew

if __name__ == "__main__":
    start_anew()  # before JAX is imported

import dataclasses
import difflib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from jax.sharding import Mesh, NamedSharding

from configs import PRESETS
from jmoe.config import TrainConfig
from jmoe.mesh import ACCUMULATED_BATCH, make_mesh
from jmoe.training import distributed
from jmoe.training.checkpoint import Checkpoints
from jmoe.training.corpus import Corpus, prepare
from jmoe.training.data import TrainBatches, train_batches, unigram_bits_per_byte, xz_bits_per_byte
from jmoe.training.evaluation import held_out_loss, sample_text
from jmoe.training.metrics import MetricsLog, ProgressLine
from jmoe.training.report import print_summary, write_report
from jmoe.training.step import Program, TrainState, make_program


def parse(arguments: Sequence[str]) -> TrainConfig:
    """The preset named first, with the options that follow."""
    if arguments and not arguments[0].startswith("-") and arguments[0] not in PRESETS:
        near = difflib.get_close_matches(arguments[0], PRESETS, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]}?" if near else ""
        sys.exit(f"train.py: no preset is named {arguments[0]!r}{hint} Presets: {', '.join(PRESETS)}")
    config = tyro.extras.overridable_config_cli(PRESETS, args=arguments, prog="train.py", description=__doc__)
    return dataclasses.replace(config, output_dir=config.output_dir or f"runs/{arguments[0]}")


def put_batch(rows: np.ndarray, config: TrainConfig, mesh: Mesh) -> jax.Array:
    """This process's rows [b, S + 1] as its part of a global [accumulation steps, B, S + 1]."""
    local = rows.reshape(config.gradient_accumulation_steps, -1, rows.shape[-1])
    return jax.make_array_from_process_local_data(NamedSharding(mesh, ACCUMULATED_BATCH), local)
