"""Errors below the experts' state: a run either stops with the error, or goes on to the bit as if
there had been none.

Every call that can fail does so once, at several moments of a run that steps, saves and evaluates;
the run then has to end with that error and with no other step taken, and to resume from its
checkpoint as if nothing had happened.
"""

import contextlib
import dataclasses
import errno
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import pytest

import jmoe.offload.training_slots
from jmoe.config import CheckpointConfig, TiersConfig
from jmoe.memory.record_checkpoint import RecordCheckpoints
from jmoe.memory.record_handle import Record
from jmoe.memory.tiered_store import TieredStore
from jmoe.memory.version_store import VersionStore
from jmoe.offload.expert_state import ExpertState
from jmoe.offload.expert_updates import HostUpdate
from jmoe.offload.gradient_writer import GradientWriter
from jmoe.offload.training_slots import TrainingSlots
from jmoe.offload.weight_staging import ExpertGroup
from jmoe.run.checkpoint import Checkpoints
from jmoe.training.resume import restore_checkpoint
from jmoe.training.state import TrainState
from jmoe.training.streamed.programs import StepPrograms
from jmoe.training.streamed.step import StreamedTrainer
from tests.arrays import differing, full_state
from tests.model_configs import mesh_of
from tests.training.streamed.test_streamed_step import CONFIG, E, N, batch, held_out_batches

FIRST, SAVED, LAST = 2, 4, 5
WORDS = "an injected fault"
Result = tuple[dict[int, float], list[float], TrainState]


class Fault:
    """Counts the calls of a function, and lets number `fails_at` fail, once."""

    def __init__(self, function: Callable[..., Any], fails_at: int) -> None:
        self.function, self.fails_at, self.calls = function, fails_at, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == self.fails_at:
            raise OSError(errno.EIO, WORDS, "some/file")
        return self.function(*args, **options)

    def __get__(self, instance: Any, owner: type) -> Any:
        return lambda *args, **options: self(instance, *args, **options)


class Training:
    """A run on NVMe from step `FIRST` on, to be repeated from there.

    places: (owner, name) of each function that can fail.
    """

    def __init__(
        self, folder: Path, places: list[tuple[Any, str]], update: Literal["device", "host"]
    ) -> None:
        tiers = TiersConfig("nvme", "nvme", "nvme", update=update, host_cache_bytes=120_000)
        tiers = dataclasses.replace(tiers, path=str(folder / "records"))
        self.places = places
        self.folder, self.config = folder / "checkpoints", dataclasses.replace(CONFIG, tiers=tiers)
        self.program = StreamedTrainer(self.config, mesh_of(1, 1, 1))
        state = self.program.init()
        for step in range(FIRST):
            state, _ = self.program.step(state, batch(self.config, step))
        checkpoints = self.open()
        checkpoints.save(FIRST, self.program.prepare_state_for_save(state), 0, "{}")
        checkpoints.close()
        self.losses: dict[int, float] = {}
        self.expected = self.go_on(FIRST)
        self.calls = self.count_calls()

    def count_calls(self) -> dict[str, int]:
        """How often a run without a fault calls each place that can fail."""
        counted = {name: Fault(getattr(self.holder(owner), name), 0) for owner, name in self.places}
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in self.places:
                self.put(patch, owner, name, counted[name])
            self.forget_what_was_saved()
            assert_same(self.go_on(FIRST), self.expected)
        return {name: fault.calls for name, fault in counted.items()}

    def holder(self, owner: Any) -> Any:
        """Where the function is."""
        return self.program.programs if owner is StepPrograms else owner

    def put(self, patch: pytest.MonkeyPatch, owner: Any, name: str, function: Any) -> None:
        """Replace a function where it is."""
        if owner is StepPrograms:
            changed = dataclasses.replace(self.program.programs, **{name: function})
            patch.setattr(self.program, "programs", changed)
        else:
            patch.setattr(owner, name, function)

    def open(self) -> Checkpoints:
        config = CheckpointConfig(keep=3)
        return Checkpoints(self.folder, config, records=self.program.records, timeout_s=60)

    def go_on(self, step: int) -> Result:
        """Losses of all steps, held-out losses and last state of a run that resumes from the
        checkpoint of `step`.
        """
        self.losses = {}
        checkpoints = self.open()
        try:
            return self.go_on_with(checkpoints, step)
        except OSError:
            # another process would begin when this one has ended
            with contextlib.suppress(OSError):
                checkpoints.close()
            raise

    def go_on_with(self, checkpoints: Checkpoints, step: int) -> Result:
        """See `go_on`."""
        state, _ = restore_checkpoint(self.program, checkpoints, step)
        for now in range(step, LAST):
            state, metrics = self.program.step(state, batch(self.config, now))
            self.losses[now] = float(metrics["loss"])
            held_out = [
                float(nll)
                for nll in self.program.evaluate_batches(state, held_out_batches(self.config))
            ]
            checkpoints.raise_save_error()
            if now + 1 == SAVED and step < SAVED:
                checkpoints.save(SAVED, self.program.prepare_state_for_save(state), 0, "{}")
        checkpoints.close()
        self.program.prepare_state_for_save(state)
        whole = full_state(self.program, state)
        return self.losses, held_out, whole

    def forget_what_was_saved(self) -> None:
        """Only the first checkpoint is left."""
        for path in self.folder.iterdir():
            if path.name != str(FIRST):
                shutil.rmtree(path)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    training = Training(tmp_path_factory.mktemp("faults"), PLACES, "device")
    yield training
    training.program.close()


@pytest.fixture(scope="module")
def updated_on_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    folder = tmp_path_factory.mktemp("faults-host")
    training = Training(folder, PLACES_OF_HOST_UPDATES, "host")
    yield training
    training.program.close()


PLACES = [
    (TieredStore, "get"),
    (TieredStore, "prefetch"),
    (TieredStore, "count_step"),
    (TieredStore, "flush"),
    (Record, "close_as_changed"),
    (VersionStore, "read_into"),
    (VersionStore, "write"),
    (VersionStore, "sync"),
    (VersionStore, "pin_versions"),
    (TrainingSlots, "catch_up_expert"),
    (GradientWriter, "_write"),
    (jmoe.offload.training_slots, "put_record"),
    (StepPrograms, "route"),
    (StepPrograms, "moe_gradients"),
    (RecordCheckpoints, "write_record_list"),
    (RecordCheckpoints, "_drain"),
]
PLACES_OF_HOST_UPDATES = [
    (TieredStore, "get"),
    (TieredStore, "prefetch"),
    (Record, "close_as_changed"),
    (VersionStore, "read_into"),
    (VersionStore, "write"),
    (HostUpdate, "apply_steps"),
    (HostUpdate, "write_copies"),
    (ExpertGroup, "send"),
    (jmoe.offload.training_slots, "put_records"),
]
# Neighbours of these in the same path stay quick: write, read_into, moe_gradients.
SLOW_PLACES = (
    *("get", "prefetch", "count_step", "flush", "pin_versions", "put_record", "route", "sync"),
    "_write",
)
OF_SAVES = ("pin_versions", "write_record_list", "_drain", "flush")  # the experts are as they were


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(*place, marks=pytest.mark.slow if place[1] in SLOW_PLACES else ())
        for place in PLACES
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_an_error_ends_the_run_or_changes_nothing(
    training: Training, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_errors(training, owner, name, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name"),
    PLACES_OF_HOST_UPDATES,
    ids=lambda value: getattr(value, "__name__", value),
)
def test_an_error_of_an_update_on_the_host(
    updated_on_host: Training, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_errors(updated_on_host, owner, name, monkeypatch)


def check_errors(
    training: Training, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """See `test_an_error_ends_the_run_or_changes_nothing`."""
    calls, original = training.calls[name], getattr(training.holder(owner), name)
    assert calls > 0
    for fails_at in sorted({1 + calls // 2, calls}):
        training.forget_what_was_saved()
        fault, error = Fault(original, fails_at), None
        training.put(monkeypatch, owner, name, fault)
        try:
            assert_same(training.go_on(FIRST), training.expected)
        except OSError as raised:
            error = raised
        assert training.losses.items() <= training.expected[0].items()
        if error is None:
            assert fault.calls < fails_at, f"call {fails_at} of {name} failed, and nobody was told"
        else:
            assert WORDS in str(error)
            if name not in OF_SAVES:
                check_that_it_stays(training)
        training.put(monkeypatch, owner, name, original)
        step = training.open().latest_step()
        assert step in (FIRST, SAVED)
        losses, held_out, state = training.expected
        assert_same(
            training.go_on(step),
            ({n: loss for n, loss in losses.items() if n >= step}, held_out, state),
        )


def test_no_update_is_applied_twice(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps the ring's thread cannot have the memory for an expert's new weights; an
    evaluation follows.
    """
    training.forget_what_was_saved()
    get, commit, fault = TieredStore.get, ExpertState.commit_step, Fault(lambda: None, 1)

    def get_weights(store: TieredStore, index: int, **options: Any) -> Record:
        experts = training.program.experts
        assert experts is not None
        if (
            store is experts.stores.weights
            and options.get("will_overwrite")
            and threading.current_thread().name == "ring"
        ):
            fault()
        return get(store, index, **options)

    def commit_and_wait(experts: ExpertState, *args: Any) -> None:
        commit(experts, *args)
        deadline_s = time.monotonic() + 240
        while experts._ring._error is None and not training.losses:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)

    monkeypatch.setattr(TieredStore, "get", get_weights)
    monkeypatch.setattr(ExpertState, "commit_step", commit_and_wait)
    with pytest.raises(OSError, match=WORDS):
        training.go_on(FIRST)
    assert training.losses.items() <= training.expected[0].items()
    check_that_it_stays(training)


def assert_same(ours: Result, expected: Result) -> None:
    """To the bit."""
    assert ours[:2] == expected[:2]
    assert differing(ours[2], expected[2]) == []


def check_that_it_stays(training: Training) -> None:
    """There is no further step, evaluation or save."""
    experts = training.program.experts
    if experts is None or experts.steps_taken == 0:
        return
    program, state = training.program, training.program.saved_shape  # looked at by no call
    for call in (
        lambda: program.step(state, batch(training.config, LAST)),
        lambda: program.evaluate_batches(state, held_out_batches(training.config)),
        lambda: program.prepare_state_for_save(state),
        lambda: full_state(program, state),
    ):
        with pytest.raises(OSError, match=WORDS):
            call()


def test_the_cache_is_told_what_the_next_step_will_probably_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts that tokens of the step chose, of all its accumulation steps; nothing where it
    is not taken.
    """
    told, expect = list[tuple[TieredStore, set[int]]](), TieredStore.keep_cached
    chosen: list[set[int]] = [set(), set()]  # by the routers, in each accumulation step

    def noting(store: TieredStore, indices: Any) -> None:
        told.append((store, set(np.asarray(indices).tolist())))
        expect(store, indices)

    monkeypatch.setattr(TieredStore, "keep_cached", noting)
    tiers = TiersConfig("nvme", "nvme", "nvme", path=str(tmp_path), host_cache_bytes=120_000)
    config = dataclasses.replace(CONFIG, tiers=tiers, gradient_accumulation_steps=2)
    with contextlib.closing(StreamedTrainer(config, mesh_of(1, 1, 1))) as program:
        route = program.programs.route

        def noting_choices(params: Any, layer: Any, *args: Any, **options: Any) -> Any:
            tokens, *rest = route(params, layer, *args, **options)
            experts = np.asarray(tokens.topk_idx_TK).flat
            chosen[int(layer.accumulation)] |= {
                int(layer.number) * E + int(expert) for expert in experts
            }
            return tokens, *rest

        changed = dataclasses.replace(program.programs, route=noting_choices)
        monkeypatch.setattr(program, "programs", changed)
        state = program.init()
        assert program.experts is not None
        stores = program.experts.stores.present_stores()
        for step in range(2):
            told.clear()
            chosen[:] = set(), set()
            state, metrics = program.step(state, batch(config, step))
            everywhere = chosen[0] | chosen[1]
            assert everywhere == set(np.flatnonzero(np.asarray(metrics["counts"]) > 0).tolist())
            assert chosen[0] < everywhere and chosen[1] < everywhere and len(everywhere) < N * E
            assert told == [(store, everywhere) for store in stores] and len(stores) == 3
        told.clear()
        broken = dataclasses.replace(state, params=jax.tree.map(lambda w: w * np.nan, state.params))
        _, metrics = program.step(broken, batch(config, 2))
        assert not metrics["ok"] and told == []
