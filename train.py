"""Train a Mixture-of-Experts language model: python train.py PRESET [--section.field VALUE ...]."""

import sys

from jmoe.command_line import parse_train, parse_with_default_sigpipe
from jmoe.configs import PRESETS
from jmoe.runtime import (
    EXIT_LOST,
    end_at_once_on_interrupt,
    exit_callback,
    hide_devices,
    ignore_output_errors,
    log_to_stderr,
    program_name,
    reexec_with_env,
)

if __name__ == "__main__":
    reexec_with_env()  # before JAX is imported
    end_at_once_on_interrupt()  # outside the training loop
    if parse_with_default_sigpipe(lambda: parse_train(sys.argv[1:], PRESETS)).estimate:
        hide_devices()

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from jmoe.cluster.distributed import join_processes
from jmoe.cluster.job import describe_hosts
from jmoe.cluster.signals import PreemptionSignal
from jmoe.cluster.watchdog import Watchdog, make_watchdog
from jmoe.config import TrainConfig, VisionTrainConfig, check
from jmoe.config.cluster import read_cluster
from jmoe.data.chat_files import replace_chat_files
from jmoe.data.context_rows import loaded_share
from jmoe.data.corpus import (
    PreparationRole,
    discard_staged,
    prepare_corpus,
    publish_staged,
)
from jmoe.data.loader import BatchParts, train_batches
from jmoe.data.progress import PreparationProgress
from jmoe.data.tokenizing_job import TextChangedError
from jmoe.deploy.model_folder import merge_in_subprocess
from jmoe.deploy.upcycle import with_upcycled_model
from jmoe.inference.teacher import Teacher, teacher_fingerprint
from jmoe.mesh import device_counts_of_hosts, make_mesh
from jmoe.models.tokenizer_file import TOKENIZER
from jmoe.run.checkpoint import Checkpoints
from jmoe.run.cluster_planner import cluster_rows, rows_as_json, table_lines
from jmoe.run.compatibility import (
    BASE,
    TEACHER,
    check_same_on_all_processes,
    has_compatible_checkpoint,
    raise_if_checkpoint_has_other_data,
)
from jmoe.run.compile_cache import enable_compile_cache
from jmoe.run.metrics import CompilationCounter, ProgressBar, make_progress_bar, make_step_record
from jmoe.run.planner import packing_summary, tier_counts, training_plan, with_chosen_tiers
from jmoe.run.prometheus import RunMetrics
from jmoe.run.run_folder import WAIT_S, RunFolder
from jmoe.run.snapshots import Snapshots
from jmoe.status import status
from jmoe.training.expert_packing import (
    PackingController,
    choose_expert_sharding,
    initial_packing,
)
from jmoe.training.finetune import (
    base_model_fingerprint,
    companion_files,
    is_run_folder,
    with_pretrained_model,
)
from jmoe.training.fused.adapting import AdapterTrainer
from jmoe.training.fused.distilling import DistillingTrainer
from jmoe.training.fused.preferring import PreferenceTrainer, make_preference_trainer
from jmoe.training.fused.step_estimate import estimate_step
from jmoe.training.reference_answers import read_or_compute_reference_answers
from jmoe.training.session import Session, print_on_rank_0
from jmoe.training.state import TrainState
from jmoe.training.streamed.adapting import StreamedAdapterTrainer
from jmoe.training.task import RunSetup, Task, TrainingData, open_session
from jmoe.training.tasks.task import ImageTraining
from jmoe.training.trainer import Trainer, make_trainer
from jmoe.types import JsonObject, PyTree


def train_step(trainer: Trainer, state: TrainState, batch: PyTree) -> tuple[TrainState, JsonObject]:
    """Take one optimizer step on tokens [accumulation steps, B, S + 1], or on `SampleRows`; return
    (state, metrics on the host).

    `trainer.step` is one program of three functions: `FusedTrainer.loss_local` computes next-token
    cross-entropy and the router's balance losses; `FusedTrainer.gradients_local` is a reverse scan
    over the layers that reduces gradients over the devices; `finish_step` clips and applies AdamW.
    `StreamedTrainer`, for experts off the device, runs the same three layer by layer.

    If a dropless buffer overflows, no update is made, and the step runs again with capacity for
    every token. If float16 gradients overflow, no update is made, and the step runs again with half
    the loss scale. The metric `skipped_steps` counts the latter.
    """
    full_capacity, skipped_steps = False, 0
    while True:
        state, metrics = trainer.step(state, batch, full_capacity=full_capacity)
        values = jax.device_get(metrics)
        skipped = bool(values.get("skipped", False))
        if not values["overflow"] and not skipped:
            return state, values | {"skipped_steps": skipped_steps}
        full_capacity = full_capacity or bool(values["overflow"])
        skipped_steps = skipped_steps + skipped


def train(run: Session, state: TrainState) -> tuple[TrainState, bool]:
    """Take steps until `num_steps` or a stop signal; return (state, whether all steps are done)."""
    config, start = run.config, int(state.step)
    progress = make_progress_bar(config, run.mesh) if run.log is not None else None
    profile_from, profile_to = config.profile.traced_steps() or (-1, -1)
    stopped, compiled = False, CompilationCounter()
    with PreemptionSignal(steps_in_flight=0) as stop:
        for step in range(start, config.num_steps):
            if max(profile_from, start) == step < profile_to:
                jax.profiler.start_trace(str(run.output_dir / "profile"))
            state = run.rebalance(step, state)
            begun, processor_s, programs = time.perf_counter(), time.process_time(), compiled.count
            compiling = (
                status("compiling the training step", print_on_rank_0)
                if step == start
                else contextlib.nullcontext()
            )
            with run.watchdog.waiting_for("step", step), compiling:
                state, metrics = train_step(run.trainer, state, run.next_batch())
                run.check_finite(step, metrics)
            run.note_metrics(metrics)
            step_s, done = time.perf_counter() - begun, step + 1
            has_compiled = compiled.count > programs
            run.note_step(step_s, time.process_time() - processor_s, compiled=has_compiled)
            if done == profile_to > start:
                jax.profiler.stop_trace()
            if progress is not None:
                record = make_step_record(metrics, step_s, config, compiled=has_compiled)
                log_step(run, progress, step, record)
            run.checkpoints.raise_save_error()
            stopped = done < config.num_steps and stop.must_stop_after(step)
            if stopped or done % config.checkpoint.every_steps == 0 or done == config.num_steps:
                run.save(done, state)
            if stopped:
                break
            run.save_snapshot(done, state)
            if config.evaluates_after(done):
                run.evaluate(state)
        limit_s = run.checkpoints.save_limit_s
        with (
            run.watchdog.waiting_for("last checkpoint", timeout_s=limit_s),
            status("writing the last checkpoint", print_on_rank_0),
        ):
            run.checkpoints.wait_for_save()
    if progress is not None:
        progress.close()
    return state, not stopped


def log_step(run: Session, progress: ProgressBar, step: int, record: JsonObject) -> None:
    """Write a step's record to the log, the exporter and the progress bar; on process 0 only."""
    assert run.log is not None
    config = run.config
    if (stats := run.trainer.expert_stats()) is not None:
        record["tiers"] = tier_counts(stats)
    run.log.write_step(step, record)
    if run.exporter is not None:
        run.exporter.note_step(step, record)
    progress.set_devices_and_tokens(
        run.mesh.size, config.tokens_before_step(step + 1) - config.tokens_before_step(step)
    )
    progress.show_step(
        step,
        loss=record["loss"],
        step_s=record["step_s"],
        dropped_fraction=record["dropped_fraction"],
    )


def main(arguments: Sequence[str]) -> None:
    """Train, or print the plan or estimate that the command line asks for."""
    config = parse_train(arguments, PRESETS)
    if (
        not isinstance(config, VisionTrainConfig)
        and config.init_from
        and is_run_folder(Path(config.init_from).expanduser())
    ):
        merge_in_subprocess(config.init_from, "init_from")
    config = with_pretrained_model(with_upcycled_model(config))
    if config.cluster:
        cluster = read_cluster(Path(config.cluster))
        rows = cluster_rows(config, cluster)
        print(
            *(
                [json.dumps(rows_as_json(rows), indent=1)]
                if config.json
                else table_lines(rows, cluster)
            ),
            sep="\n",
        )
        sys.exit(0 if any(row.fits for row in rows) else 1)
    if config.estimate:
        with status(f"compiling a step for {config.estimate}", print_on_rank_0):
            estimate = estimate_step(config)
        print(estimate)
        return
    config = with_chosen_tiers(config)
    if config.plan:
        plan, fits = task_of(config).plan_report()
        print(plan)
        sys.exit(0 if fits else 1)
    completed = run_training(config)
    sys.exit(0 if completed else config.distributed.stopped_exit_code)


class LanguageModeling:
    """The `Task` of training a language model on text."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def plan_report(self) -> tuple[str, bool]:
        """Return (text of the memory and time plan, whether the run fits this machine)."""
        config, plan = self.config, training_plan(self.config)
        lines = [str(plan)] + [packing_summary(config)] * (config.comm.packing != 1)
        return "\n".join(lines), not plan.lacking_bytes

    def prepare_on_mesh(self, mesh: Mesh, stack: contextlib.ExitStack) -> None:
        """Do nothing: this task needs nothing before the text is read."""

    def read_data(self, setup: RunSetup) -> TrainingData:
        """Return the training data: tokenize the text, or open the tokens of an earlier start."""
        return prepare_text_data(self.config, setup.watchdog, setup.stack, setup.resolved)

    def make_trainer(self, setup: RunSetup, data: TrainingData) -> Trainer:
        """Return the decoder's trainer, with a teacher if the configuration names one for
        distillation.
        """
        config, _ = setup.expert_packing.current_config_and_shape()
        if config.dpo.beta is not None:
            return make_preference_trainer(config, setup.mesh)
        if config.lora.rank is not None:
            if config.tiers.all_on_device:
                return AdapterTrainer(config, setup.mesh)
            return StreamedAdapterTrainer(config, setup.mesh, setup.folder.run_name)
        if not config.distil.teacher:
            return make_trainer(config, setup.mesh, setup.folder.run_name)
        with status(f"loading the teacher {config.distil.teacher}", print_on_rank_0):
            teacher = setup.stack.enter_context(Teacher(config))
        return DistillingTrainer(config, setup.mesh, teacher, teacher.head)

    def make_session(
        self,
        setup: RunSetup,
        data: TrainingData,
        trainer: Trainer,
        checkpoints: Checkpoints,
        snapshots: Snapshots | None,
    ) -> Session:
        """Return the session, which also evaluates the loss on held-out text. Of preferences, it
        has the reference model's log-probabilities.
        """
        run = open_session(Session, setup, data, trainer, checkpoints, snapshots)
        if isinstance(trainer, PreferenceTrainer):
            read_or_compute_reference_answers(run, trainer)
        return run


def task_of(config: TrainConfig) -> Task:
    """Return the run's task: image tasks for a `VisionTrainConfig`, language modeling
    otherwise.
    """
    return (
        ImageTraining(config) if isinstance(config, VisionTrainConfig) else LanguageModeling(config)
    )


def share_of_rows(config: TrainConfig) -> tuple[int, int]:
    """Return the (index, count) of the share of a batch that this process loads, and print how many
    devices share a sequence if several do.
    """
    sharing, devices = config.devices_per_sequence(jax.device_count()), jax.local_device_count()
    share = loaded_share(sharing, devices, jax.process_index(), jax.process_count())
    if sharing > 1:
        print_on_rank_0(f"mesh.context = {config.mesh.context}: {sharing} devices to a sequence")
    return share


def batch_parts(config: TrainConfig) -> BatchParts:
    """Return how this process's rows of a batch are divided over its devices and micro-batches."""
    sharing = config.devices_per_sequence(jax.device_count())
    groups = max(1, jax.local_device_count() // sharing)
    return BatchParts(groups, config.gradient_accumulation_steps)


def prepare_text_data(
    config: TrainConfig,
    watchdog: Watchdog,
    stack: contextlib.ExitStack,
    resolved: JsonObject,
) -> TrainingData:
    """Return the data of a text run: tokenize the text, or open existing tokens.

    Process 0 does the work while the others wait.
    """
    limits, main_process = config.distributed, jax.process_index() == 0
    process_index, process_count = share_of_rows(config)
    preparing = PreparationProgress(print_on_rank_0)
    cache = Path(config.output_dir) / "data"
    option = "distributed.start_timeout_s"
    if main_process:
        stack.callback(discard_staged, cache)
    with watchdog.waiting_for(
        "data", timeout_s=limits.start_timeout_s, progress=preparing.progress_text, option=option
    ):
        keep = has_compatible_checkpoint(config, resolved)
        role = PreparationRole(
            main_process,
            preparing.report,
            limits.start_timeout_s,
            watchdog.progress_of_rank_0,
            keep,
        )
        try:
            corpus = prepare_corpus(config.data, config.text_vocab_size, cache, role)
        except TextChangedError:
            raise_if_checkpoint_has_other_data(config, resolved)
            raise
    files = {TOKENIZER: corpus.tokenizer_path.read_bytes()} if corpus.tokenizer_path else {}
    if config.init_from:
        files |= companion_files(config.init_from, files.get(TOKENIZER))
    if corpus.held_out_samples is not None:
        files = replace_chat_files(files, config.data, corpus.shard_folders)
        why = "must not be set with samples, such as chats, in data.path: it takes text alone"
        check(not config.distil.teacher, "distil.teacher", config.distil.teacher, why)
        for name in ("bidirectional", "num_encoder_layers"):
            value = getattr(config.model, name)
            check(not value, f"model.{name}", value, why)
        why = (
            "must be False with samples, such as chats, in data.path: data.pack_samples masks them"
        )
        check(not config.data.mask_documents, "data.mask_documents", True, why)
    print_on_rank_0(f"{corpus.describe_tokens()}; {corpus.describe_input_files()}")
    if config.init_from and corpus.describe_control_token_texts():
        print_on_rank_0(corpus.describe_control_token_texts())
    batches = train_batches(
        corpus,
        batch_size=config.batch_size,
        sequence_length=config.sequence_length,
        seed=config.seed,
        process_index=process_index,
        process_count=process_count,
        config=config.data,
        parts=batch_parts(config),
    )
    if batches.description:
        print_on_rank_0(batches.description)
    return TrainingData(
        corpus, batches, corpus.fingerprint, files, lambda: publish_staged(corpus, cache)
    )


def config_to_save(config: TrainConfig) -> JsonObject:
    """Return the configuration as checkpoints store it, with the fingerprints of a teacher and of
    the frozen model of adapters or the reference model of preferences, if there are such models.
    """
    resolved: JsonObject = json.loads(config.to_json())
    if config.distil.teacher:
        resolved[TEACHER] = teacher_fingerprint(config.distil.teacher)
    if config.lora.rank is not None or config.dpo.beta is not None:
        resolved[BASE] = base_model_fingerprint(config.init_from)
    return resolved


def devices_per_host() -> int:
    """Return the number of devices per host, or 0 if hosts differ. In a run of several processes,
    print the numbers.
    """
    of_hosts = device_counts_of_hosts()
    if jax.process_count() > 1:
        print_on_rank_0(describe_hosts(of_hosts))
    return of_hosts[0] if len({*of_hosts}) == 1 else 0


def set_up_run(config: TrainConfig, task: Task, stack: contextlib.ExitStack) -> RunSetup:
    """Connect the processes, make the mesh and lock the output folder; return the run's parts."""
    join_processes(config.distributed)
    enable_compile_cache()
    devices, per_host = jax.device_count(), devices_per_host()
    config.checked_mesh_shape(devices, per_host)
    unpacked = config.mesh.resolve_shape(devices, per_host)
    packing = initial_packing(config, devices, per_host)
    config = choose_expert_sharding(config, unpacked, packing)
    expert_packing = PackingController(config, unpacked, packing)
    _, shape = expert_packing.current_config_and_shape()
    mesh = make_mesh(shape, replicas=config.mesh.replicate)
    task.prepare_on_mesh(mesh, stack)
    output_dir, limits = Path(config.output_dir), config.distributed
    total, active = config.model.total_and_active_parameters()
    print_on_rank_0(
        f"{total / 1e6:.1f}M parameters, {active / 1e6:.1f}M active; {mesh.size}"
        f" {mesh.devices.flat[0].device_kind} device(s) as (data, expert_inter, expert_intra) ="
        f" {shape}; output in {output_dir}"
    )
    if config.comm.packing != 1:
        print_on_rank_0(
            f"comm.packing = {config.comm.packing}: {expert_packing.experts_per_device} experts a"
            " device"
        )
    for warning in config.warnings():
        print_on_rank_0(f"warning: {warning}")
    watchdog = stack.enter_context(make_watchdog(limits))
    folder = RunFolder(output_dir, wait_s=min(WAIT_S, 0.4 * limits.start_timeout_s))
    option = "distributed.start_timeout_s"
    with watchdog.waiting_for("all options", timeout_s=limits.start_timeout_s, option=option):
        check_same_on_all_processes(config)
    with watchdog.waiting_for("the output folder", timeout_s=limits.start_timeout_s, option=option):
        stack.enter_context(folder)
    exporter = None
    if jax.process_index() == 0 and config.metrics.port:
        exporter = stack.enter_context(RunMetrics(config, folder.run_name))
        print_on_rank_0(f"metrics for Prometheus on port {exporter.port}")
    return RunSetup(
        config, config_to_save(config), mesh, watchdog, folder, expert_packing, exporter, stack
    )


def open_checkpoints(setup: RunSetup, trainer: Trainer) -> tuple[Checkpoints, Snapshots | None]:
    """Return the run's checkpoints, and its in-memory snapshots, None unless
    `checkpoint.memory_dir` is set.
    """
    config, folder, enter = setup.config, setup.folder, setup.stack.enter_context
    directory = Path(config.output_dir) / "checkpoints"
    timeout_s = config.distributed.step_timeout_s
    checkpoints = enter(
        Checkpoints(directory, config.checkpoint, timeout_s=timeout_s, records=trainer.records)
    )
    if config.checkpoint.memory_dir is None:
        return checkpoints, None
    return checkpoints, enter(Snapshots(config.checkpoint, folder.run_name, folder.start_tokens))


def restore_and_open_log(
    run: Session, data: TrainingData, stack: contextlib.ExitStack
) -> TrainState:
    """Return the initial state, or the one restored from a checkpoint; on process 0 also open the
    log and record the start.
    """
    state = run.start_or_resume()
    if jax.process_index() == 0:
        run.folder.note_start()
        data.publish()
        stack.push(exit_callback(run.open_log(int(state.step)).close))
        if run.exporter is not None:
            run.exporter.note_resume(int(state.step))
        (run.output_dir / "config.json").write_text(json.dumps(run.resolved, indent=1))
    return state


def run_training(config: TrainConfig) -> bool:
    """Set up data, model and checkpoints, then train, evaluate and report. Return whether all steps
    are done.
    """
    task = task_of(config)
    with contextlib.ExitStack() as stack:
        setup = set_up_run(config, task, stack)
        data = task.read_data(setup)
        stack.push(exit_callback(data.batches.close))
        trainer = task.make_trainer(setup, data)
        run: Session | None = None  # its trainer may be replaced
        stack.push(exit_callback(lambda: (trainer if run is None else run.trainer).close()))
        for note in trainer.notes:
            print_on_rank_0(note)
        run = task.make_session(setup, data, trainer, *open_checkpoints(setup, trainer))
        state = restore_and_open_log(run, data, stack)
        before = run.evaluate_step_0(state)
        state, completed = train(run, state)
        if completed:
            run.evaluate_and_summarize(state, before)
        else:
            print_on_rank_0(
                f"stopped by a signal after step {int(state.step)}; the same command goes on from"
                " there"
            )
            if jax.process_index() == 0:
                print_on_rank_0(f"report of the steps so far: {run.draw_report()}")
        return completed


if __name__ == "__main__":
    ignore_output_errors()
    log_to_stderr()
    try:
        main(sys.argv[1:])
    except TimeoutError as error:  # another process is missing
        print(f"{program_name()}: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_LOST)
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"{program_name()}: {error}")
