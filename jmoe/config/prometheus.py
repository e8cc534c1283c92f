"""The HTTP endpoint for a run's metrics. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from jmoe.config.checks import check_field, check_field_types, check_unset


@dataclass(frozen=True)
class MetricsConfig:
    """A run's metrics for Prometheus, served over HTTP by process 0."""

    port: int = 0  # 0: none
    host: str = "0.0.0.0"  # the address to listen on

    def __post_init__(self) -> None:
        check_field_types(self)
        check_field(
            0 <= self.port <= 65535,
            self,
            "metrics.port",
            "must be between 1 and 65535, or 0 for none",
        )
        if not self.port:
            check_unset(self, "metrics", ["host"], "without metrics.port")
        check_field(
            bool(self.host),
            self,
            "metrics.host",
            "must be an address of this machine, e.g. 0.0.0.0",
        )
