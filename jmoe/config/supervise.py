"""Settings of `jmoe-supervise`. Standard library only."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from jmoe.config.checks import (
    check,
    check_field,
    check_field_types,
    check_not_negative,
    check_positive,
    check_unset,
)


@dataclass(frozen=True)
class SuperviseConfig:
    """Processes of a run on hosts without a scheduler, all started again when one of them is
    lost.
    """

    processes: int | None = None  # number of processes of the run; None: one per host
    # while hosts are unreachable, the run continues with as few processes; None: only with all
    min_processes: int | None = None
    # each NAME, or NAME=ADDRESS if the other hosts reach it under ADDRESS; empty: this machine
    hosts: tuple[str, ...] = ()
    # prefix of the command line that starts a process on one of `hosts`
    launch: str = "ssh -o BatchMode=yes -o ServerAliveInterval=5 {host}"
    max_restarts: int = 10  # maximum consecutive restarts without a new checkpoint
    # give up after this many consecutive attempts that end at the same step
    same_step_limit: int = 2
    # delay before the second consecutive restart without a new checkpoint; doubles at each further
    # restart
    backoff_s: float = 5.0
    max_backoff_s: float = 300.0  # maximum delay before a restart
    host_timeout_s: float = 60.0  # a host that does not answer within this time is unreachable
    # give up after waiting this long for hosts, with fewer than `min_processes`
    host_wait_s: float = 600.0
    return_check_s: float = 60.0  # interval of checks whether an unreachable host is back

    def __post_init__(self) -> None:
        check_field_types(self)
        check_field(
            self.processes is None or self.processes > 0,
            self,
            "processes",
            "must be greater than 0",
        )
        most = self.num_processes
        if self.min_processes is not None:
            constraint = f"must be between 1 and processes = {most}"
            check_field(1 <= self.min_processes <= most, self, "min_processes", constraint)
        check_positive(self, "same_step_limit", "host_timeout_s", "host_wait_s", "return_check_s")
        check_not_negative(self, "max_restarts", "backoff_s", "max_backoff_s")
        if not self.hosts:
            check_unset(self, "", ["launch"], "without hosts: the processes are on this machine")
        if self.min_processes is None:
            check_unset(
                self,
                "",
                ["return_check_s"],
                "without min_processes: the run goes on with all or none",
            )
        if self.hosts:
            constraint = f"must be a multiple of {len(self.hosts)} hosts"
            check(most % len(self.hosts) == 0, "processes", most, constraint)
            names = [host.partition("=")[0] for host in self.hosts]
            check(
                all(names) and len(set(names)) == len(names),
                "hosts",
                self.hosts,
                "must be different names",
            )
            check_field(
                "{host}" in self.launch,
                self,
                "launch",
                "must have {host} where the host's name goes",
            )

    @property
    def num_processes(self) -> int:
        """The number of processes while all hosts are available: `processes` if it is set,
        otherwise one per host, or one without hosts.
        """
        return self.processes if self.processes is not None else max(1, len(self.hosts))

    @property
    def processes_per_host(self) -> int:
        """The processes on each host, while all hosts are available."""
        return self.num_processes // max(1, len(self.hosts))

    @property
    def fewest_processes(self) -> int:
        """The fewest processes with which a run goes on: `min_processes` if set, otherwise all."""
        return self.min_processes if self.min_processes is not None else self.num_processes

    def launch_command_words(self, host: str) -> list[str]:
        """Return the words that launch a command on `host`, e.g. ssh; an empty list for this
        machine.
        """
        return [word.replace("{host}", host) for word in shlex.split(self.launch)] if host else []
