"""Train a Mixture-of-Experts language model: python train.py PRESET [--section.field VALUE ...]."""

import sys

from jmoe.command_line import answer_early, parse_train
from jmoe.configs import PRESETS
from jmoe.runtime import closing, end_at_once_on_interrupt, reexec_with_env

if __name__ == "__main__":
    reexec_with_env()  # before JAX is imported
    end_at_once_on_interrupt()  # outside the training loop
    answer_early(lambda: parse_train(sys.argv[1:], PRESETS))

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jmoe.config import TrainConfig
from jmoe.data.corpus import Corpus, Role, discard, prepare, publish
from jmoe.data.loader import COMPARABLE_BYTES, TrainBatches, baselines, train_batches
from jmoe.data.progress import PreparingData
from jmoe.mesh import ACCUMULATED_BATCH, devices_per_host, make_mesh
from jmoe.run import distributed
from jmoe.run.checkpoint import Checkpoints
from jmoe.run.compatibility import FINGERPRINT, check_compatible, has_checkpoint
from jmoe.run.metrics import (
    CompiledPrograms,
    MetricsLog,
    ProgressLine,
    read_events,
    recent_expert_load,
    step_record,
)
from jmoe.run.planner import tier_totals, tiers_summary, training_plan, with_chosen_tiers
from jmoe.run.report import print_final_summary, write_report
from jmoe.status import status
from jmoe.training.evaluation import held_out_loss, sample_text
from jmoe.training.finetune import TOKENIZER, pretrained_state, with_pretrained_model
from jmoe.training.resume import restored
from jmoe.training.run_folder import WAIT_S, RunFolder
from jmoe.training.state import TrainState
from jmoe.training.trainer import Trainer, make_trainer


def say(text: str) -> None:
    """A line on process 0's screen."""
    if jax.process_index() == 0:
        print(text, flush=True)


@dataclass(frozen=True)
class Run:
    """What stays the same from the first step to the last."""

    config: TrainConfig
    resolved: dict[str, Any]  # the configuration as it is saved, with the data's fingerprint
    mesh: Mesh
    corpus: Corpus
    batches: TrainBatches
    trainer: Trainer
    checkpoints: Checkpoints
    watchdog: distributed.Watchdog
    folder: RunFolder
    tokenizer: dict[str, bytes]  # its file, which every checkpoint has; empty: the tokens came without one
    log: MetricsLog | None  # process 0 only

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)

    def next_batch(self) -> jax.Array:
        """This process's rows [b, S + 1] as its part of a global [accumulation steps, B, S + 1]."""
        rows = next(self.batches)
        local = rows.reshape(self.config.gradient_accumulation_steps, -1, rows.shape[-1])
        return jax.make_array_from_process_local_data(NamedSharding(self.mesh, ACCUMULATED_BATCH), local)

    def evaluate(self, state: TrainState) -> tuple[float, float]:
        """(held-out nats per token, bits per byte; nan where the text is unknown), said and logged."""
        step, begun = int(state.step), time.perf_counter()
        doing = status(f"evaluating on {len(self.corpus.held_out_tokens):,} held-out tokens", say)
        with self.watchdog.waiting_for("evaluation after step", step), doing:
            loss = held_out_loss(self.trainer, state, self.corpus, self.config, self.mesh)
        bits = self.corpus.bits_per_byte(loss) if self.corpus.held_out_bytes else float("nan")
        per_byte = f", {bits:.4f} bits per byte" if self.corpus.held_out_bytes else ""
        say(f"held-out loss after {step} steps: {loss:.4f}{per_byte} ({time.perf_counter() - begun:.1f} s)")
        if self.log is not None:
            self.log.write_evaluation(step, loss=loss, bits_per_byte=bits)
        return loss, bits

    def save(self, step: int, state: TrainState) -> None:
        with self.watchdog.waiting_for("the checkpoint before step", step, timeout_s=self.checkpoints.limit_s):
            self.checkpoints.wait()
        limit_s, progress = 1.25 * self.config.checkpoint.drain_timeout_s, self.trainer.progress
        what = "the drain of records before step"
        option = "checkpoint.drain_timeout_s"
        with self.watchdog.waiting_for(what, step, timeout_s=limit_s, progress=progress, option=option):
            self.checkpoints.wait_for_records()
        with self.watchdog.waiting_for("checkpoint of step", step, progress=progress):
            self.folder.check()
            if self.log is not None:
                self.log.sync()
            saved, resolved = self.trainer.save_state(state), json.dumps(self.resolved, indent=1)
            self.checkpoints.save(step, saved, self.batches.get_state(), resolved, self.tokenizer)


def start_or_resume(
    config: TrainConfig, trainer: Trainer, checkpoints: Checkpoints, batches: TrainBatches, resolved: dict[str, Any]
) -> TrainState:
    """The newest checkpoint's state, with the data at its position, or a fresh one."""
    step = checkpoints.latest_step()
    if step is None:
        say(f"starting from {config.init_from or 'step 0'}: no checkpoint in {checkpoints.directory}")
        return pretrained_state(trainer, config) if config.init_from else trainer.init()
    for note in check_compatible(checkpoints.saved_config(step), resolved):
        say(note)
    state, data_state = restored(trainer, checkpoints, step)
    batches.set_state(data_state)
    say(f"resuming from step {step} of {checkpoints.directory}")
    return state


def run_step(run: Run, state: TrainState, step: int) -> tuple[TrainState, dict[str, Any]]:
    """One step that took effect; `FloatingPointError` names the layers if the loss or gradient is not finite."""
    tokens = run.next_batch()
    state, metrics = run.trainer.step(state, tokens)
    values = jax.device_get(metrics)
    if values["overflow"]:
        state, metrics = run.trainer.step(state, tokens, full_capacity=True)
        values = jax.device_get(metrics)
    if not values["ok"]:
        bad = []
        for name, norm in values["grad_norms"].items():
            layers = np.flatnonzero(~np.isfinite(np.atleast_1d(norm))).tolist()
            if layers:
                bad.append(f"{name} {', '.join(map(str, layers))}" if np.ndim(norm) else name)
        where = f"not finite in {'; '.join(bad)}" if bad else "finite"
        run.checkpoints.wait()
        # One of this very step holds the parameters that have just failed.
        good = [run.checkpoints.directory / str(saved) for saved in run.checkpoints.steps() if saved < step]
        last = f"the last good checkpoint is {good[-1]}" if good else "there is no good checkpoint"
        raise FloatingPointError(f"step {step}: loss = {values['loss']}, gradient norm {where}; {last}")
    return state, values


def train(run: Run, state: TrainState) -> tuple[TrainState, bool]:
    """Steps until `num_steps` or a signal; (state, whether all steps were done)."""
    config, start = run.config, int(state.step)
    progress = None
    if run.log is not None:
        progress = ProgressLine(
            num_steps=config.num_steps,
            tokens_per_step=config.batch_size * config.sequence_length,
            flops_per_token=config.model.flops_per_token(config.sequence_length),
            num_devices=run.mesh.size,
            device_kind=run.mesh.devices.flat[0].device_kind,
        )
    span = config.profile.span() or (-1, -1)
    stopped, compiled = False, CompiledPrograms()
    with distributed.PreemptionSignal(steps_in_flight=0) as stop:
        for step in range(start, config.num_steps):
            if max(span[0], start) == step < span[1]:
                jax.profiler.start_trace(str(run.output_dir / "profile"))
            begun, programs = time.perf_counter(), compiled.count
            doing = status("compiling the training step", say) if step == start else contextlib.nullcontext()
            with run.watchdog.waiting_for("step", step), doing:
                state, values = run_step(run, state, step)
            step_s = time.perf_counter() - begun
            done = step + 1
            if done == span[1] > start:
                jax.profiler.stop_trace()
            if run.log is not None and progress is not None:
                line = step_record(values, step_s, config, compiled=compiled.count > programs)
                run.log.write_step(step, line)
                progress.update(step, loss=line["loss"], step_s=step_s, dropped_fraction=line["dropped_fraction"])
            run.checkpoints.check()
            stopped = done < config.num_steps and stop.requested(step)
            if stopped or done % config.checkpoint.every_steps == 0 or done == config.num_steps:
                run.save(done, state)
            if stopped:
                break
            if config.evaluates_after(done):
                run.evaluate(state)
        limit_s = run.checkpoints.limit_s
        with run.watchdog.waiting_for("last checkpoint", timeout_s=limit_s), status("writing the last checkpoint", say):
            run.checkpoints.wait()
    if progress is not None:
        progress.close()
    return state, not stopped


def finish(run: Run, state: TrainState, before: tuple[float, float] | None) -> None:
    """Print what the run learned and where its files are."""
    corpus, after = run.corpus, run.evaluate(state)
    sample = ""
    if corpus.tokenizer is not None and run.config.evaluation.sample_tokens:
        with run.watchdog.waiting_for("sample"), status("sampling a text", say):
            sample = sample_text(run.trainer, state, corpus.tokenizer, corpus.eot, run.config, run.mesh)
    totals = {} if run.config.tiers.on_device else tier_totals(run.trainer.expert_stats())
    if run.log is None:
        return
    with status("drawing the report", say):
        write_report(run.output_dir)
    unigram, xz = baselines(corpus)
    if 0 < len(corpus.held_out_bytes) < COMPARABLE_BYTES:
        say(
            f"held-out text: {len(corpus.held_out_bytes):,} bytes, too few to compare with xz and a unigram model\n"
            f"({COMPARABLE_BYTES:,}; see data.held_out_bytes and data.held_out_fraction)"
        )
    print_final_summary(
        output_dir=run.output_dir,
        checkpoint_dir=run.checkpoints.directory,
        before=before,
        after=after,
        unigram_bits_per_byte=unigram,
        xz_bits_per_byte=xz,
        expert_load=recent_expert_load(run.log.path),
        sample=sample,
    )
    if totals:
        say(tiers_summary(run.config, totals, run.log))


def main(arguments: Sequence[str]) -> None:
    """Print the plan, or train."""
    config = with_chosen_tiers(with_pretrained_model(parse_train(arguments, PRESETS)))
    if config.plan:
        plan = training_plan(config)
        print(plan)
        sys.exit(1 if plan.lacking() else 0)
    else:
        run_all(config)


def run_all(config: TrainConfig) -> None:
    """The whole run: processes, mesh, data, state, steps, evaluation."""
    distributed.start(config.distributed)
    output_dir = Path(config.output_dir)
    mesh = make_mesh(config.check_devices(jax.device_count(), devices_per_host()))
    total, active = config.model.num_parameters()
    say(
        f"{total / 1e6:.1f}M parameters, {active / 1e6:.1f}M active; {mesh.size} {mesh.devices.flat[0].device_kind} "
        f"device(s) as (data, expert_inter, expert_intra) = {tuple(mesh.shape.values())}; output in {output_dir}"
    )
    for warning in config.warnings():
        say(f"warning: {warning}")
    with contextlib.ExitStack() as stack:
        limits = config.distributed
        watchdog = stack.enter_context(distributed.Watchdog(limits.step_timeout_s, limits.heartbeat_timeout_s))
        folder = RunFolder(output_dir, wait_s=min(WAIT_S, 0.4 * limits.start_timeout_s))
        option = "distributed.start_timeout_s"
        with watchdog.waiting_for("the output folder", timeout_s=limits.start_timeout_s, option=option):
            stack.enter_context(folder)
        main_process, made = jax.process_index() == 0, PreparingData(say)
        resolved, cache = json.loads(config.to_json()), output_dir / "data"
        if main_process:
            stack.callback(discard, cache)
        with watchdog.waiting_for("data", timeout_s=limits.start_timeout_s, progress=made.progress, option=option):
            keep = has_checkpoint(config, resolved)
            role = Role(main_process, made.report, limits.start_timeout_s, watchdog.progress_of_rank_0, keep)
            corpus = prepare(config.data, config.model.vocab_size, cache, role)
        tokenizer = {TOKENIZER: corpus.tokenizer_path.read_bytes()} if corpus.tokenizer_path else {}
        held_out = len(corpus.held_out_tokens)
        say(f"{corpus.num_train_tokens:,} tokens to train on, {held_out:,} held out; {corpus.files()}")
        batches = train_batches(
            corpus,
            batch_size=config.batch_size,
            sequence_length=config.sequence_length,
            seed=config.seed,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            prefetch_batches=config.data.prefetch_batches,
        )
        stack.push(closing(batches.close))
        trainer = make_trainer(config, mesh, folder.run)
        stack.push(closing(trainer.close))
        for note in trainer.notes:
            say(note)
        saved, timeout_s = output_dir / "checkpoints", limits.step_timeout_s
        checkpoints = stack.enter_context(
            Checkpoints(saved, config.checkpoint, timeout_s=timeout_s, records=trainer.records)
        )
        resolved |= {FINGERPRINT: corpus.fingerprint}
        doing = status("restoring or initialising the state", say)
        with watchdog.waiting_for("restore or initialisation", progress=trainer.progress), doing:
            state = start_or_resume(config, trainer, checkpoints, batches, resolved)
        if main_process:
            publish(corpus, cache)
        start = int(state.step)
        log = MetricsLog(output_dir, start_step=start) if main_process else None
        if log is not None:
            stack.push(closing(log.close))
        if main_process:
            (output_dir / "config.json").write_text(json.dumps(resolved, indent=1))
        run = Run(config, resolved, mesh, corpus, batches, trainer, checkpoints, watchdog, folder, tokenizer, log)
        before: tuple[float, float] | None = None
        if start == 0:
            before = run.evaluate(state)
        elif log is not None:  # the first run's, if this folder has it
            first = [event for event in read_events(log.path) if event["event"] == "evaluation" and event["step"] == 0]
            before = (first[0]["loss"], first[0]["bits_per_byte"]) if first else None
        state, completed = train(run, state)
        if completed:
            finish(run, state, before)
        else:
            say(f"stopped by a signal after step {int(state.step)}; the same command goes on from there")
            if log is not None:
                say(f"report of the steps so far: {write_report(output_dir)}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"train.py: {error}")
