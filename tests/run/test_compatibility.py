"""Which settings may change between a checkpoint and the run that resumes from it."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from jmoe.config import (
    CheckpointConfig,
    CommConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RouterConfig,
    TiersConfig,
    TrainConfig,
)
from jmoe.config.distil import DistilConfig
from jmoe.configs.ufo import ufo_tiny
from jmoe.run.compatibility import check_and_list_differences
from tests.train_runs import Start, free_port

CONFIG = TrainConfig(num_steps=7)

# A process of two: RANK PORT LEARNING_RATE CODE
STARTING = """
import sys
import jax
from jmoe.cluster import processes
from jmoe.cluster.distributed import join_processes
from jmoe.config import DataConfig, DistributedConfig, OptimizerConfig, TrainConfig
from jmoe.run import compatibility

rank, port, rate, code = sys.argv[1:]
limits = DistributedConfig(
    coordinator_address=f"127.0.0.1:{port}", num_processes=2, process_id=int(rank))
join_processes(limits)
processes._hash_of_code = lambda own=processes._hash_of_code: own() + code
config = TrainConfig(
    optimizer=OptimizerConfig(learning_rate=float(rate)), output_dir=rank, distributed=limits,
    data=DataConfig(path=(rank,), tokenizer=rank, chat_template=rank))
try:
    compatibility.check_same_on_all_processes(config)
    print("the same")
except ValueError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize(
    ("rate", "code", "said"),
    [
        ("0.001", "", "^the same$"),
        ("0.002", "", r"\(process 0 -> 1\): optimizer.learning_rate: 0.001 -> 0.002$"),
        ("0.001", "x", r"\(process 0 -> 1\): code.jmoe: '(\w{16})' -> '\1x'$"),
    ],
)
def test_processes_with_other_options_or_code(
    tmp_path: Path, start_python: Start, rate: str, code: str, said: str
) -> None:
    """Every process says so at once; they would wait for each other, or compute something else."""
    port = free_port()
    ranks = [
        start_python(["-c", STARTING, rank, port, *options], tmp_path / f"{rank}.log")
        for rank, options in enumerate([("0.001", ""), (rate, code)])
    ]
    for rank in ranks:
        assert re.search(said, rank.end(240), re.MULTILINE), rank.screen


def configured(**changes: Any) -> dict[str, Any]:
    return dict(json.loads(dataclasses.replace(CONFIG, **changes).to_json()))


def test_what_may_change_between_checkpoint_and_run() -> None:
    free = configured(
        output_dir="elsewhere",
        mesh=MeshConfig(expert_intra=2),
        checkpoint=CheckpointConfig(every_steps=3),
        remat="layer",
        tiers=TiersConfig(chosen_share=0.5),
    )
    assert check_and_list_differences(configured(), configured()) == []
    assert check_and_list_differences(configured(), free) == []
    notes = check_and_list_differences(configured(), configured(num_steps=9))
    assert notes == ["num_steps: 7 -> 9 (a cosine schedule now ends at another step)"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model": ModelConfig(hidden_size=512)}, "model.hidden_size: 256 -> 512"),
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"batch_size": 16, "num_steps": 8}, "batch_size: 8 -> 16"),
        ({"sequence_length": 128}, "sequence_length: 256 -> 128"),
    ],
)
def test_what_must_not_change(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)) as caught:
        check_and_list_differences(configured(), configured(**changes))
    assert "num_steps" not in str(caught.value)


def test_a_field_that_the_checkpoint_does_not_know_has_its_default() -> None:
    saved = configured()
    del saved["model"]["router"]["n_group"], saved["seed"]
    assert check_and_list_differences(saved, configured()) == []
    with pytest.raises(ValueError, match="seed: 0 -> 1"):
        check_and_list_differences(saved, configured(seed=1))


def test_a_fingerprint_stands_for_the_data() -> None:
    saved, now = configured(), configured()
    now["data"] = {**now["data"], "path": ["/moved/text"]}
    with pytest.raises(ValueError, match=r"data.path: \[\] -> \['/moved/text'\]"):
        check_and_list_differences(saved, now)
    assert (
        len(
            check_and_list_differences(
                {**saved, "data_fingerprint": "a"}, {**now, "data_fingerprint": "a"}
            )
        )
        == 1
    )
    template = configured()
    template["data"] = {**template["data"], "chat_template": "/moved/chat.jinja"}
    (note,) = check_and_list_differences(
        {**saved, "data_fingerprint": "a"}, {**template, "data_fingerprint": "a"}
    )
    assert note.endswith("'/moved/chat.jinja' (the tokens are the same)")
    changed = {**now, "data_fingerprint": "b"}
    with pytest.raises(
        ValueError,
        match=r"the data has changed .*: data.path: \[\] -> \['/moved/text'\]; give the text",
    ):
        check_and_list_differences({**saved, "data_fingerprint": "a"}, changed)
    with pytest.raises(
        ValueError, match=r"the data has changed .*: data.path = \[\] names other text now"
    ):
        check_and_list_differences(
            {**saved, "data_fingerprint": "a"}, {**saved, "data_fingerprint": "b"}
        )


def test_a_fingerprint_stands_for_the_teacher() -> None:
    """Other weights under the same path are refused; the same ones may lie elsewhere, or be
    unknown as of old.
    """
    saved, moved = (
        configured(distil=DistilConfig(teacher=place)) for place in ("teacher", "moved")
    )
    a, b = {"teacher_fingerprint": "a"}, {"teacher_fingerprint": "b"}
    with pytest.raises(ValueError, match=r"distil\.teacher: 'teacher' -> other weights"):
        check_and_list_differences(saved | a, saved | b)
    assert (
        check_and_list_differences(saved, saved | a)
        == check_and_list_differences(saved | a, saved | a)
        == []
    )
    (note,) = check_and_list_differences(saved | a, moved | a)
    assert note == "distil.teacher: 'teacher' -> 'moved' (the teacher itself is the same)"
    for before, now in ((saved, moved | a), (saved | a, moved | b)):
        with pytest.raises(ValueError, match=r"distil\.teacher: 'teacher' -> 'moved'"):
            check_and_list_differences(before, now)


def test_fields_of_earlier_versions_are_understood() -> None:
    """Communication was part of the mesh, and had flags that only benchmarks turned."""
    saved = configured(mesh=MeshConfig(expert_intra=2))
    del saved["comm"], saved["plan"]
    saved["mesh"] |= {
        "exchange": "two_level",
        "two_level": True,
        "shard_dense": True,
        "fuse_dense": True,
    }
    saved["mesh"] |= {
        "schedule": "chunks",
        "bucket_bytes": 0,
        "chunk_bytes": 4096,
        "embedding": "auto",
    }
    saved["tiers"] |= {"beta": 0.8, "decay_every_steps": 4}
    saved["data"]["num_threads"] = 2
    assert check_and_list_differences(saved, configured(comm=CommConfig(schedule="ready"))) == []
    with pytest.raises(ValueError, match="seed: 0 -> 1"):
        check_and_list_differences(saved, configured(seed=1))


def test_tasks_may_end_at_another_step() -> None:
    config = json.loads(ufo_tiny.to_json())
    before = json.loads(ufo_tiny.to_json())
    for task in before["tasks"].values():  # as saved when tasks could not end
        del task["num_steps"]
    assert check_and_list_differences(before, config) == []
    config["tasks"]["fonts"]["num_steps"] = 9
    config["elastic"]["max_imbalance"] = 1.5
    (note,) = check_and_list_differences(before, config)
    assert note.startswith("tasks.fonts.num_steps: 0 -> 9 (the task takes part until another step")
    config["tasks"]["fonts"]["batch_size"] = 8
    with pytest.raises(ValueError, match=r"tasks\.fonts\.batch_size: 16 -> 8"):
        check_and_list_differences(before, config)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"optimizer": OptimizerConfig(learning_rate=0.5)},
            "optimizer.learning_rate: 0.001 -> 0.5 (from here on)",
        ),
        (
            {"optimizer": OptimizerConfig(warmup_steps=5)},
            "optimizer.warmup_steps: 100 -> 5 (the schedule is",
        ),
        ({"optimizer": OptimizerConfig(beta2=0.9)}, "optimizer.beta2: 0.95 -> 0.9 (from here on)"),
        (
            {"model": ModelConfig(capacity_factor=1.5)},
            "model.capacity_factor: None -> 1.5 (from here on)",
        ),
        (
            {"model": ModelConfig(router=RouterConfig(aux_loss_coef=0.1))},
            "model.router.aux_loss_coef: 0.01 -> 0.1 (from here on)",
        ),
    ],
)
def test_what_the_next_steps_go_by_may_change(changes: dict[str, Any], line: str) -> None:
    (note,) = check_and_list_differences(configured(), configured(**changes))
    assert note.startswith(line)


def test_a_refusal_names_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"--init-from RUN with another --output-dir"):
        check_and_list_differences(configured(), configured(seed=1))
