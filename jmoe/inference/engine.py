"""The inference engine: continuous batching of requests, with experts that need not fit the device.

The server's `EngineLoop` and the programs call `Engine`; `Engine.step` composes scheduler, runner
and sampler.

Legend:
P rows of a step
C tokens a row
B rows of logits to sample from
D hidden
V vocabulary
"""

import contextlib
import gc
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jmoe.config import check
from jmoe.config.engine import CACHE_BLOCK, EngineConfig
from jmoe.inference.ahead import StepAhead
from jmoe.inference.detokenizer import TextStream
from jmoe.inference.loading import LoadedModel, Say
from jmoe.inference.mesh.lockstep import Leader
from jmoe.inference.output_events import OutputEvent, join_content
from jmoe.inference.preparation import Preparation
from jmoe.inference.sampler import Draw, PendingDraws, Sampler
from jmoe.inference.sampler_arrays import BatchParams
from jmoe.inference.sampling import NOT_FINITE
from jmoe.inference.sampling_params import Constraint, SamplingParams
from jmoe.inference.scheduler import Chunk, ChunkGroup, SchedulerStats, StepPlan, smallest_bucket
from jmoe.inference.sequence import Completion, Output, Sequence
from jmoe.inference.served_adapters import NO_ADAPTERS
from jmoe.inference.stats import EngineStats, StatsCollector
from jmoe.inference.verification import DraftVerifier
from jmoe.memory.closing import Closing
from jmoe.memory.tiered_store import LinkName
from jmoe.models.tokenizer_file import TOKENIZER, open_tokenizer
from jmoe.offload.policies import ExpertResidency
from jmoe.planning.streaming import StreamingPlan
from jmoe.status import status

log = logging.getLogger("jmoe")
PAUSE_S = 0.005  # how long a step without any tokens to run waits for a constraint
UNMEASURED = (
    "until this machine is measured, after the first answer: steps of few tokens load the chosen"
    " experts, steps whose tokens choose most of them load whole layers"
)
NO_NUMBERS = "the model's logits are not finite, so no token can be drawn"


class ReloadError(RuntimeError):
    """Other weights could not be loaded, and the engine has its old ones again."""


class Engine(Closing):
    """Serves requests with one model. Not thread-safe.

        config = EngineConfig(max_batch=8, max_seq_len=2048, policy="ring", ring_slots=4)
        engine = Engine(folder, config)
        completions = engine.generate(["def f("], max_new_tokens=32)

    Or call `add_request`, then `step` while `has_unfinished`.

    on_prepared: called once all programs that requests may need are compiled, by
        `run_next_preparation_task` or `compile_all_programs`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        config: EngineConfig | None = None,
        *,
        leader: Leader | None = None,
        bandwidth_limit_bytes_per_s: Mapping[LinkName, float] | None = None,
        say: Say = log.info,
    ) -> None:
        """Load the Hugging Face checkpoint in a folder.

        Programs compile when a step first needs them, unless `run_next_preparation_task` or
        `compile_all_programs` has compiled them.

        leader: with several processes, rank 0's connection to the others. Each of these runs a
            `Follower` with the runner of its own `LoadedModel` of the same folder and options.
        bandwidth_limit_bytes_per_s: limits on reads from the tiers "nvme" and "host", for
            measurements.
        say: receives a line about each slow operation.

        Raises ValueError naming field, value and constraint, before it reads weights.
        """
        self.leader, self._say = leader, say
        self.on_prepared: Callable[[], object] = lambda: None
        # whether a thread that could not be ended still runs the engine, which then stays open
        self.is_in_use = False
        self._is_loaded = False  # False for good if neither other weights nor the old ones load
        self._has_answered = False
        self._load_model = partial(
            LoadedModel,
            options=config or EngineConfig(),
            bandwidth_limit_bytes_per_s=bandwidth_limit_bytes_per_s,
            say=say,
        )
        self._load(folder)

    def _load(self, folder: str | os.PathLike[str]) -> None:
        """Load a checkpoint, and make the scheduler, sampler and counters for it."""
        self._model = model = self._load_model(folder)
        options, memory, on_mesh = model.options, model.memory, model.on_mesh
        self._scheduler, self._store, self._runner = model.scheduler, model.store, model.runner
        self.residency: ExpertResidency = self._runner.residency
        self.adapters = NO_ADAPTERS if model.on_one is None else model.on_one.adapters
        if on_mesh is not None:
            on_mesh.leader = self.leader
        self.config, self.max_batch = self._runner.config, self._scheduler.max_batch
        self.max_seq_len = self._scheduler.max_seq_len
        # of all sequences together, on all devices
        self.cache_tokens = self._scheduler.stats().blocks * CACHE_BLOCK
        self.eos_token_ids = tuple(sorted(self._scheduler.eos_token_ids))
        self._sampler = Sampler(self.max_batch, self.config.vocab_size, self.eos_token_ids)
        self._predictor = model.predictor
        self._ahead: StepAhead | None = None
        tokenizer = model.folder / TOKENIZER
        self.tokenizer = open_tokenizer(tokenizer) if tokenizer.is_file() else None
        placer = None if on_mesh is None else on_mesh.placer
        self._collector = StatsCollector(self._runner, self._store, StreamingPlan(memory), placer)
        if on_mesh is not None and options.mesh.placement != "even":
            on_mesh.enable_swaps(*on_mesh.measure_swap_costs())
        self._preparation = Preparation(model, self._sampler)
        self._prepared_s = 0.0
        # policy "auto" of one device measures the machine, once it has answered a request
        self._is_measured = model.on_one is None or memory.policy != "auto"
        self._log_plan()
        self._reset_counters_and_choices()
        self._is_loaded = True

    def reload(self, folder: str | os.PathLike[str]) -> None:
        """Replace the weights by those of another checkpoint of the same configuration and
        tokenizer. The cache of keys and values and the counters begin anew.

        No sequence may be unfinished, and only this process may run the engine. The old weights
        leave the memory before the new ones are read. If that fails, the old ones are loaded again;
        then raises ReloadError. Other threads may call `check_request` meanwhile.
        """
        assert not self.has_unfinished, "their keys and values are of the old weights"
        assert self.leader is None, "the other processes would keep their weights"
        before = self._model.folder
        self._unload()
        try:
            self._load(folder)
            return
        except Exception as error:
            log.exception("loading %s has failed; the weights of before are loaded", folder)
            failure = str(error)  # the error itself would keep what was loaded
        self._load(before)
        raise ReloadError(failure)

    def _unload(self) -> None:
        """Close the model and let go of its arrays."""
        self.close()
        self._is_loaded = False
        del self._model, self._store, self._runner, self.residency, self._predictor
        del self._sampler, self._collector, self._preparation
        gc.unfreeze()  # a server freezes what it has loaded, so that no collection would free it
        gc.collect()

    # Requests

    def add_request(
        self,
        prompt: str | Iterable[int],
        sampling: SamplingParams | None = None,
        constraint: Constraint | None = None,
        adapter: str = "",
    ) -> Sequence:
        """Queue a request and return its sequence.

        prompt: text, or token ids.
        constraint: restricts the output; must not be shared with another request.
        adapter: name of a LoRA adapter of `EngineConfig.lora`; "" for the model as it is.

        Raises ValueError if the request is invalid for this model.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    "prompt: is text, but the checkpoint has no tokenizer.json; give token ids"
                )
            token_ids = self.tokenizer.encode(prompt).ids
        else:
            token_ids = [int(token) for token in prompt]
        check(bool(token_ids), "prompt", prompt, "must hold at least one token")
        sequence = Sequence(token_ids, sampling or SamplingParams(), constraint, adapter=adapter)
        self.add_sequence(sequence)
        return sequence

    def add_sequence(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises ValueError as `check_request` does, and for a constraint beside min_new_tokens.
        """
        sampling = sequence.sampling
        self.check_request(sequence.prompt_token_ids, sampling)
        self.adapters.check_adapter_name(sequence.adapter)
        check(
            sequence.constraint is None or not sampling.min_new_tokens,
            "min_new_tokens",
            sampling.min_new_tokens,
            "must be 0 with a constraint, which may allow no token but one that ends the text",
        )
        if self.tokenizer is not None:
            prompt, stop, least = sequence.prompt_token_ids, sampling.stop, sampling.min_new_tokens
            with sequence.catch_errors("decoding"):  # of the prompt's last tokens
                sequence.text = (
                    TextStream(self.tokenizer, prompt, stop=stop, min_new_tokens=least)
                    if sequence.open_stream is None
                    else sequence.open_stream(prompt, stop, least)
                )
        self._scheduler.add(sequence)

    def check_request(self, prompt_token_ids: list[int], sampling: SamplingParams) -> None:
        """Raise ValueError if this model cannot run the request. Thread-safe."""
        sampling.check_vocabulary(self.config.vocab_size, self.eos_token_ids)
        for token in prompt_token_ids:
            inside = 0 <= token < self.config.vocab_size
            check(
                inside,
                "a token of prompt",
                token,
                f"must be at least 0 and below {self.config.vocab_size}",
            )
        self._scheduler.check_prompt_length(prompt_token_ids)
        check(
            not sampling.stop or self.tokenizer is not None,
            "stop",
            sampling.stop,
            "needs a tokenizer.json",
        )

    def abort(self, sequence: Sequence) -> None:
        """End a request; a no-op if it has ended already."""
        self._scheduler.finish(sequence, "abort")
        self._drop_unneeded_step_ahead()

    @property
    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished

    def has_capacity_for(self, priority: int) -> bool:
        """Return whether another sequence of this priority may be added without waiting for long:
        see `Scheduler.has_capacity_for`.
        """
        return self._scheduler.has_capacity_for(priority)

    def generate(
        self,
        prompts: Iterable[str | Iterable[int]],
        sampling: SamplingParams | None = None,
        *,
        adapter: str = "",
        **fields: Any,
    ) -> list[Completion]:
        """Return the completions of prompts, once all have ended.

        adapter: as in `add_request`.
        fields: fields of `SamplingParams` that override `sampling`, e.g. max_new_tokens=32.

        Raises FloatingPointError naming the prompt for which the model's logits are not finite,
        RuntimeError naming the prompt whose output cannot be decoded.
        """
        sampling = replace(sampling or SamplingParams(), **fields)
        if self._has_answered and not self._is_measured and not self.has_unfinished:
            self._measure_machine()
        sequences = [self.add_request(prompt, sampling, adapter=adapter) for prompt in prompts]
        outputs: dict[Sequence, list[Output]] = {sequence: [] for sequence in sequences}
        while any(sequence.finish_reason is None for sequence in sequences):
            for output in self.step():
                if output.sequence in outputs:
                    outputs[output.sequence].append(output)
                    if output.finish_reason == "error":
                        for other in sequences:
                            self.abort(other)
                        name = f"prompt {sequences.index(output.sequence)}"
                        if output.sequence.failed is not None:
                            raise RuntimeError(f"{name}: its {output.sequence.failed} failed")
                        raise FloatingPointError(f"{name}: {NO_NUMBERS}")
        return [Completion.from_outputs(*pair) for pair in outputs.items()]

    def step(self) -> list[Output]:
        """Run one step, and return the new tokens and text of every sequence that got a token: an
        output for each token, in order.

        A step runs one token of every decoding request, its draft, and chunks of prompts. Raises
        LockstepError if another process of the engine is lost.
        """
        with contextlib.nullcontext() if self.leader is None else self.leader.limit_step_time():
            return self._step()

    def _step(self) -> list[Output]:
        """Run one step without a time limit; return [] if every sequence is paused."""
        paused = self._pause_unready_sequences()
        plan = self._scheduler.schedule()
        if not plan.chunks:
            if paused:
                sequence, constraint = paused[0]
                with sequence.catch_errors("constraint"):
                    constraint.wait(PAUSE_S)
            return []
        begun = time.perf_counter()
        for chunk in plan.prefill:
            if chunk.copies:
                self._runner.copy_cache_blocks(chunk.copies, len(chunk.copies))
                if self._predictor is not None:
                    self._predictor.copy_cache_blocks(chunk.copies, len(chunk.copies))
            self._sampler.record_prompt_for_penalties(chunk)
        groups = self._scheduler.group_chunks(plan)
        num_tokens = sum(len(chunk.tokens) for chunk in plan.chunks)
        policy = self.plan.choose_policy(num_tokens)
        self._runner.begin_step(whole_layers=policy == "ring", on_host=policy == "hybrid")
        drafts, draws = self._run_groups_and_sample(plan, groups)
        outputs = self._append_sampled_tokens(plan.without_drafts(), draws)
        if drafts is not None:
            outputs += self._verify_drafts(drafts)
        if self._predictor is not None:
            self._predictor.draft_tokens()
        self._drop_unneeded_step_ahead()
        self._has_answered |= any(output.finish_reason is not None for output in outputs)
        self._collector.record_step(
            "prefill" if plan.prefill else "decode", num_tokens, time.perf_counter() - begun
        )
        if self.plan.memory.policy == "auto":
            routing = self._collector.take_decode_routing_stats(self._scheduler.max_decode_tokens)
            if routing is not None:
                before, typical_tokens = self.plan, round(routing.num_tokens)
                self._collector.plan = replace(before, routing=routing)
                if self.plan.choose_policy(typical_tokens) != before.choose_policy(typical_tokens):
                    log.info("%s, by %s", self.plan.describe(typical_tokens), routing)
        return outputs

    def _append_sampled_tokens(self, plan: StepPlan, draws: dict[Sequence, Draw]) -> list[Output]:
        """Append the tokens sampled for a plan without drafts, and return their outputs."""
        sampled = plan.sampled_sequences
        # a sequence whose logits are not finite or whose own code failed ends; the others go on
        for sequence in sampled:
            if draws[sequence].token == NOT_FINITE or not sequence.is_finite:
                log.error(
                    "a request of %d prompt tokens: %s", len(sequence.prompt_token_ids), NO_NUMBERS
                )
                self._scheduler.finish(sequence, "error", reuses_blocks=False)
            elif sequence.failed is not None:
                self._scheduler.finish(sequence, "error")
        self._scheduler.update(plan, [draws[sequence].token for sequence in sampled])
        return [self._make_output(sequence, draws[sequence]) for sequence in sampled]

    def _verify_drafts(self, drafts: DraftVerifier) -> list[Output]:
        """Sample a token after each accepted token of a step's drafts; return their outputs."""
        outputs: list[Output] = []
        position, accepting = 1, list(drafts.chunks)
        while accepting := [
            chunk for chunk in accepting if self._is_draft_token_accepted(chunk, position)
        ]:
            accepted = StepPlan(tuple(chunk.single_token_chunk(position) for chunk in accepting))
            outputs += self._append_sampled_tokens(
                accepted, drafts.sample_after(position, accepting)
            )
            position += 1
        for chunk in drafts.chunks:
            assert chunk.sequence.drafter is not None
            num_accepted = sum(output.sequence is chunk.sequence for output in outputs)
            self._collector.record_draft(chunk.num_drafted, num_accepted)
            chunk.sequence.drafter.record_acceptance(
                chunk.sequence.num_tokens, chunk.num_drafted, num_accepted
            )
        return outputs

    def _is_draft_token_accepted(self, chunk: Chunk, position: int) -> bool:
        """Return whether token `position` of a chunk is the one that was just sampled, and the
        sequence can go on from it now.
        """
        sequence = chunk.sequence
        if (
            position >= len(chunk.tokens)
            or sequence.finish_reason is not None
            or sequence.output_token_ids[-1] != chunk.tokens[position]
        ):
            return False
        return self._is_constraint_ready(sequence) and sequence.failed is None

    @property
    def uses_several_devices(self) -> bool:
        return self._model.on_mesh is not None

    def run_next_preparation_task(self) -> bool:
        """Do one piece of work that makes later requests faster: compile programs that a request
        may need, or, with policy "auto" and once a request has been answered, measure the machine.

        Call it while no sequence is unfinished. Return False if nothing is left to do. Counters
        and the results of requests stay the same. If compiling fails, it is logged, and the steps
        that need the other programs compile them.
        """
        assert not self.has_unfinished, "steps come first"
        preparation = self._preparation
        if preparation.is_done():
            if self._is_measured or not self._has_answered:
                return False
            self._measure_machine()
            return True
        begun = time.perf_counter()
        try:
            with self._exclude_work_from_counters():
                preparation.run_next_task(in_thread=True)
        except Exception:
            if self.leader is not None:  # the other processes may run another program by now
                raise
            log.exception("compiling before requests come has failed: their steps compile")
            preparation.skip_tasks()
            return True
        self._prepared_s += time.perf_counter() - begun
        if preparation.is_done():
            seconds = f"{self._prepared_s:.1f} s, while there were no requests"
            self._say(f"the programs of all requests are compiled: {seconds}")
            self.on_prepared()
        return True

    def compile_all_programs(self) -> None:
        """Compile every program that a request may need, so that no request waits for a
        compilation.
        """
        preparation = self._preparation
        what, amount = "compiling the programs of all requests", lambda: str(preparation)
        with status(what, self._say, timed=True, amount=amount):
            while not preparation.is_done():
                preparation.run_next_task()
        self._reset_counters_and_choices()
        self.on_prepared()

    def stats(self) -> EngineStats:
        """Return counters since the start, or since `reset_stats`."""
        return self._collector.stats()

    @property
    def plan(self) -> StreamingPlan:
        """The plan: where experts are, and how a step gets the experts that the device lacks."""
        return self._collector.plan

    def scheduler_stats(self) -> SchedulerStats:
        """Return the numbers of running and waiting requests, of blocks, and of reused tokens."""
        return self._scheduler.stats()

    def reset_stats(self) -> None:
        """Reset the counters of `stats` to zero."""
        self._collector.reset()

    def tokens_per_expert(self) -> np.ndarray:
        """Return int64 [layers with experts, experts]: tokens that each expert got in the last 16
        steps.

        On one device this copies the routers' choices from the device, which waits for running
        steps.
        """
        return self._runner.tokens_per_expert()

    def last_expert_choices(self) -> list[np.ndarray]:
        """Return the experts that the last step's tokens chose: int32 [tokens, K] for each layer
        with experts.

        Padding has E, the number of experts, in place of an expert.
        """
        return self._runner.last_expert_choices()

    def close(self) -> None:
        """Stop the threads that copy experts; log predicted and measured step times.

        Does nothing if `is_in_use` is set: a thread that could not be stopped still runs steps.
        """
        if self.is_in_use or not self._is_loaded:
            return
        if self.plan.calibration is not None:
            for name, phase in (
                ("prefill", (stats := self.stats()).prefill),
                ("decode", stats.decode),
            ):
                if phase.steps and phase.predicted_step_s is not None:
                    predicted, measured = phase.predicted_step_s * 1e3, phase.step_s * 1e3
                    log.info(
                        "%s: %.1f ms a step, predicted %.1f (%s)",
                        name,
                        measured,
                        predicted,
                        phase.policy,
                    )
        self._ahead = None
        self._preparation.close()
        self._model.close()

    # Inside a step

    def _measure_machine(self) -> None:
        """Measure how fast the machine runs steps and copies experts; policy "auto" then chooses
        by that.

        Overwrites the cached prefixes of ended sequences. If it fails, that is logged, and the plan
        stays.
        """
        self._is_measured = True
        self._scheduler.forget_cached_prefixes()
        what = "measuring how fast this machine runs steps"
        try:
            with status(what, self._say, timed=True), self._exclude_work_from_counters():
                calibration = self._preparation.measure_machine()
        except Exception:
            log.exception("%s has failed: %s", what, self.plan.memory)
            return
        self._collector.plan = replace(self.plan, calibration=calibration)
        self._log_plan()

    @contextlib.contextmanager
    def _exclude_work_from_counters(self) -> Iterator[None]:
        """Return a context manager that leaves what runs inside it out of the counters and out of
        the recorded choices of experts.
        """
        recent = self._runner.recent_choices
        kept = list(recent)
        try:
            with self._collector.excluding_work():
                yield
        finally:
            recent.clear()
            recent.extend(kept)

    def _pause_unready_sequences(self) -> list[tuple[Sequence, Constraint]]:
        """Mark sequences whose constraint is not ready as paused; return [(paused sequence, its
        constraint)].
        """
        paused = []
        for sequence in self._scheduler.decoding_and_preempted_sequences:
            if sequence.constraint is not None:
                sequence.is_paused = not self._is_constraint_ready(sequence)
                paused += [(sequence, sequence.constraint)] * sequence.is_paused
        return paused

    def _is_constraint_ready(self, sequence: Sequence) -> bool:
        """Return whether the sequence's next token can be sampled, if only to fail."""
        is_ready = True
        if sequence.constraint is not None and sequence.failed is None:
            with sequence.catch_errors("constraint"):
                is_ready = sequence.constraint.is_ready()
        return is_ready

    def _drop_unneeded_step_ahead(self) -> None:
        """Drop the speculative step once no request needs it."""
        if not self.has_unfinished:
            self._ahead = None

    def _run_groups_and_sample(
        self, plan: StepPlan, groups: list[ChunkGroup]
    ) -> tuple[DraftVerifier | None, dict[Sequence, Draw]]:
        """Run a plan's groups; return (the verifier of its drafts, {sequence: its first sampled
        token} for each sequence that gets one).

        Begins the next decode step before it waits for the tokens, if neither prompts nor drafts
        run in this one and the next has no drafts.
        """
        ahead, self._ahead = self._ahead, None
        # None if the plan differs from what ran ahead; the step is then computed normally
        single_tokens = bool(plan.decode) and not plan.has_drafts
        begun = ahead.outcome_for(groups[0]) if ahead is not None and single_tokens else None
        if begun is None:
            batches = [self._make_batch(group) for group in groups]
        else:
            groups = [begun.group, *groups[1:]]
            batches = [begun.output, *(self._make_batch(group) for group in groups[1:])]
        drawing: list[tuple[list[Chunk], PendingDraws]] = []
        drafts: DraftVerifier | None = None
        outputs = self._runner.forward(batches)
        if self._predictor is not None:
            self._predictor.record_hidden_states(groups, outputs)
        for group, output in zip(groups, outputs, strict=True):
            if group.chunks[0].num_drafted:
                logits_PCV = self._runner.logits_of_all(output)
                drafts = DraftVerifier(self._sampler, group, logits_PCV, self.max_batch)
            else:
                drawing += self._sample_group(group, output)
        runner = self._model.on_one
        if (
            runner is not None
            and single_tokens
            and not plan.prefill
            and runner.can_run_ahead(groups[0].num_rows)
            and self._scheduler.pause_drafting_after_miss()
        ):
            continuing = {
                c.sequence
                for c in plan.decode
                if self._scheduler.may_continue_after_next_token(c.sequence)
            }
            if (
                continuing
                and all(
                    self._scheduler.has_block_ahead(c)
                    for c in plan.decode
                    if c.sequence in continuing
                )
                and smallest_bucket(len(continuing), self._scheduler.decode_buckets)
                == groups[0].num_rows
            ):
                tokens_B = drawing[0][1].tokens_B
                tokens_B.copy_to_host_async()
                self._ahead = StepAhead.begin(
                    runner, groups[0], tokens_B, continuing, self._params_in_step(groups[0])
                )
        drawn = {} if drafts is None else drafts.sample_after(0, list(drafts.chunks))
        return drafts, drawn | {
            c.sequence: draw
            for last, draws in drawing
            for c, draw in zip(last, draws.wait_and_read(), strict=True)
        }

    def _make_batch(self, group: ChunkGroup) -> Any:
        """Return the runner's batch of a group, with sampling parameters if its program samples."""
        batch = self._runner.make_batch(group)
        params = self._params_in_step(group)
        return batch if params is None else batch._replace(sampling=params)

    def _params_in_step(self, group: ChunkGroup) -> BatchParams | None:
        """Return the parameters with which the program of a group's logits samples; None if it
        finds the most likely tokens, or none.
        """
        runner = self._model.on_one
        if runner is None or not runner.samples_in_step or group.width > 1:
            return None
        if not all(chunk.is_last for chunk in group.chunks):
            return None
        return self._sampler.params_in_step([chunk.sequence for chunk in group.chunks])

    def _sample_group(
        self, group: ChunkGroup, output: Any
    ) -> list[tuple[list[Chunk], PendingDraws]]:
        """Sample a token for every sequence of a group that gets one; collect prompt
        log-probabilities.

        Returns [(chunks that get a token, their draws)], or [] if no chunk gets one.
        """
        for row, chunk in enumerate(group.chunks):
            sequence = chunk.sequence
            wanted = sequence.sampling.prompt_logprobs is not None
            # a preempted sequence that has output has them
            if wanted and sequence.status == "prefill" and not sequence.output_token_ids:
                if chunk.start == 0:
                    sequence.prompt_logprobs.clear()
                logprobs = self._sampler.prompt_logprobs(
                    chunk, self._runner.logits_of_chunk(output, row)
                )
                sequence.prompt_logprobs += logprobs
                sequence.is_finite &= all(math.isfinite(lp.logprob) for lp in logprobs)
        last = [chunk for chunk in group.chunks if chunk.is_last]
        if not last:
            return []
        at_P = np.zeros(group.num_rows, np.int32)
        if group.width > 1:
            at_P[: len(group.chunks)] = [len(chunk.tokens) - 1 for chunk in group.chunks]
        logits_PV = self._runner.logits(output, at_P)
        step_tokens = getattr(output, "step_tokens", None)  # `MeshHidden` has none
        return [(last, self._sampler.start_sampling(logits_PV, last, step_tokens))]

    def _make_output(self, sequence: Sequence, draw: Draw) -> Output:
        """Return the output of a sampled token; an "error" output ends the sequence if its logits
        are not finite or its text cannot be decoded.
        """
        if sequence.finish_reason == "error":
            return Output(sequence, [], "", [], "error")
        text, events, num_reasoning = "", list[OutputEvent](), 0
        with sequence.catch_errors("decoding"):
            text, events, num_reasoning = self._detokenize_token(sequence, draw.token)
        if sequence.failed == "decoding":
            self._scheduler.finish(sequence, "error")
            sequence.finish_reason = "error"
            return Output(sequence, [], "", [], "error")
        if sequence.constraint is not None and sequence.finish_reason is None:
            with sequence.catch_errors("constraint"):
                sequence.constraint.accept(draw.token)
        logprobs = [] if draw.logprob is None else [draw.logprob]
        of_prompt = sequence.prompt_logprobs if len(sequence.output_token_ids) == 1 else []
        return Output(
            sequence,
            [draw.token],
            text,
            logprobs,
            sequence.finish_reason,
            of_prompt,
            events,
            num_reasoning,
        )

    def _detokenize_token(
        self, sequence: Sequence, token: int
    ) -> tuple[str, list[OutputEvent], int]:
        """Return (text, events, number of reasoning tokens) that a token adds; end the sequence
        where its stream ends.
        """
        stream = sequence.text
        if stream is None:
            return "", [], 0
        is_text = sequence.finish_reason != "stop"  # an end-of-text or stop token has no text
        if isinstance(stream, TextStream):
            text = stream.push([token]) if is_text else ""
            self._finish_if_stream_ended(stream.matched_stop is not None, sequence)
            return text + (stream.flush() if sequence.finish_reason is not None else ""), [], 0
        before = stream.num_reasoning_tokens
        events = stream.push([token]) if is_text else []
        self._finish_if_stream_ended(stream.has_ended, sequence)
        if sequence.finish_reason is not None:
            events += stream.flush()
        return join_content(events), events, stream.num_reasoning_tokens - before

    def _finish_if_stream_ended(self, stream_ended: bool, sequence: Sequence) -> None:
        """End the sequence with "stop" if its stream of text has ended, unless it ended for another
        reason.
        """
        if stream_ended and sequence.finish_reason in (None, "length"):
            self._scheduler.finish(sequence, "stop")
            sequence.finish_reason = "stop"

    def _reset_counters_and_choices(self) -> None:
        """Reset all counters and recorded choices of experts: steps so far compiled or calibrated.

        Waits until the device has finished.
        """
        self._runner.recent_choices.clear()
        self._collector.reset()
        jax.block_until_ready(self._runner.caches)

    def _log_plan(self) -> None:
        """Log where experts are and, once measured, how steps of some sizes get them."""
        log.info("%s", self.plan.memory)
        if not self._is_measured:
            log.info("%s", UNMEASURED)
        if self.plan.calibration is not None:
            log.info("%s", self.plan.calibration)
            for num_tokens in (1, self.max_batch, self._scheduler.prefill_widths[-1]):
                log.info("%s", self.plan.describe(num_tokens))
