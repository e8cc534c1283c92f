"""The work of an engine between requests: it compiles the programs of requests to come, and
measures the machine.

A server listens as soon as its model is loaded. A step compiles the programs that it needs and that
are not compiled yet; the other ones are compiled here, one task at a time between two requests,
those that most requests need first. The programs of sampling, the longest to compile, need no
model: a thread compiles them meanwhile. Called by `Engine`.

Legend:
P rows of a step
V vocabulary
C tokens of a chunk
"""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import jax
import numpy as np

from jmoe.inference.ahead import warm_up_token_slice
from jmoe.inference.calibration import calibrate
from jmoe.inference.loading import LoadedModel
from jmoe.inference.sampler import SAMPLING_VARIANTS, Sampler, SamplingVariant
from jmoe.inference.verification import warm_up_verification
from jmoe.models.lazy_checkpoint import DEFAULT_MAX_SEQ_LEN
from jmoe.planning.streaming import Calibration

log = logging.getLogger("jmoe")

Shape = tuple[int, int]  # rows and tokens a row of a program


class _SamplingPrograms:
    """Compiles the programs of `sample` in a thread, except those that a step needs earlier."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._left = list(SAMPLING_VARIANTS)  # those that nobody has compiled or compiles
        self._running: tuple[SamplingVariant, Future[None]] | None = None

    def start_compiling_next(self, compile_variant: Callable[[SamplingVariant], None]) -> None:
        """Begin to compile the next variant in the thread, unless none is left or the thread is
        still busy.

        compile_variant: compiles its argument.
        """
        if self._left and (self._running is None or self._running[1].done()):
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="sampling programs")
            variant = self._left.pop(0)
            self._running = variant, self._thread.submit(compile_variant, variant)

    def wait_or_claim(self, variant: SamplingVariant) -> None:
        """Wait until the thread has compiled this variant, or keep it from beginning to.

        The caller then compiles it, unless the thread has.
        """
        if variant in self._left:
            self._left.remove(variant)
        elif self._running is not None and self._running[0] == variant:
            future, self._running = self._running[1], None
            wait([future])
            if (error := future.exception()) is not None:
                log.warning("%s was not compiled early", variant, exc_info=error)

    def close(self) -> None:
        """End the thread, once the program that it compiles is done."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)


class Preparation:
    """The programs that requests may need, compiled task by task."""

    def __init__(self, model: LoadedModel, sampler: Sampler) -> None:
        self._model, self._sampler, self._runner = model, sampler, model.runner
        self._max_batch = model.scheduler.max_batch
        # only policy "auto" of one device chooses for each step how its experts come
        self._chooses_policy = model.on_one is not None and model.memory.policy == "auto"
        self._compiled: set[Shape] = set()
        self._logits_1V: jax.Array | None = None
        self._sampling = _SamplingPrograms()
        sampler.before_sampling = self._sampling.wait_or_claim
        self._tasks = deque(self._list_tasks())
        self._num_tasks = len(self._tasks)

    def is_done(self) -> bool:
        """Whether all programs that requests may need are compiled."""
        return not self._tasks

    def __str__(self) -> str:
        return f"{self._num_tasks - len(self._tasks)} of {self._num_tasks}"

    def run_next_task(self, *, in_thread: bool = False) -> None:
        """Compile the programs of the next task, by running them on padding.

        in_thread: let a thread compile a program of sampling meanwhile.
        """
        if in_thread and self._logits_1V is not None:
            self._sampling.start_compiling_next(
                partial(self._sampler.warm_up_sampling, self._logits_1V)
            )
        self._runner.begin_step(whole_layers=False)
        self._tasks.popleft()()

    def skip_tasks(self) -> None:
        """Leave the programs of all other tasks to the steps that need them."""
        self._tasks.clear()

    def close(self) -> None:
        """End the thread that compiles, once its program is done."""
        self._sampling.close()

    def measure_machine(self) -> Calibration:
        """Return how fast this machine computes and copies, for policy "auto".

        Compiles the programs that it times. Overwrites the KV cache and the experts' slots: no
        request may run, and no cached prefix may be used afterwards.
        """
        model, scheduler = self._model, self._model.scheduler
        assert model.on_one is not None
        prefill_tokens = scheduler.prefill_widths[-1]
        self._runner.begin_step(whole_layers=False)
        for shape in {(1, 1), (self._max_batch, 1), (1, prefill_tokens)} - self._compiled:
            self._compile_group(shape)
        return calibrate(
            model.on_one,
            model.store,
            self._sampler,
            max_batch=self._max_batch,
            prefill_tokens=prefill_tokens,
            # half of a typical sequence
            position=min(scheduler.max_seq_len, DEFAULT_MAX_SEQ_LEN) // 2,
        )

    def _list_tasks(self) -> list[Callable[[], None]]:
        """Return the tasks in the order in which requests usually need their programs."""
        scheduler = self._model.scheduler
        prompts = scheduler.prefill_program_shapes
        # one sequence of any length, then several
        shapes = [(1, 1), *(shape for shape in prompts if shape[0] == 1)]
        shapes += [(rows, 1) for rows in scheduler.decode_buckets] + [*prompts]
        shapes = list(dict.fromkeys(shapes))
        tasks: list[Callable[[], None]] = [partial(self._compile_group, shape) for shape in shapes]
        drafts = scheduler.draft_program_shapes
        # one sequence with a draft, before several of any kind
        tasks[1:1] = [partial(self._compile_drafts, shape) for shape in drafts[:1]]
        tasks += [partial(self._compile_drafts, shape) for shape in drafts[1:]]
        if self._chooses_policy:
            tasks += [
                partial(self._compile_whole_layers, s) for s in dict.fromkeys(shapes + [*drafts])
            ]
        if self._model.on_one is not None and self._model.on_one.samples_in_step:
            buckets = scheduler.decode_buckets
            tasks += [partial(self._compile_sampling_in_step, rows) for rows in buckets]
        tasks.append(self._compile_block_copies)
        tasks += [partial(self._compile_prompt_logprobs, shape) for shape in prompts]
        return tasks + [partial(self._compile_sampling, variant) for variant in SAMPLING_VARIANTS]

    def _compile_group(self, shape: Shape) -> None:
        """Compile the programs of a group of this shape, by running them on padding."""
        num_rows, width = shape
        for batch in self._runner.padding_batches(num_rows, width):
            (output,) = self._runner.forward([batch])
            logits_PV = self._runner.logits(output, np.zeros(num_rows, np.int32))
        if width == 1:  # sampling depends on the shape of the logits alone, not on the width
            self._sampler.warm_up(logits_PV)
            if num_rows == 1:
                self._logits_1V = logits_PV
            if self._model.on_one is not None and num_rows < self._max_batch:
                warm_up_token_slice(self._max_batch, num_rows)
        self._compile_prediction(shape)
        self._compiled.add(shape)

    def _compile_sampling_in_step(self, num_rows: int) -> None:
        """Compile the program of single tokens that also samples, by running it on padding."""
        for batch in self._runner.padding_batches(num_rows, 1):
            sampled = batch._replace(sampling=self._sampler.padding_params())
            self._runner.forward([sampled])

    def _compile_drafts(self, shape: Shape) -> None:
        """Compile the programs that run and verify drafts, by running them on padding."""
        for batch in self._runner.padding_batches(*shape):
            (output,) = self._runner.forward([batch])
        warm_up_verification(self._sampler, self._runner.logits_of_all(output), self._max_batch)
        self._compile_prediction(shape)

    def _compile_prediction(self, shape: Shape) -> None:
        """Compile the programs that draft tokens after a step with a group of this shape."""
        if self._model.predictor is not None:
            self._model.predictor.warm_up(*shape)

    def _compile_whole_layers(self, shape: Shape) -> None:
        """Compile the programs of a group in a step with whole layers, which policy "auto" may
        choose.
        """
        runner, (num_rows, width) = self._model.on_one, shape
        assert runner is not None
        for batch in runner.padding_batches(num_rows, width):
            (output,) = runner.run_layer_by_layer([batch])
            runner.logits(output, np.zeros(num_rows, np.int32))

    def _compile_block_copies(self) -> None:
        """Compile copies of blocks of the cache, by copying nothing."""
        self._runner.copy_cache_blocks([(0, 0)], 0)
        # between devices is another program
        self._runner.copy_cache_blocks([(0, self._model.scheduler.stats().blocks - 1)], 0)
        if self._model.predictor is not None:
            self._model.predictor.copy_cache_blocks([(0, 0)], 0)

    def _compile_sampling(self, variant: SamplingVariant) -> None:
        """Compile a variant of `sample`, unless it is compiled already."""
        assert self._logits_1V is not None, "the first task makes them"
        self._sampling.wait_or_claim(variant)
        self._sampler.warm_up_sampling(self._logits_1V, variant)

    def _compile_prompt_logprobs(self, shape: Shape) -> None:
        """Compile the log-probabilities of prompts for groups of this shape."""
        logits_CV = self._runner.logits_of_chunk(self._runner.zero_output(*shape), 0)
        self._sampler.warm_up_prompt_logprobs(logits_CV)
