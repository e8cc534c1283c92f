"""Settings of `serve.py`. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jmoe.config.checks import check, positive


@dataclass(frozen=True)
class ServeConfig:
    """An OpenAI-compatible server for one model.

    model: a Hugging Face folder, or the output folder of a run of train.py. served_model_name: what clients call it;
    by default the folder's name.
    host, port: where it listens; port 0 takes a free one. api_key_file: one key a line, any of which a client must
    send as `Authorization: Bearer KEY`; without it everyone who reaches the port is served.
    max_batch: sequences that run at once. max_seq_len: tokens of one, prompt and output; by default 2048, or fewer if
    the model has fewer positions. max_waiting: sequences that wait for a place; beyond them requests get 429.
    request_timeout_s: a request that takes longer is ended. max_body_bytes: of a request.
    drain_timeout_s: after SIGTERM what runs has so long to finish.
    policy ... max_prefill_tokens: see `Engine.from_pretrained`.
    log_prompts: write prompts to the log. dry_run: print the plan and exit.
    """

    model: str
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: str | None = None
    max_batch: int = 8
    max_seq_len: int | None = None
    max_waiting: int = 64
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    max_body_bytes: int = 4 << 20
    policy: Literal["auto", "resident", "ring", "experts"] = "auto"
    ring_slots: int | None = None
    device_bytes: int | None = None
    expert_tier: Literal["auto", "host", "nvme"] = "auto"
    host_cache_bytes: int | None = None
    cache_dir: str | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    estimator: Literal["router", "counts"] | None = "router"
    prefill_chunk_tokens: int = 512
    max_prefill_tokens: int | None = None
    log_prompts: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        check(0 <= self.port < 65536, "port", self.port, "must be between 0 and 65535")
        check(self.max_waiting >= 0, "max_waiting", self.max_waiting, "must not be negative")
        positive(self, "max_batch", "request_timeout_s", "drain_timeout_s", "max_body_bytes", "prefill_chunk_tokens")
        if self.max_prefill_tokens is not None:
            chunk = min(self.prefill_chunk_tokens, self.max_seq_len or self.prefill_chunk_tokens)
            constraint = f"must be at least {chunk}, a chunk of one prompt"
            check(self.max_prefill_tokens >= chunk, "max_prefill_tokens", self.max_prefill_tokens, constraint)
