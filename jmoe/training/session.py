"""A training run but for its steps: batches, evaluations, checkpoints, log and last words."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jmoe.cluster.distributed import Watchdog
from jmoe.cluster.processes import check_alike
from jmoe.config import TrainConfig
from jmoe.data.loader import COMPARABLE_BYTES, baselines
from jmoe.mesh import ACCUMULATED_BATCH, make_mesh
from jmoe.run.checkpoint import Checkpoints
from jmoe.run.compatibility import FINGERPRINT, check_compatible
from jmoe.run.metrics import MetricsLog, read_events, recent_expert_load
from jmoe.run.planner import tier_totals, tiers_summary
from jmoe.run.prometheus import RunMetrics
from jmoe.run.run_folder import RunFolder
from jmoe.run.snapshots import Snapshots
from jmoe.run.summary import HeldOut, Summary, print_final_summary
from jmoe.status import status
from jmoe.training.evaluation import held_out_loss, sample_text
from jmoe.training.expert_packing import PackingController, moved
from jmoe.training.finetune import left_out, pretrained_state
from jmoe.training.fused.step import FusedTrainer
from jmoe.training.resume import restored
from jmoe.training.state import TrainState
from jmoe.training.trainer import LanguageTrainer, Trainer, make_trainer


def say(text: str) -> None:
    """Print a line on process 0's screen."""
    if jax.process_index() == 0:
        print(text, flush=True)


@dataclass(kw_only=True)
class Session:
    """Everything that stays the same between two steps; mesh and trainer only with
    `comm.packing` other than auto.
    """

    config: TrainConfig
    resolved: dict[str, Any]  # the configuration as it is saved, with the data's fingerprint
    mesh: Mesh
    corpus: Any  # what it learns from: a `Corpus`, or images
    # iterator of what `next_batch` puts on the devices, with `get_state` and `set_state`
    batches: Any
    trainer: Trainer
    checkpoints: Checkpoints
    watchdog: Watchdog
    folder: RunFolder
    # by name, which every checkpoint has: the tokenizer if there is one, names of classes
    files: dict[str, bytes]
    expert_packing: PackingController
    snapshots: Snapshots | None = None  # in memory, if wanted
    log: MetricsLog | None = None  # of process 0
    exporter: RunMetrics | None = None  # of process 0, where metrics.port is given
    # settings that are others than the checkpoint's
    changes: list[str] = field(default_factory=list)

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)

    def next_batch(self) -> Any:
        """Return this process's rows [b, S + 1] as its part of a global [accumulation steps, B,
        S + 1].
        """
        rows = next(self.batches)
        local = rows.reshape(self.config.gradient_accumulation_steps, -1, rows.shape[-1])
        return jax.make_array_from_process_local_data(
            NamedSharding(self.mesh, ACCUMULATED_BATCH), local
        )

    def rebalance(self, step: int, state: TrainState) -> TrainState:
        """Return the state for `step`, on another mesh where the controller finds that a device
        should hold others.
        """
        if not self.expert_packing.is_due(step) or not isinstance(self.trainer, FusedTrainer):
            return state
        begun, before = time.perf_counter(), self.expert_packing.packing
        with self.watchdog.waiting_for("expert packing before step", step):
            decision, measured = self.expert_packing.decide(step, self.trainer, state)
            if self.expert_packing.packing != before:
                config, shape = self.expert_packing.packed()
                self.mesh = make_mesh(shape)
                trainer = make_trainer(config, self.mesh)
                assert isinstance(trainer, FusedTrainer)
                state = moved(state, self.trainer, trainer)
                self.trainer = trainer
        say(f"packing before step {step}: {decision.reason} ({time.perf_counter() - begun:.1f} s)")
        if self.log is not None:
            values = {
                "experts_per_device": decision.experts_per_device,
                "packing": self.expert_packing.packing,
                **measured,
            }
            self.log.write_event("packing", step, **values, reason=decision.reason)
        return state

    def note_step(self, step_s: float, processor_s: float, *, compiled: bool) -> None:
        """Note what a step took, and how long this process's processors computed; compiled: with
        a compilation.
        """
        self.expert_packing.note_step(step_s, compiled=compiled)

    def first_state(self) -> TrainState:
        """Return step 0: drawn, or with the parameters of `init_from`."""
        if not self.config.init_from:
            return self.trainer.init()
        for line in left_out(self.config.init_from):
            say(f"warning: {line}")
        return pretrained_state(self.trainer, self.config)

    def start_or_resume(self) -> TrainState:
        """Return the newest snapshot's or checkpoint's state, with the data at its position, or
        a fresh one.
        """
        doing = status("restoring or initialising the state", say)
        with (
            self.watchdog.waiting_for("restore or initialisation", progress=self.trainer.progress),
            doing,
        ):
            check_alike(FINGERPRINT, lambda: str(self.resolved[FINGERPRINT]))
            step = self.checkpoints.latest_step()
            if self.snapshots is None:
                return self._from_disk(step)
            state = self._from_memory(self.snapshots, step)
            if state is not None:
                self.snapshots.remove_but(int(state.step))
                return state
            state = self._from_disk(step)
            self.snapshots.remove_but(None)
            return state

    def _from_disk(self, step: int | None) -> TrainState:
        """Return the state of this checkpoint, or a fresh one if it is None."""
        checkpoints = self.checkpoints
        if step is None:
            say(
                f"starting from {self.config.init_from or 'step 0'}: no checkpoint in"
                f" {checkpoints.directory}"
            )
            return self.first_state()
        self._compare(checkpoints.saved_config(step))
        state, data_state = restored(self.trainer, checkpoints, step)
        self.batches.set_state(data_state)
        say(f"resuming from step {step} of {checkpoints.directory}")
        return state

    def _compare(self, saved: dict[str, Any]) -> None:
        """Say which settings have changed since a state was saved; `ValueError` for those that
        must not.
        """
        self.changes = check_compatible(saved, self.resolved)
        for change in self.changes:
            say(f"changed: {change}")

    def begin_log(self, step: int) -> MetricsLog:
        """Open and return the log of steps from `step` on, with the settings that have changed."""
        self.log = MetricsLog(self.output_dir, start_step=step)
        for change in self.changes:
            self.log.write_event("changed", step, setting=change)
        return self.log

    def _from_memory(self, snapshots: Snapshots, checkpoint: int | None) -> TrainState | None:
        """Return the state of the newest snapshot; None if there is none, or the checkpoint is
        newer.
        """
        say(snapshots.note)
        shape = self.trainer.saved_shape
        snapshots.check_room(shape)
        snapshot, why = snapshots.newest(shape, checkpoint, self.checkpoints.newest_folder())
        if why:
            used = "none is" if snapshot is None else f"step {snapshot.step} is"
            say(f"warning: of the snapshots in memory {used} used: {why}")
        if snapshot is None:
            return None
        self._compare(snapshot.config)
        self.batches.set_state(snapshot.data)
        state = self.trainer.load_state(snapshot.state)
        say(f"resuming from step {snapshot.step} of {snapshots.folder}")
        if snapshot.step >= self.config.num_steps and snapshot.step != checkpoint:
            self.save(snapshot.step, state)  # no step is left after which it would be
        return state

    def evaluate(self, state: TrainState) -> Any:
        """Say, log and return what the held-out text costs."""
        step, begun = int(state.step), time.perf_counter()
        doing = status(f"evaluating on {len(self.corpus.held_out_tokens):,} held-out tokens", say)
        with self.watchdog.waiting_for("evaluation after step", step), doing:
            loss = held_out_loss(self.trainer, state, self.corpus, self.config, self.mesh)
        known = bool(self.corpus.held_out_bytes)
        bits = self.corpus.bits_per_byte(loss) if known else float("nan")
        per_byte = f", {bits:.4f} bits per byte" if known else ""
        say(
            f"held-out loss after {step} steps: {loss:.4f}{per_byte}"
            f" ({time.perf_counter() - begun:.1f} s)"
        )
        if self.log is not None:
            self.log.write_evaluation(step, loss=loss, bits_per_byte=bits)
        if self.exporter is not None:
            self.exporter.note_evaluation(loss)
        return HeldOut(loss, bits)

    def evaluate_first(self, state: TrainState) -> Any:
        """Return the held-out loss of step 0: measured now, or by the run that began here; None:
        not at all.
        """
        if int(state.step) == 0:
            return self.evaluate(state) if self.config.evaluation.at_start else None
        events = read_events(self.log.path) if self.log is not None else []
        first = [event for event in events if event["event"] == "evaluation" and event["step"] == 0]
        return HeldOut(first[0]["loss"], first[0]["bits_per_byte"]) if first else None

    def save(self, step: int, state: TrainState) -> None:
        """Begin the checkpoint of `step`, once the one before is complete."""
        begun = time.perf_counter()
        with self.watchdog.waiting_for(
            "the checkpoint before step", step, timeout_s=self.checkpoints.limit_s
        ):
            self.checkpoints.wait()
        limit_s, progress = 1.25 * self.config.checkpoint.drain_timeout_s, self.trainer.progress
        what, option = "the drain of records before step", "checkpoint.drain_timeout_s"
        with self.watchdog.waiting_for(
            what, step, timeout_s=limit_s, progress=progress, option=option
        ):
            self.checkpoints.wait_for_records()
        with self.watchdog.waiting_for("checkpoint of step", step, progress=progress):
            self.folder.check()
            if self.log is not None:
                self.log.sync()
            saved, resolved = self.trainer.save_state(state), json.dumps(self.resolved, indent=1)
            data, packing = self.batches.get_state(), self.expert_packing.packing
            self.checkpoints.save(step, saved, data, resolved, self.files, packing)
        if self.exporter is not None:
            self.exporter.note_save(time.perf_counter() - begun)

    def snapshot(self, step: int, state: TrainState) -> None:
        """Write the snapshot of `step` into memory, if one is due; the run goes on without where
        there is no room.
        """
        if (
            self.snapshots is None
            or step % self.config.checkpoint.memory_every_steps
            or step == self.config.num_steps
        ):
            return
        with self.watchdog.waiting_for("snapshot of step", step):
            begun = time.perf_counter()
            saved, data = self.trainer.save_state(state), self.batches.get_state()
            problem = self.snapshots.save(
                step, saved, data, self.resolved, self.checkpoints.newest_folder()
            )
        if problem:
            say(f"warning: no snapshot of step {step} in memory: {problem}")
        elif self.log is not None:
            self.log.write_event("snapshot", step, seconds=round(time.perf_counter() - begun, 4))

    def check_finite(self, step: int, values: dict[str, Any]) -> None:
        """Raise `FloatingPointError` naming the layers if the step's loss or gradient was not
        finite.
        """
        if values["ok"]:
            return
        bad = []
        for name, norm in values["grad_norms"].items():
            layers = np.flatnonzero(~np.isfinite(np.atleast_1d(norm))).tolist()
            if layers:
                bad.append(f"{name} {', '.join(map(str, layers))}" if np.ndim(norm) else name)
        where = f"not finite in {'; '.join(bad)}" if bad else "finite"
        self.checkpoints.wait()
        # One of this very step holds the parameters that have just failed.
        folders = {
            saved: self.checkpoints.directory / str(saved) for saved in self.checkpoints.steps()
        }
        good = [folder for saved, folder in folders.items() if saved < step]
        failed = [folder for saved, folder in folders.items() if saved >= step]
        last = f"the last good checkpoint is {good[-1]}" if good else "there is no good checkpoint"
        last += f"; delete {failed[0]} to go on from it" if good and failed else ""
        scale = f" with loss scale {values['loss_scale']:g}" if "loss_scale" in values else ""
        raise FloatingPointError(
            f"step {step}: loss = {values['loss']}, gradient norm {where}{scale}; {last}"
        )

    def report(self) -> Path:
        """Draw the run so far and return the picture's path."""
        # imports matplotlib, which no other part of a run needs
        from jmoe.run.report import write_report

        return write_report(self.output_dir)

    def finish(self, state: TrainState, before: Any) -> None:
        """Evaluate, then print what the run learned and where its files are."""
        corpus, after = self.corpus, self.evaluate(state)
        sample = ""
        if corpus.tokenizer is not None and self.config.evaluation.sample_tokens:
            with self.watchdog.waiting_for("sample"), status("sampling a text", say):
                sample = sample_text(
                    cast(LanguageTrainer, self.trainer),
                    state,
                    corpus.tokenizer,
                    corpus.eot,
                    self.config,
                    self.mesh,
                )
        totals = {} if self.config.tiers.on_device else tier_totals(self.trainer.expert_stats())
        if self.log is None:
            return
        with status("drawing the report", say):
            self.report()
        unigram, xz = baselines(corpus)
        if 0 < len(corpus.held_out_bytes) < COMPARABLE_BYTES:
            say(
                f"held-out text: {len(corpus.held_out_bytes):,} bytes, too few to compare with xz"
                f" and a unigram model\n({COMPARABLE_BYTES:,}; see data.held_out_bytes and"
                " data.held_out_fraction)"
            )
        summary = Summary(before, after, unigram, xz, recent_expert_load(self.log.path), sample)
        print_final_summary(summary, self.output_dir)
        if totals:
            say(tiers_summary(self.config, totals, self.log))
