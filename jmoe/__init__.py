"""jmoe: train Mixture-of-Experts models on many hosts, in JAX.

For a model of your own: `from jmoe import MoELayer, RouterConfig`. For a Hugging Face checkpoint:
`jmoe.load_pretrained(folder)`, `jmoe.save_pretrained(model, folder)` and `jmoe.Engine(folder)`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jmoe.config import ModelConfig, MoEConfig, RouterConfig, TrainConfig
    from jmoe.config.engine import EngineConfig
    from jmoe.inference.engine import Engine
    from jmoe.inference.sampling_params import SamplingParams
    from jmoe.layers.experts import Experts
    from jmoe.layers.moe import ExpertParallel, MoELayer, MoEMetrics, MoEStats, moe_metrics
    from jmoe.layers.router import Router, Routing, updated_bias
    from jmoe.models.decoder import Decoder
    from jmoe.models.pretrained import LanguageModel, load_pretrained, save_pretrained

__version__ = "0.1.0"

__all__ = [
    "Decoder",
    "Engine",
    "EngineConfig",
    "ExpertParallel",
    "Experts",
    "LanguageModel",
    "MoEConfig",
    "MoELayer",
    "MoEMetrics",
    "MoEStats",
    "ModelConfig",
    "Router",
    "RouterConfig",
    "Routing",
    "SamplingParams",
    "TrainConfig",
    "__version__",
    "load_pretrained",
    "moe_metrics",
    "save_pretrained",
    "updated_bias",
]

# Imported on first use: `jmoe.runtime` and `jmoe.config` have to be importable without JAX.
_NAMES = {
    "jmoe.config": ("MoEConfig", "ModelConfig", "RouterConfig", "TrainConfig"),
    "jmoe.config.engine": ("EngineConfig",),
    "jmoe.inference.engine": ("Engine",),
    "jmoe.inference.sampling_params": ("SamplingParams",),
    "jmoe.layers.experts": ("Experts",),
    "jmoe.layers.moe": ("ExpertParallel", "MoELayer", "MoEMetrics", "MoEStats", "moe_metrics"),
    "jmoe.layers.router": ("Router", "Routing", "updated_bias"),
    "jmoe.models.decoder": ("Decoder",),
    "jmoe.models.pretrained": ("LanguageModel", "load_pretrained", "save_pretrained"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jmoe' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
