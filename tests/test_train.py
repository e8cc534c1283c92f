"""train.py end to end with real processes: killed, stopped, moved to other devices, fed with bad input.

All runs share one tiny model, its token shards and a compile cache, and are held against one uninterrupted run.
"""

import json
import math
import os
import random
import signal
import time
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import RecordWriter  # noqa: F401  (what wrote the events)
from train_runs import (
    ENDLESS,
    REFERENCE_STEPS,
    Run,
    Start,
    TrainRuns,
    committed,
    end_of,
    kill_while_saving,
    losses,
    records,
    resumes,
    unfinished,
    wait_until,
)

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, run_python: Run) -> TrainRuns:
    """What the runs of this file share."""
    return TrainRuns(tmp_path_factory.mktemp("train"), run_python)
