"""A training run apart from its steps: batches, evaluation, checkpoints, metrics log and final
summary. `train.py` calls the methods of `Session`.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jmoe.cluster.processes import check_same_identity
from jmoe.cluster.watchdog import Watchdog
from jmoe.config import TrainConfig
from jmoe.data.context_rows import ContextRows
from jmoe.data.loader import COMPARABLE_BYTES, unigram_and_xz_bits_per_byte
from jmoe.mesh import ACCUMULATED_BATCH, EXPERT, make_mesh
from jmoe.run.checkpoint import Checkpoints
from jmoe.run.compatibility import FINGERPRINT, check_and_list_differences
from jmoe.run.metrics import MetricsLog, read_events, recent_expert_load
from jmoe.run.planner import summarize_and_log_tiers, tier_totals
from jmoe.run.prometheus import RunMetrics
from jmoe.run.run_folder import RunFolder
from jmoe.run.snapshots import Snapshots
from jmoe.run.summary import HeldOutLoss, RunSummary, print_final_summary
from jmoe.status import status
from jmoe.training.evaluation import held_out_loss, sample_text
from jmoe.training.expert_order import LoadBalancer, reorder_experts
from jmoe.training.expert_packing import PackingController, move_state
from jmoe.training.finetune import ignored_training_options, load_pretrained_state
from jmoe.training.fused.step import FusedTrainer
from jmoe.training.resume import restore_checkpoint
from jmoe.training.state import TrainState
from jmoe.training.streamed.step import StreamedTrainer
from jmoe.training.trainer import LanguageTrainer, Trainer, make_trainer
from jmoe.types import JsonObject, PyTree


def print_on_rank_0(text: str) -> None:
    """Print a line on process 0; do nothing on other processes."""
    if jax.process_index() == 0:
        print(text, flush=True)


def place_batch(config: TrainConfig, mesh: Mesh, rows: PyTree) -> PyTree:
    """Return the global batch [accumulation steps, B, ...] of the rows that each process loaded
    (`data.context_rows.loaded_share`), B in the order of the devices.
    """
    steps, local = config.gradient_accumulation_steps, len(mesh.local_devices)
    size = config.devices_per_sequence(mesh.size)
    whole = ContextRows(size, max(size, local))
    first = jax.process_index() * local % size if size > local else 0
    place = NamedSharding(mesh, ACCUMULATED_BATCH)
    by_step = jax.tree.map(lambda x: x.reshape(steps, -1, x.shape[-1]), rows)
    parts = [
        whole.divide(
            jax.tree.map(lambda x, i=i: x[i], by_step), first=first, count=min(size, local)
        )
        for i in range(steps)
    ]
    return jax.tree.map(
        lambda *part: jax.make_array_from_process_local_data(place, np.stack(part)), *parts
    )


@dataclass(kw_only=True)
class Session:
    """The parts of a run that live from step to step, but for the `TrainState`, which the methods
    take and return; `rebalance` may replace `mesh` and `trainer`. One instance per process.
    """

    config: TrainConfig
    resolved: JsonObject  # the configuration in checkpoints, with the data's fingerprint
    mesh: Mesh
    corpus: Any  # the training data: a `Corpus`, or the images of each task
    # iterator of this process's batches in host memory, with `get_state` and `set_state`
    batches: Any
    trainer: Trainer
    checkpoints: Checkpoints
    watchdog: Watchdog
    folder: RunFolder
    # copied into every checkpoint, by file name: the tokenizer, or the names of classes
    files: dict[str, bytes]
    expert_packing: PackingController
    snapshots: Snapshots | None = None  # None without `checkpoint.memory_dir`
    log: MetricsLog | None = None  # on process 0 only
    exporter: RunMetrics | None = None  # on process 0 only, if metrics.port is set
    # settings that differ from the checkpoint's
    changes: list[str] = field(default_factory=list)
    balancer: LoadBalancer = field(init=False)

    def __post_init__(self) -> None:
        self.balancer = LoadBalancer(self.config)

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)

    def next_batch(self) -> PyTree:
        """Return the next global batch of tokens, [accumulation steps, B, S + 1], or of
        `SampleRows`, from this process's rows.
        """
        return place_batch(self.config, self.mesh, next(self.batches))

    def rebalance(self, step: int, state: TrainState) -> TrainState:
        """Return `state` for `step`: with experts in another order if their loads say so, and moved
        to a mesh with another expert packing if the controller decides so.

        Every process must call this. Replaces `mesh` and `trainer` after a move.
        """
        return self._repack(step, self._balance_experts(step, state))

    def _balance_experts(self, step: int, state: TrainState) -> TrainState:
        """Return `state` with experts in the order that the load balancer chooses."""
        shape = self.mesh.shape
        devices = math.prod(shape[axis] for axis in EXPERT)
        orders = self.balancer.choose_orders(step, devices)
        if orders is None:
            return state
        begun, moved = time.perf_counter(), orders.num_moved
        if moved:
            with self.watchdog.waiting_for("another order of experts before step", step):
                state = reorder_experts(state, orders.orders_LE, self.trainer)
        seconds = time.perf_counter() - begun
        print_on_rank_0(
            f"experts before step {step}: {moved} change their places, the busiest device's load"
            f" from {orders.before:.2f} to {orders.after:.2f} of the mean ({seconds:.1f} s)"
        )
        if self.log is not None:
            loads = {"load_before": orders.before, "load_after": orders.after}
            new = orders.orders_LE.tolist() if moved else []
            self.log.write_event("expert_order", step, moved=moved, orders=new, **loads)
        return state

    def _repack(self, step: int, state: TrainState) -> TrainState:
        """Return `state` for the expert packing that the controller chooses."""
        if not self.expert_packing.is_packing_choice_due(step) or not isinstance(
            self.trainer, FusedTrainer | StreamedTrainer
        ):
            return state
        begun, before = time.perf_counter(), self.expert_packing.packing
        with self.watchdog.waiting_for("expert packing before step", step):
            decision, measured = self.expert_packing.measure_and_choose_packing(step, self.trainer)
        if self.expert_packing.packing != before:
            state = self._move_experts(step, state, self.trainer)
        print_on_rank_0(
            f"packing before step {step}: {decision.reason} ({time.perf_counter() - begun:.1f} s)"
        )
        if self.log is not None:
            values = {
                "experts_per_device": decision.experts_per_device,
                "packing": self.expert_packing.packing,
                "tier": self.trainer.config.tiers.experts,
                **measured,
            }
            self.log.write_event("packing", step, **values, reason=decision.reason)
        return state

    def _move_experts(
        self, step: int, state: TrainState, before: FusedTrainer | StreamedTrainer
    ) -> TrainState:
        """Return `state` for the trainer of the controller's packing, which replaces `trainer`.

        Between trainers that keep all experts on the devices, arrays move from mesh to mesh.
        Otherwise the state moves through the checkpoint of `step`.
        """
        config, shape = self.expert_packing.current_config_and_shape()
        self.mesh = mesh = make_mesh(shape, replicas=config.mesh.replicate)
        if isinstance(before, FusedTrainer) and config.tiers.all_on_device:
            with self.watchdog.waiting_for("another expert packing before step", step):
                after = make_trainer(config, mesh)
                assert isinstance(after, FusedTrainer)
                state = move_state(state, before, after)
                self.trainer = after
            return state
        self.save(step, state)
        self.checkpoints.close()
        for array in jax.tree.leaves(state):
            array.delete()
        before.close()
        self.trainer = trainer = make_trainer(config, mesh, self.folder.run_name)
        self.checkpoints.replace_records(trainer.records)
        with self.watchdog.waiting_for(
            "moving experts before step", step, progress=trainer.progress_counters
        ):
            state, _ = restore_checkpoint(trainer, self.checkpoints, step)
        for note in trainer.notes:
            print_on_rank_0(note)
        return state

    def note_metrics(self, metrics: JsonObject) -> None:
        """Record the loads of experts in a step's metrics on the host."""
        if "counts" in metrics:
            self.balancer.note_counts(metrics["counts"])

    def note_step(self, step_s: float, processor_s: float, *, compiled: bool) -> None:
        """Record a step's wall-clock seconds and this process's CPU seconds. compiled: the step
        included a compilation.
        """
        self.expert_packing.note_step(step_s, compiled=compiled)

    def initial_state(self) -> TrainState:
        """Return the state of step 0: random parameters, or those of `init_from`."""
        if not self.config.init_from:
            return self.trainer.init()
        for line in ignored_training_options(self.config.init_from):
            print_on_rank_0(f"warning: {line}")
        return self.load_initial_model()

    def load_initial_model(self) -> TrainState:
        """Return the state of step 0 with the parameters of `init_from`."""
        if self.config.lora.rank is not None:
            return self.trainer.init()
        return load_pretrained_state(self.trainer, self.config)

    def start_or_resume(self) -> TrainState:
        """Return the state of the newest snapshot or checkpoint, or of step 0 if there is neither.

        The data iterator is set to the same step. Every process must call this.
        """
        doing = status("restoring or initialising the state", print_on_rank_0)
        with (
            self.watchdog.waiting_for(
                "restore or initialisation", progress=self.trainer.progress_counters
            ),
            doing,
        ):
            check_same_identity(FINGERPRINT, lambda: str(self.resolved[FINGERPRINT]))
            step = self.checkpoints.latest_step()
            if self.snapshots is None:
                return self._restore_or_start(step)
            state = self._restore_snapshot(self.snapshots, step)
            if state is not None:
                self.snapshots.remove_other_steps(int(state.step))
                return state
            state = self._restore_or_start(step)
            self.snapshots.remove_other_steps(None)
            return state

    def _restore_or_start(self, step: int | None) -> TrainState:
        """Return the state of checkpoint `step`; the state of step 0 if `step` is None."""
        checkpoints = self.checkpoints
        if step is None:
            print_on_rank_0(
                f"starting from {self.config.init_from or 'step 0'}: no checkpoint in"
                f" {checkpoints.directory}"
            )
            return self.initial_state()
        self._check_saved_config(checkpoints.saved_config(step))
        state, data_state = restore_checkpoint(self.trainer, checkpoints, step)
        self.batches.set_state(data_state)
        print_on_rank_0(f"resuming from step {step} of {checkpoints.directory}")
        return state

    def _check_saved_config(self, saved: JsonObject) -> None:
        """Print the settings that differ from a saved state's. Raises ValueError if one differs
        that must not change.
        """
        self.changes = check_and_list_differences(saved, self.resolved)
        for change in self.changes:
            print_on_rank_0(f"changed: {change}")

    def open_log(self, step: int) -> MetricsLog:
        """Open and return the metrics log for the steps from `step` on, and log the changed
        settings.
        """
        self.log = MetricsLog(self.output_dir, start_step=step)
        for change in self.changes:
            self.log.write_event("changed", step, setting=change)
        return self.log

    def _restore_snapshot(self, snapshots: Snapshots, checkpoint: int | None) -> TrainState | None:
        """Return the state of the newest snapshot; None if there is no usable one, or `checkpoint`
        is newer.
        """
        print_on_rank_0(snapshots.location_note)
        shape = self.trainer.saved_shape
        snapshots.check_free_memory(shape)
        snapshot, why = snapshots.read_newest(
            shape, checkpoint, self.checkpoints.newest_step_on_disk()
        )
        if why:
            used = "none is" if snapshot is None else f"step {snapshot.step} is"
            print_on_rank_0(f"warning: of the snapshots in memory {used} used: {why}")
        if snapshot is None:
            return None
        self._check_saved_config(snapshot.config)
        self.batches.set_state(snapshot.data)
        state = self.trainer.restore_state(snapshot.state)
        print_on_rank_0(f"resuming from step {snapshot.step} of {snapshots.folder}")
        if snapshot.step >= self.config.num_steps and snapshot.step != checkpoint:
            self.save(snapshot.step, state)  # no training step is left that would save it
        return state

    def evaluate(self, state: TrainState) -> PyTree:
        """Compute, print and log the held-out loss; return it as a `HeldOutLoss` (nats per token,
        bits per byte).
        """
        step, begun = int(state.step), time.perf_counter()
        doing = status(
            f"evaluating on {self.corpus.num_held_out_tokens:,} held-out tokens", print_on_rank_0
        )
        with self.watchdog.waiting_for("evaluation after step", step), doing:
            loss = held_out_loss(self.trainer, state, self.corpus, self.config, self.mesh)
        # the loss on masked tokens says nothing of bytes
        known = bool(self.corpus.held_out_bytes) and self.config.model.is_causal
        bits = self.corpus.bits_per_byte(loss) if known else float("nan")
        per_byte = f", {bits:.4f} bits per byte" if known else ""
        print_on_rank_0(
            f"held-out loss after {step} steps: {loss:.4f}{per_byte}"
            f" ({time.perf_counter() - begun:.1f} s)"
        )
        if self.log is not None:
            self.log.write_evaluation(step, loss=loss, bits_per_byte=bits)
        if self.exporter is not None:
            self.exporter.note_evaluation(loss)
        return HeldOutLoss(loss, bits)

    def evaluate_step_0(self, state: TrainState) -> PyTree:
        """Return the held-out loss of step 0, computed now or read from the log of the run that
        began there; None if it was not computed.
        """
        if int(state.step) == 0:
            return self.evaluate(state) if self.config.evaluation.at_start else None
        events = read_events(self.log.path) if self.log is not None else []
        first = [event for event in events if event["event"] == "evaluation" and event["step"] == 0]
        return HeldOutLoss(first[0]["loss"], first[0]["bits_per_byte"]) if first else None

    def save(self, step: int, state: TrainState) -> None:
        """Start writing the checkpoint of `step`, after the previous one is complete."""
        begun = time.perf_counter()
        with self.watchdog.waiting_for(
            "the checkpoint before step", step, timeout_s=self.checkpoints.save_limit_s
        ):
            self.checkpoints.wait_for_save()
        limit_s, progress = (
            1.25 * self.config.checkpoint.drain_timeout_s,
            self.trainer.progress_counters,
        )
        what, option = "the drain of records before step", "checkpoint.drain_timeout_s"
        with self.watchdog.waiting_for(
            what, step, timeout_s=limit_s, progress=progress, option=option
        ):
            self.checkpoints.wait_for_records()
        with self.watchdog.waiting_for("checkpoint of step", step, progress=progress):
            self.folder.check_still_owned()
            if self.log is not None:
                self.log.sync()
            saved, resolved = (
                self.trainer.prepare_state_for_save(state),
                json.dumps(self.resolved, indent=1),
            )
            data, packing = self.batches.get_state(), self.expert_packing.packing
            self.checkpoints.save(step, saved, data, resolved, self.files, packing)
        if self.exporter is not None:
            self.exporter.note_save(time.perf_counter() - begun)

    def save_snapshot(self, step: int, state: TrainState) -> None:
        """Write a snapshot of `step` into host memory if one is due. If memory is too small, print
        a warning and go on.
        """
        if (
            self.snapshots is None
            or step % self.config.checkpoint.memory_every_steps
            or step == self.config.num_steps
        ):
            return
        with self.watchdog.waiting_for("snapshot of step", step):
            begun = time.perf_counter()
            saved, data = self.trainer.prepare_state_for_save(state), self.batches.get_state()
            problem = self.snapshots.save(
                step, saved, data, self.resolved, self.checkpoints.newest_step_on_disk()
            )
        if problem:
            print_on_rank_0(f"warning: no snapshot of step {step} in memory: {problem}")
        elif self.log is not None:
            self.log.write_event("snapshot", step, seconds=round(time.perf_counter() - begun, 4))

    def check_finite(self, step: int, values: JsonObject) -> None:
        """Raise FloatingPointError, naming the layers and the last good checkpoint, if
        `values["ok"]` is False.
        """
        if values["ok"]:
            return
        bad = []
        for name, norm in values["grad_norms"].items():
            layers = np.flatnonzero(~np.isfinite(np.atleast_1d(norm))).tolist()
            if layers:
                bad.append(f"{name} {', '.join(map(str, layers))}" if np.ndim(norm) else name)
        where = f"not finite in {'; '.join(bad)}" if bad else "finite"
        self.checkpoints.wait_for_save()
        # A checkpoint of this step or later holds the parameters that have just failed.
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

    def draw_report(self) -> Path:
        """Draw the run's plots so far and return the path of the picture."""
        # Imported here because it loads matplotlib, which only process 0 needs.
        from jmoe.run.report import write_report

        return write_report(self.output_dir)

    def evaluate_and_summarize(self, state: TrainState, first_loss: Any) -> None:
        """Evaluate, then print the summary of the run: losses, baselines, a text sample and
        the output files.

        first_loss: the result of `evaluate_step_0`.
        """
        corpus, after = self.corpus, self.evaluate(state)
        sample = ""
        if corpus.tokenizer is not None and self.config.evaluation.sample_tokens:
            with self.watchdog.waiting_for("sample"), status("sampling a text", print_on_rank_0):
                sample = sample_text(
                    cast(LanguageTrainer, self.trainer),
                    state,
                    corpus.tokenizer,
                    corpus.eot,
                    self.config,
                    self.mesh,
                )
        stats = self.trainer.expert_stats()
        totals = {} if stats is None else tier_totals(stats)
        if self.log is None:
            return
        tiers_text = (
            summarize_and_log_tiers(self.trainer.config, totals, self.log) if totals else ""
        )
        with status("drawing the report", print_on_rank_0):
            self.draw_report()
        unigram = xz = float("nan")
        if self.config.model.is_causal:
            unigram, xz = unigram_and_xz_bits_per_byte(corpus)
        if 0 < len(corpus.held_out_bytes) < COMPARABLE_BYTES:
            print_on_rank_0(
                f"held-out text: {len(corpus.held_out_bytes):,} bytes, too few to compare with xz"
                f" and a unigram model\n({COMPARABLE_BYTES:,}; see data.held_out_bytes and"
                " data.held_out_fraction)"
            )
        summary = RunSummary(
            first_loss, after, unigram, xz, recent_expert_load(self.log.path), sample
        )
        print_final_summary(summary, self.output_dir)
        if tiers_text:
            print_on_rank_0(tiers_text)
