"""Settings of `serve.py`. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Literal

from jmoe.config.checks import (
    check,
    check_field,
    check_field_types,
    check_not_negative,
    check_positive,
    check_unset,
)
from jmoe.config.engine import EngineConfig
from jmoe.config.tiers import EstimatedGpu, MachineConfig
from jmoe.config.train import DistributedConfig

ToolParserName = Literal[
    "auto",
    "none",
    "openai",
    "kimi_k2",
    "deepseek_v3",
    "deepseek_v31",
    "mistral",
    "glm45",
    "qwen3_coder",
    "hermes",
    "llama3_json",
    "llama4_json",
]
ReasoningParserName = Literal[
    "auto",
    "none",
    "openai_gptoss",
    "mistral",
    "deepseek_r1",
    "deepseek_v3",
    "glm45",
    "kimi_k2",
    "qwen3",
]
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[a-z0-9._\[\]:-]+")


@dataclass(frozen=True)
class ServeConfig:
    """An OpenAI-compatible server for one model."""

    model: str  # a Hugging Face folder, a GGUF file, the output folder of a run, or a bundle
    served_model_name: str | None = None  # what clients call the model; None: its folder's name
    host: str = "127.0.0.1"  # the address to listen on; 0.0.0.0: every one of this machine
    port: int = 8000  # the port to listen on; 0: a free one
    # a file with one API key per line; clients must send one as `Authorization: Bearer KEY`; None:
    # every client that can reach the port is served
    api_key_file: str | None = None
    # host names, besides localhost and IP addresses, under which a server at a loopback address
    # without API keys answers; protects from web pages of other sites (DNS rebinding)
    allowed_hosts: tuple[str, ...] = ()
    # origins of web pages and apps that may use the server from a browser (CORS), e.g.
    # https://chat.example:8080 or app://obsidian.md; *: all
    allowed_origins: tuple[str, ...] = ()
    max_waiting: int = 64  # maximum number of waiting sequences; further requests get 429
    # which waiting request runs next. fair: clients take turns; priority: the one with the lowest
    # `priority` of its body, and clients take turns among equals
    scheduling_policy: Literal["fair", "priority"] = "fair"
    request_timeout_s: float = 600.0  # a request that takes longer is aborted
    drain_timeout_s: float = 30.0  # time for running requests to finish after SIGTERM or Ctrl-C
    max_body_bytes: int = 4 << 20  # maximum size of a request body; larger ones get 413
    # maximum number of connections; a new one replaces the connection that has waited longest for
    # its client
    max_connections: int = 512
    header_timeout_s: float = 10.0  # time for a client to send the headers of a request
    body_timeout_s: float = 60.0  # time for a client to send the body of a request
    send_timeout_s: float = 60.0  # time for a client to read a response that is ready
    engine: EngineConfig = field(default_factory=EngineConfig)
    distributed: DistributedConfig = field(
        default_factory=partial(DistributedConfig, step_timeout_s=60)
    )
    # how a bundle's files are verified before use: checksums of their contents, or only their sizes
    check_files: Literal["contents", "sizes"] = "contents"
    # defaults of sampling parameters that a request omits. model: temperature, top_p, top_k, min_p
    # and repetition_penalty from the model's generation_config.json; openai: OpenAI's defaults,
    # which sample from the model's unchanged distribution
    sampling_defaults: Literal["model", "openai"] = "model"
    # formats in which the model writes tool calls and reasoning, by vLLM's names; auto: as its chat
    # template shows
    tool_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    # URL of an OpenTelemetry collector, e.g. http://localhost:4318/v1/traces, that gets a span for
    # each request; None: no spans
    otlp_traces_endpoint: str | None = None
    log_prompts: bool = False  # write prompts to the log
    # print the memory plan and the tokens/s expected, computed from config.json and the headers of
    # the weights if they are there, and exit
    dry_run: bool = False
    # with dry_run, the machine to plan for; its accelerators: mesh.devices
    machine: MachineConfig = field(default_factory=MachineConfig)
    # compile the engine's programs for this GPU, which the machine need not have, print the
    # predicted step times, and exit
    estimate: EstimatedGpu = ""

    def __post_init__(self) -> None:
        check_field_types(self)
        alone = not (self.estimate and self.dry_run)
        check_field(alone, self, "estimate", "must not be given together with dry_run")
        if not self.dry_run:
            check_unset(
                self.machine,
                "machine",
                [item.name for item in fields(self.machine)],
                "without dry_run, which plans for another machine",
            )
        unused = ["nvme_bytes", "nvme_write_bytes_per_s"]
        check_unset(self.machine, "machine", unused, "in a plan for serving, which does not use it")
        if not (self.machine.accelerator or self.machine.device_bytes):
            why = (
                "without machine.accelerator or machine.device_bytes: the plan is for this machine"
            )
            check_unset(self.machine, "machine", ["host_bytes"], why)
        one = not self.estimate or self.engine.mesh.devices == 1
        devices = self.engine.mesh.devices
        check_field(
            one,
            self,
            "estimate",
            f"must not be given with mesh.devices = {devices}: of one device alone",
        )
        check_field(
            not (self.estimate and self.engine.lora),
            self,
            "estimate",
            "must not be given with lora",
        )
        for option in self.engine.lora:
            own = option.partition("=")[0] != self.model_name
            check(own, "lora", option, "must have another name than the model")
        check_field(0 <= self.port < 65536, self, "port", "must be between 0 and 65535")
        for origin in self.allowed_origins:
            words = (
                "must be * or a scheme and a host, with a port where it has one:"
                " https://chat.example:8080"
            )
            check(_ORIGIN.fullmatch(origin) is not None, "allowed_origins", origin, words)
        if self.otlp_traces_endpoint is not None:
            url = self.otlp_traces_endpoint
            known = url.startswith(("http://", "https://"))
            check(known, "otlp_traces_endpoint", url, "must begin with http:// or https://")
        if self.api_key_file is not None:
            check_unset(
                self,
                "",
                ["allowed_hosts"],
                "with api_key_file: whoever has a key is served under any name",
            )
        of_training = ["heartbeat_folder", "stopped_exit_code"]
        check_unset(self.distributed, "distributed", of_training, "for a server: it is of training")
        check_not_negative(self, "max_waiting")
        check_positive(
            self, "request_timeout_s", "drain_timeout_s", "max_body_bytes", "max_connections"
        )
        check_positive(self, "header_timeout_s", "body_timeout_s", "send_timeout_s")

    @property
    def model_name(self) -> str:
        """The name by which requests choose the model."""
        return self.served_model_name or Path(self.model).expanduser().resolve().name
