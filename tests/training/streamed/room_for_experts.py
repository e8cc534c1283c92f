"""Train with room on the device for all experts of a layer and for a share, and compare bit for
bit.

`python -m tests.training.streamed.room_for_experts CASE SHARE FOLDER` prints one JSON object. A
process of its own, since XLA's older emitters, with which the tests compile
(`tests.processes.QUICK_XLA_FLAGS`), round the same fused loop over another number of experts in
another way.
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax

from jmoe.config import CommConfig, MeshConfig, TiersConfig, TrainConfig
from tests.arrays import differing
from tests.model_configs import MODEL, stored_in
from tests.training.streamed.test_streamed_step import CONFIG, HOST, train

E = 32
# 16 tokens, one expert each
MANY = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, num_experts=E))
EIGHT = dataclasses.replace(MANY, batch_size=16, sequence_length=4)
NVME = TiersConfig("nvme", "nvme", "nvme", host_cache_bytes=300_000)
CASES: dict[str, tuple[TrainConfig, TiersConfig]] = {
    "host": (MANY, HOST),
    "nvme": (MANY, NVME),
    "nodes": (
        dataclasses.replace(
            EIGHT,
            mesh=MeshConfig(1, 2, 4),
            comm=CommConfig(exchange="dedup", schedule="pipelined", chunk_bytes=1000),
        ),
        HOST,
    ),
    "replicas": (
        dataclasses.replace(
            EIGHT,
            mesh=MeshConfig(2, 2, 2),
            comm=CommConfig(schedule="priority"),
            gradient_accumulation_steps=2,
        ),
        HOST,
    ),
    "bfloat16": (
        dataclasses.replace(
            EIGHT, mesh=MeshConfig(2, 1, 4), remat="layer", compute_dtype="bfloat16"
        ),
        HOST,
    ),
    # where the processor has them
    "native operations": (
        dataclasses.replace(
            EIGHT,
            model=dataclasses.replace(EIGHT.model, hidden_size=64, moe_intermediate_size=32),
            mesh=MeshConfig(1, 2, 4),
            compute_dtype="bfloat16",
        ),
        HOST,
    ),
}


def main(case: str, share: str, folder: str) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    config, tiers = CASES[case]
    whole = train(config, stored_in(tiers, Path(folder) / "all"), steps=4)
    part = train(
        config,
        stored_in(tiers, Path(folder) / "share", device_experts=float(share)),
        steps=4,
        reopen_after=2,
    )
    result = {
        "same_losses": (part.losses, part.held_out) == (whole.losses, whole.held_out),
        "differing": differing(part.state, whole.state),
        "chosen_share": whole.stats.chosen_share,
        "most_chosen_share": part.stats.most_chosen_share,
        "room": part.stats.room,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
