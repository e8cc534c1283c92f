"""Settings of `serve.py`. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from jmoe.config.checks import check, check_field, check_values, not_negative, positive, unset
from jmoe.config.engine import EngineConfig
from jmoe.config.tiers import EstimatedGpu
from jmoe.config.train import DistributedConfig

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[a-z0-9._\[\]:-]+")


@dataclass(frozen=True)
class ServeConfig:
    """An OpenAI-compatible server for one model."""

    model: str  # a Hugging Face folder, the output folder of a run of train.py, or a bundle
    served_model_name: str | None = None  # what clients call the model; None: its folder's name
    host: str = "127.0.0.1"  # the address to listen on; 0.0.0.0: every one of this machine
    port: int = 8000  # the port to listen on; 0: a free one
    # a file with one key a line, any of which a client must send as `Authorization: Bearer KEY`;
    # None: everyone who reaches the port is served
    api_key_file: str | None = None
    # names under which the server may be reached without keys at a loopback address, beside
    # localhost and addresses: a page of another site could otherwise reach it under a name of its
    # own
    allowed_hosts: tuple[str, ...] = ()
    # web pages and apps in a browser that may use the server, as browsers name them:
    # https://chat.example:8080, app://obsidian.md; *: all of them
    allowed_origins: tuple[str, ...] = ()
    max_waiting: int = 64  # sequences that wait for a place; a request for more gets 429
    request_timeout_s: float = 600.0  # a request that takes longer is ended
    drain_timeout_s: float = 30.0  # after SIGTERM or Ctrl-C what runs has so long to finish
    max_body_bytes: int = 4 << 20  # the longest body of a request; a longer one gets 413
    # when there are more, the one that has waited longest for its client is closed
    max_connections: int = 512
    header_timeout_s: float = 10.0  # a client has so long to send the headers of a request
    body_timeout_s: float = 60.0  # a client has so long to send the body of a request
    send_timeout_s: float = 60.0  # a client has so long to take what was written for it
    engine: EngineConfig = field(default_factory=EngineConfig)
    distributed: DistributedConfig = field(
        default_factory=partial(DistributedConfig, step_timeout_s=60)
    )
    # what is compared of a bundle's files before they are used: checksums of their contents, or
    # their sizes alone
    check_files: Literal["contents", "sizes"] = "contents"
    # of requests that do not say them. model: temperature, top_p, top_k, min_p and
    # repetition_penalty of the model's generation_config.json; openai: OpenAI's, the model's
    # distribution as it is
    sampling_defaults: Literal["model", "openai"] = "model"
    log_prompts: bool = False  # write prompts to the log
    # print what will lie where, from the headers of the weights alone, and exit
    dry_run: bool = False
    # compile the engine's programs for such a GPU, which need not be here, print how long steps
    # would take on it, exit
    estimate: EstimatedGpu = ""

    def __post_init__(self) -> None:
        check_values(self)
        alone = not (self.estimate and self.dry_run)
        check_field(alone, self, "estimate", "must not be given together with dry_run")
        one = not self.estimate or self.engine.mesh.devices == 1
        devices = self.engine.mesh.devices
        check_field(
            one,
            self,
            "estimate",
            f"must not be given with mesh.devices = {devices}: of one device alone",
        )
        check_field(0 <= self.port < 65536, self, "port", "must be between 0 and 65535")
        for origin in self.allowed_origins:
            words = (
                "must be * or a scheme and a host, with a port where it has one:"
                " https://chat.example:8080"
            )
            check(_ORIGIN.fullmatch(origin) is not None, "allowed_origins", origin, words)
        if self.api_key_file is not None:
            unset(
                self,
                "",
                ["allowed_hosts"],
                "with api_key_file: whoever has a key is served under any name",
            )
        of_training = ["heartbeat_folder", "stopped_exit_code"]
        unset(self.distributed, "distributed", of_training, "for a server: it is of training")
        not_negative(self, "max_waiting")
        positive(self, "request_timeout_s", "drain_timeout_s", "max_body_bytes", "max_connections")
        positive(self, "header_timeout_s", "body_timeout_s", "send_timeout_s")
