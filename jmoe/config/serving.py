"""Settings of `serve.py`. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jmoe.config.checks import check, positive


@dataclass(frozen=True)
class ServeConfig:
    """An OpenAI-compatible server for one model."""

    model: str  # a Hugging Face folder, or the output folder of a run of train.py
    served_model_name: str | None = None  # what clients call the model; None: its folder's name
    host: str = "127.0.0.1"  # the address to listen on; 0.0.0.0: every one of this machine
    port: int = 8000  # the port to listen on; 0: a free one
    # a file with one key a line, any of which a client must send as `Authorization: Bearer KEY`; None: everyone who
    # reaches the port is served
    api_key_file: str | None = None
    # names under which the server may be reached without keys at a loopback address, beside localhost and addresses:
    # a page of another site could otherwise reach it under a name of its own
    allowed_hosts: tuple[str, ...] = ()
    max_batch: int = 8  # sequences that run at once
    max_seq_len: int | None = None  # tokens of one sequence, prompt and output; None: 2048, or the model's positions
    max_waiting: int = 64  # sequences that wait for a place; a request for more gets 429
    request_timeout_s: float = 600.0  # a request that takes longer is ended
    drain_timeout_s: float = 30.0  # after SIGTERM or Ctrl-C what runs has so long to finish
    max_body_bytes: int = 4 << 20  # the longest body of a request; a longer one gets 413
    max_connections: int = 512  # when there are more, the one that has waited longest for its client is closed
    header_timeout_s: float = 10.0  # a client has so long to send the headers of a request
    body_timeout_s: float = 60.0  # a client has so long to send the body of a request
    send_timeout_s: float = 60.0  # a client has so long to take what was written for it
    # resident: every expert on the device; ring: whole layers in turn; experts: those that the tokens chose, beside the
    # most used ones; auto: resident if that fits, else ring or experts by step, whichever is faster
    policy: Literal["auto", "resident", "ring", "experts"] = "auto"
    ring_slots: int | None = None  # layers on the device at once, of policy ring; None: what fits, else half of them
    device_bytes: int | None = None  # for experts on the device; None: with auto what it has left, else half of them
    expert_tier: Literal["auto", "host", "nvme"] = "auto"  # where experts are that are not on the device
    host_cache_bytes: int | None = None  # host memory for experts of the tier nvme; None: a quarter of their bytes
    cache_dir: str | None = None  # the folder for experts on NVMe; None: beside the model
    dtype: Literal["float32", "bfloat16"] | None = None  # of weights, keys and values, and computation; None: as stored
    # how experts are guessed a layer ahead, to be copied early: by the next layer's router, or by what recent steps
    # used most; None: not at all
    estimator: Literal["router", "counts"] | None = "router"
    prefill_chunk_tokens: int = 512  # the most tokens of one prompt in a step
    max_prefill_tokens: int | None = None  # the most of all prompts in a step, with padding; None: 8 whole chunks
    log_prompts: bool = False  # write prompts to the log
    dry_run: bool = False  # print what will lie where, from the headers of the weights alone, and exit

    def __post_init__(self) -> None:
        check(0 <= self.port < 65536, "port", self.port, "must be between 0 and 65535")
        check(self.max_waiting >= 0, "max_waiting", self.max_waiting, "must not be negative")
        positive(self, "max_batch", "request_timeout_s", "drain_timeout_s", "max_body_bytes", "prefill_chunk_tokens")
        positive(self, "max_connections", "header_timeout_s", "body_timeout_s", "send_timeout_s")
        if self.max_prefill_tokens is not None:
            chunk = min(self.prefill_chunk_tokens, self.max_seq_len or self.prefill_chunk_tokens)
            constraint = f"must be at least {chunk}, a chunk of one prompt"
            check(self.max_prefill_tokens >= chunk, "max_prefill_tokens", self.max_prefill_tokens, constraint)
