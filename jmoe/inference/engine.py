"""The inference engine: requests in, tokens out, with continuous batching and experts that need not fit the device.

Legend: B requests that run, P rows of a step, C tokens a row, V vocabulary, E experts of a layer.
"""

import itertools
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from jmoe.config import check
from jmoe.config.engine import EngineConfig
from jmoe.inference import sampler
from jmoe.inference.calibration import measure_speeds
from jmoe.inference.compile_cache import keep_compiled_programs
from jmoe.inference.constraint import Constraint, Unconstrained
from jmoe.inference.detokenizer import Detokenizer, TextStream
from jmoe.inference.expert_tiers import memory_plan, open_experts
from jmoe.inference.kv_cache import empty_caches
from jmoe.inference.popularity import make_estimator
from jmoe.inference.runner import RingDecoder
from jmoe.inference.sampling_params import MAX_LOGPROBS, SamplingParams
from jmoe.inference.scheduler import PrefillChunk, PrefillGroup, Request, Scheduler, SchedulerStats, bucket
from jmoe.inference.sequence import Completion, Output, TokenLogprob, token_logprobs
from jmoe.inference.stats import EngineStats, Meter
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.planning.capacity import MemoryPlan
from jmoe.planning.streaming import Seen, StreamingPlan

log = logging.getLogger("jmoe")
NOT_FINITE = "the model's logits are not finite, so no token can be drawn"

_sample = jax.jit(sampler.sample, static_argnames="with_logprobs", donate_argnames="state")
_greedy = jax.jit(sampler.greedy)
_start_request = jax.jit(sampler.start_request, donate_argnames="state")
_prompt_logprobs = jax.jit(sampler.prompt_logprobs, static_argnames="num_logprobs")


@dataclass
class _Stream:
    """What the engine keeps of a running request."""

    request: Request
    text: TextStream | None
    constraint: Constraint | None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finite: bool = True  # whether all logits of its prompt that were asked for are numbers


class Engine:
    """Serves requests with one model. Not thread-safe.

        engine = Engine(folder, EngineConfig(max_batch=8, max_seq_len=2048, policy="ring", ring_slots=4))
        completions = engine.generate(["def f("], max_new_tokens=32)

    or `add_request`, then `step` while `has_unfinished`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        config: EngineConfig | None = None,
        *,
        bandwidth_limit_bytes_per_s: Mapping[Any, float] | None = None,
    ) -> None:
        """Load the Hugging Face checkpoint in a folder and compile its programs.

        bandwidth_limit_bytes_per_s: of the tiers "nvme" and "host", for measurements.
        Raises `ValueError` naming the field, value and constraint, before weights are read.
        """
        engine_config = config or EngineConfig()
        with LazyCheckpoint(folder, engine_config.dtype) as checkpoint:
            keep_compiled_programs()
            length = checkpoint.sequence_length(engine_config.max_seq_len)
            engine_config = replace(engine_config, max_seq_len=length)
            memory = memory_plan(checkpoint, engine_config)
            self._scheduler = Scheduler(engine_config, checkpoint.eos_token_ids)
            self.residency, self._store = open_experts(
                checkpoint,
                memory,
                cache_dir=engine_config.cache_dir,
                bandwidth_limit_bytes_per_s=bandwidth_limit_bytes_per_s,
            )
            ends, layers = checkpoint.load_rest()
        self.config, self.max_batch, self.max_seq_len = checkpoint.config, engine_config.max_batch, length
        # A program is compiled anew for arguments that are bound to a device: all that change are, from the start.
        device = jax.devices()[0]
        caches = jax.device_put(empty_caches(self.config, self.max_batch, length, checkpoint.dtype), device)
        guesses = make_estimator(engine_config.estimator, self.residency, layers, self.config.num_experts)
        self._decoder = RingDecoder(self.config, ends, layers, self.residency, caches, checkpoint.dtype, guesses)
        self.eos_token_ids = tuple(sorted(self._scheduler.eos_token_ids))
        self.tokenizer = _tokenizer(checkpoint.folder)
        self._detokenizer = Detokenizer(self.tokenizer) if self.tokenizer is not None else None
        self._sampler_state = jax.device_put(sampler.new_state(self.max_batch, self.config.vocab_size), device)
        self._params: tuple[list[Request], sampler.BatchParams] | None = None
        self._streams: dict[str, _Stream] = {}
        self._ids = itertools.count()
        self._warm_up()
        self._meter = Meter(self._decoder, self.residency, self._store, StreamingPlan(memory))
        if engine_config.policy == "auto" and memory.policy != "ring":
            self._measure(memory)
        self._log_plan()
        self._decoder.recent_choices.clear()
        self._meter.reset()
        jax.block_until_ready(self._decoder.caches)

    # Requests

    def add_request(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        constraint: Constraint | None = None,
    ) -> str:
        """Queue a request; returns its id. prompt: text, or token ids. constraint: of its output, used by it alone."""
        sampling = SamplingParams() if sampling is None else sampling
        token_ids = self._encode(prompt)
        check(bool(token_ids), "prompt", prompt, "must hold at least one token")
        self.check_request(token_ids, sampling)
        if request_id is None:
            names = (f"request-{n}" for n in self._ids)
            request_id = next(name for name in names if name not in self._streams)
        request = Request(request_id, token_ids, sampling)
        self._scheduler.add(request)
        text = None
        if self._detokenizer is not None:
            text = self._detokenizer.stream(token_ids, stop=sampling.stop, min_new_tokens=sampling.min_new_tokens)
        self._streams[request.id] = _Stream(request, text, constraint)
        return request.id

    def check_request(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        """`ValueError` if `add_request` would refuse it. May be called from any thread."""
        sampling.check_vocabulary(self.config.vocab_size)
        for token in prompt_token_ids:
            inside = 0 <= token < self.config.vocab_size
            check(inside, "a token of prompt", token, f"must be at least 0 and below {self.config.vocab_size}")
        self._scheduler.check_prompt(prompt_token_ids)
        check(not sampling.stop or self._detokenizer is not None, "stop", sampling.stop, "needs a tokenizer.json")

    def abort(self, request_id: str) -> None:
        """End a request; nothing happens if it has ended."""
        self._scheduler.abort(request_id)
        self._streams.pop(request_id, None)

    @property
    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished

    def generate(
        self, prompts: Iterable[str | Sequence[int]], sampling: SamplingParams | None = None, **fields: Any
    ) -> list[Completion]:
        """Run prompts to their end. fields: of `SamplingParams`, e.g. max_new_tokens=32, temperature=0.8.

        Raises `FloatingPointError` naming the prompt where the model's logits are not finite.
        """
        sampling = replace(sampling or SamplingParams(), **fields)
        streams = [self._streams[self.add_request(prompt, sampling)] for prompt in prompts]
        texts = {s.request.id: "" for s in streams}
        logprobs: dict[str, list[TokenLogprob]] = {s.request.id: [] for s in streams}
        while any(s.request.finish_reason is None for s in streams):
            for output in self.step():
                if output.request_id in texts:
                    texts[output.request_id] += output.text
                    logprobs[output.request_id] += output.logprobs
                if output.finish_reason == "error" and output.request_id in texts:
                    for other in streams:
                        self.abort(other.request.id)
                    raise FloatingPointError(f"prompt {list(texts).index(output.request_id)}: {NOT_FINITE}")
        return [
            Completion(
                s.request.prompt_token_ids,
                s.request.output_token_ids,
                texts[s.request.id],
                s.request.finish_reason or "abort",
                logprobs[s.request.id],
                s.prompt_logprobs,
            )
            for s in streams
        ]

    def step(self) -> list[Output]:
        """Run one step: a token for every running request, and chunks of prompts."""
        plan = self._scheduler.schedule()
        if plan.is_empty:
            return []
        begun = time.perf_counter()
        for chunk in plan.prefill:
            self._start(chunk)
        prefill = self._scheduler.prefill_groups(plan)
        inputs = []
        if plan.decode:
            size = bucket(len(plan.decode), self._scheduler.decode_buckets)
            rows = [(row.slot, row.position, [row.token]) for row in plan.decode]
            inputs.append(self._decoder.tokens(rows, size, 1))
        for group in prefill:
            rows = [(chunk.slot, chunk.start, chunk.tokens) for chunk in group.chunks]
            inputs.append(self._decoder.tokens(rows, len(rows), group.width))
        num_tokens = len(plan.decode) + sum(len(chunk.tokens) for chunk in plan.prefill)
        self.residency.begin_step(whole_layers=self.plan.policy(num_tokens) == "ring")
        hidden = self._decoder.forward(inputs)
        drawn: dict[str, tuple[int, TokenLogprob | None]] = {}
        if plan.decode:
            requests = [row.request for row in plan.decode]
            x_BCD = hidden.pop(0)
            logits_BV = self._decoder.logits(x_BCD, np.zeros(x_BCD.shape[0], np.int32))
            drawn |= self._draw(
                logits_BV, requests, [r.slot for r in plan.decode], [r.position + 1 for r in plan.decode]
            )
        for group, x_PCD in zip(prefill, hidden, strict=True):
            drawn |= self._end_prefill(group, x_PCD)
        sampled = plan.sampled_requests
        for request in sampled:
            self._check_finite(request, drawn[request.id][0])
        self._scheduler.update(plan, [drawn[request.id][0] for request in sampled])
        outputs = [self._output(request, *drawn[request.id]) for request in sampled]
        self._meter.note_step("prefill" if plan.prefill else "decode", num_tokens, time.perf_counter() - begun)
        if self.plan.memory.policy == "auto" and (seen := self._meter.seen(self._scheduler.max_batch)) is not None:
            self._plan_anew(seen)
        return [output for output in outputs if output is not None]

    def compile_for_service(self) -> None:
        """Compile also what constraints, many token ids and prompt log-probabilities need.

        Else the first request with one of them would hold up the others.
        """
        x_11D = self._decoder.zeros(1, 1)
        logits_1V = self._decoder.logits(x_11D, np.zeros(1, np.int32))
        for logprobs in (None, 0):
            request = Request("warm-up", [0], SamplingParams(logprobs=logprobs))
            self._streams[request.id] = _Stream(request, None, Unconstrained())
            self._draw(logits_1V, [request], [self.max_batch], [0])
        del self._streams[request.id]
        self._params = None
        for rows, width in self._scheduler.prefill_shapes:
            logits_CV = self._decoder.all_logits(self._decoder.zeros(rows, width), 0)
            _prompt_logprobs(logits_CV, np.zeros(width, np.int32), num_logprobs=MAX_LOGPROBS)

    def stats(self) -> EngineStats:
        """Counters since the start, or since `reset_stats`."""
        return self._meter.stats()

    @property
    def plan(self) -> StreamingPlan:
        """Where the experts are, how steps get them, and why."""
        return self._meter.plan

    def scheduler_stats(self) -> SchedulerStats:
        """Requests that run and wait, and the tokens they hold and did not have to compute."""
        return self._scheduler.stats()

    def reset_stats(self) -> None:
        """Let `stats` count from here on."""
        self._meter.reset()

    def expert_use(self) -> np.ndarray:
        """int64 [layers with experts, experts]: tokens that each got in the last steps; reads the device now."""
        return self._decoder.expert_use()

    def close(self) -> None:
        """Stop the threads that copy experts; log what was predicted beside what was measured."""
        if self.plan.speeds is not None:
            for name, phase in (("prefill", (stats := self.stats()).prefill), ("decode", stats.decode)):
                if phase.steps and phase.predicted_step_s is not None:
                    predicted, measured = phase.predicted_step_s * 1e3, phase.step_s * 1e3
                    log.info("%s: %.1f ms a step, predicted %.1f (%s)", name, measured, predicted, phase.policy)
        self.residency.close()
        if self._store is not None:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Parts of a step

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt: is text, but the checkpoint has no tokenizer.json; give token ids")
            ids: list[int] = self.tokenizer.encode(prompt).ids
            return ids
        return [int(token) for token in prompt]

    def _start(self, chunk: PrefillChunk) -> None:
        """What comes before a chunk: its prefix is copied; the sampler is told of a prompt, if it will need to know."""
        if chunk.copy_from is not None:
            self._decoder.copy_row(chunk.copy_from[0], chunk.slot)
        s = chunk.request.sampling
        is_first = chunk.start == chunk.request.num_reused_tokens
        if is_first and (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) != (1, 0, 0):
            mask_V = sampler.prompt_mask(chunk.request.prompt_token_ids, self.config.vocab_size)
            self._sampler_state = _start_request(self._sampler_state, np.int32(chunk.slot), mask_V)

    def _end_prefill(self, group: PrefillGroup, x_PCD: jax.Array) -> dict[str, tuple[int, TokenLogprob | None]]:
        """Prompt log-probabilities of a group, and a token by id for each prompt that is complete."""
        for row, chunk in enumerate(group.chunks):
            if chunk.request.sampling.prompt_logprobs is not None:
                self._note_prompt_logprobs(chunk, x_PCD, row)
        last = [chunk for chunk in group.chunks if chunk.is_last]
        if not last:
            return {}
        at_P = np.array([len(chunk.tokens) - 1 for chunk in group.chunks], np.int32)
        logits_PV = self._decoder.logits(x_PCD, at_P)
        positions = [chunk.start + len(chunk.tokens) for chunk in last]
        return self._draw(logits_PV, [chunk.request for chunk in last], [chunk.slot for chunk in last], positions)

    def _draw(
        self, logits_BV: jax.Array, requests: list[Request], slots: list[int], positions: list[int]
    ) -> dict[str, tuple[int, TokenLogprob | None]]:
        """A token for each request by its id, from the first rows of the logits."""
        ids = [request.id for request in requests]
        streams = [self._streams.get(id_) for id_ in ids]  # None: warm-up
        constraints = [None if stream is None else stream.constraint for stream in streams]
        constrained = any(constraint is not None for constraint in constraints)
        if not constrained and all(request.sampling.plain_greedy for request in requests):
            tokens = np.asarray(_greedy(logits_BV)).tolist()
            return {id_: (token, None) for id_, token in zip(ids, tokens)}
        size = self._scheduler.max_batch  # one shape, and so one program, for every number of requests
        logits_BV = jnp.pad(logits_BV, ((0, size - logits_BV.shape[0]), (0, 0)))
        if self._params is None or self._params[0] != requests:  # the same objects, not the same names
            params = sampler.batch_params(
                [r.sampling for r in requests],
                [r.noise_seed for r in requests],
                [len(r.prompt_token_ids) for r in requests],
                size=size,
                vocab_size=self.config.vocab_size,
                eos_token_ids=self.eos_token_ids,
                wide=constrained,
            )
            self._params = (requests, params)
        padding = size - len(requests)
        slots_B = np.array(slots + [self._scheduler.max_batch] * padding, np.int32)
        positions_B = np.array(positions + [0] * padding, np.int32)
        wanted = any(r.sampling.logprobs is not None for r in requests)
        # Many token ids and constraints share a program: two to compile instead of six.
        wide = self._params[1].bias_ids_BN.shape[1] == sampler.ID_BUCKETS[-1]
        allowed_BW = _allowed(constraints, size, self.config.vocab_size) if wide else None
        tokens_B, logprobs, self._sampler_state = _sample(
            logits_BV, self._params[1], self._sampler_state, slots_B, positions_B, allowed_BW, with_logprobs=wanted
        )
        tokens = np.asarray(tokens_B).tolist()[: len(requests)]
        found = token_logprobs(tokens, logprobs, [r.sampling.logprobs for r in requests])
        return dict(zip(ids, zip(tokens, found, strict=True), strict=True))

    def _note_prompt_logprobs(self, chunk: PrefillChunk, x_PCD: jax.Array, row: int) -> None:
        request, start = chunk.request, chunk.start
        following = request.prompt_token_ids[start + 1 : start + 1 + len(chunk.tokens)]
        next_C = np.array(following + [0] * (x_PCD.shape[1] - len(following)), np.int32)
        logprobs = _prompt_logprobs(self._decoder.all_logits(x_PCD, row), next_C, num_logprobs=MAX_LOGPROBS)
        found = token_logprobs(following, logprobs, [request.sampling.prompt_logprobs] * len(following))
        stream = self._streams[request.id]
        stream.prompt_logprobs += [lp for lp in found if lp is not None]
        stream.finite &= all(math.isfinite(lp.logprob) for lp in found if lp is not None)

    def _check_finite(self, request: Request, token: int) -> None:
        """End a request whose logits have an infinity or a NaN; the others of the step are not concerned."""
        stream = self._streams.get(request.id)
        if token == sampler.NOT_FINITE or (stream is not None and not stream.finite):
            log.error("request %s: %s", request.id, NOT_FINITE)
            self._scheduler.finish(request.id, "error")

    def _output(self, request: Request, token: int, logprob: TokenLogprob | None) -> Output | None:
        stream = self._streams.get(request.id)
        if stream is None:  # aborted while the step ran
            return None
        if request.finish_reason == "error":
            del self._streams[request.id]
            return Output(request.id, [], "", [], "error")
        text = ""
        if stream.text is not None:
            stops = request.finish_reason == "stop"  # the token that ended it gives no text
            text = "" if stops else stream.text.push([token])
            if stream.text.matched_stop is not None and request.finish_reason in (None, "length"):
                self._scheduler.finish(request.id, "stop")
                request.finish_reason = "stop"
            if request.finish_reason is not None:
                text += stream.text.flush()
        if stream.constraint is not None and request.finish_reason is None:
            stream.constraint.accept(token)
        if request.finish_reason is not None:
            del self._streams[request.id]
        logprobs = [] if logprob is None else [logprob]
        of_prompt = stream.prompt_logprobs if len(request.output_token_ids) == 1 else []
        return Output(request.id, [token], text, logprobs, request.finish_reason, of_prompt)

    def _warm_up(self) -> None:
        """Compile, before the first request, every program but those of `compile_for_service`."""
        decode_shapes = [(size, 1) for size in self._scheduler.decode_buckets]
        for rows, width in dict.fromkeys([*decode_shapes, *self._scheduler.prefill_shapes]):
            (x_PCD,) = self._decoder.forward([self._decoder.tokens([], rows, width)])
            logits_PV = self._decoder.logits(x_PCD, np.zeros(rows, np.int32))
            if width == 1:  # what follows knows of logits alone
                _greedy(logits_PV).block_until_ready()
                for logprobs in (None, 0):
                    request = Request("warm-up", [0], SamplingParams(temperature=1.0, logprobs=logprobs))
                    self._draw(logits_PV, [request], [self._scheduler.max_batch], [0])
        self._params = None
        self._decoder.copy_row(0, 0)
        no_prompt_V = np.zeros(self.config.vocab_size, np.bool_)
        self._sampler_state = _start_request(self._sampler_state, np.int32(0), no_prompt_V)

    def _measure(self, memory: MemoryPlan) -> None:
        """Measure, and choose by it. All programs must be compiled."""
        scheduler, prefill_tokens = self._scheduler, self._scheduler.prefill_widths[-1]
        size = scheduler.max_batch
        speeds = measure_speeds(
            self._decoder,
            self._store,
            lambda x: np.asarray(_greedy(self._decoder.logits(x, np.zeros(size, np.int32)))),
            max_batch=size,
            prefill_tokens=prefill_tokens,
            position=scheduler.max_seq_len // 2,
        )
        self._meter.plan = StreamingPlan(memory, speeds)

    def _plan_anew(self, seen: Seen) -> None:
        """With what steps told of routing."""
        before, num_tokens = self.plan, round(seen.num_tokens)
        self._meter.plan = replace(before, seen=seen)
        if self.plan.policy(num_tokens) != before.policy(num_tokens):
            log.info("%s, by %s", self.plan.describe(num_tokens), seen)

    def _log_plan(self) -> None:
        log.info("%s", self.plan.memory)
        if self.plan.speeds is not None:
            log.info("copies of experts: %.3g bytes/s; %s", self.plan.bandwidth_bytes_per_s, self.plan.speeds)
            for num_tokens in (1, self._scheduler.max_batch, self._scheduler.prefill_widths[-1]):
                log.info("%s", self.plan.describe(num_tokens))


def _allowed(constraints: Sequence[Constraint | None], size: int, vocab_size: int) -> np.ndarray:
    """`allowed_BW` of the sampler, with rows of padding."""
    words_BW = np.full((size, -(-vocab_size // 32)), -1, np.int32)
    for row, constraint in enumerate(constraints):
        if constraint is not None:
            constraint.fill(words_BW[row])
    return words_BW


def _tokenizer(folder: Path) -> Tokenizer | None:
    file = folder / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None
