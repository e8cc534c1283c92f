"""Train on eight devices whose experts the host updates, and trace their links.

`python -m tests.training.streamed.traced_links RANK PORT FOLDER` is one of two processes with four
devices each. It writes FOLDER/RANK.json: the losses, and when each of its links was busy.
"""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from jmoe.cluster.distributed import join_processes
from jmoe.config import DistributedConfig, TrainConfig
from jmoe.mesh import ACCUMULATED_BATCH
from jmoe.offload.expert_updates import HostUpdate
from jmoe.training.streamed.step import StreamedTrainer
from tests.arrays import full_state
from tests.links import TracedLink
from tests.model_configs import mesh_of, spread_over
from tests.training.streamed.test_streamed_step import BY_XLA, MODEL, UPDATED_ON_HOST, batch

DEVICES, E, STEPS = 8, 16, 4
BYTES_PER_S = 2e4  # of each direction of a link
EVERY_EXPERT = dataclasses.replace(
    BY_XLA,
    model=dataclasses.replace(MODEL, num_experts=E, num_experts_per_tok=E),
    tiers=dataclasses.replace(UPDATED_ON_HOST, device_layers=1),
    batch_size=8,
)
ONE_PROCESS = spread_over(EVERY_EXPERT, 1, 1, DEVICES)
TWO_PROCESSES = spread_over(EVERY_EXPERT, 1, 2, DEVICES // 2)


class Traced(NamedTuple):
    """The results of a training run. moved: bytes to the devices and back, of the last step. to,
    back: the process's links.
    """

    losses: list[float]
    state: Any
    moved: NDArray[np.int64]
    to: list[TracedLink]
    back: list[TracedLink]


def train(config: TrainConfig) -> Traced:
    """Train; from the second step on, the links are slow and traced if the host updates."""
    mesh = mesh_of(1, max(1, config.mesh.expert_inter), config.mesh.expert_intra)
    place, to, back = NamedSharding(mesh, ACCUMULATED_BATCH), list[TracedLink](), list[TracedLink]()
    with contextlib.closing(StreamedTrainer(config, mesh)) as program:
        state, losses, moved = program.init(), [], []
        experts = program._loaded_experts
        for step in range(STEPS):
            tokens = np.asarray(batch(config, step))
            placed = jax.make_array_from_callback(tokens.shape, place, tokens.__getitem__)
            state, metrics = program.step(state, placed)
            losses.append(float(metrics["loss"]))
            experts._ring.wait_for_loads()  # until the next step begins
            moved.append(program.expert_stats().link)
            if config.tiers.update == "host" and step == 0:
                update = cast(HostUpdate, experts._update)
                to, back = ([TracedLink(BYTES_PER_S) for _ in update.links] for _ in range(2))
                update.links.update(zip(update.links, to, strict=True))
                moved[0] = moved[0]._replace(from_device=0)  # new links count anew
                experts._gradients.links = list(back)
        whole = full_state(program, state) if jax.process_count() == 1 else None
        return Traced(losses, whole, np.subtract(moved[-1], moved[-2]), to, back)


def main(rank: str, port: str, folder: str) -> None:
    join_processes(
        DistributedConfig(
            coordinator_address=f"127.0.0.1:{port}",
            num_processes=2,
            process_id=int(rank),
            start_timeout_s=240,
            heartbeat_timeout_s=240,
        )
    )
    traced = train(TWO_PROCESSES)
    found = {
        "losses": traced.losses,
        "moved": traced.moved.tolist(),
        "to": [link.moments for link in traced.to],
        "back": [link.moments for link in traced.back],
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
