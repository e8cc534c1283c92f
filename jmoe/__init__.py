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
    from jmoe.layers.router import Router, Routing
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
]

# Imported on first use: `jmoe.runtime` and `jmoe.config` have to be importable without JAX.
_HOME = {
    "Decoder": "jmoe.models.decoder",
    "Engine": "jmoe.inference.engine",
    "EngineConfig": "jmoe.config.engine",
    "ExpertParallel": "jmoe.layers.moe",
    "Experts": "jmoe.layers.experts",
    "LanguageModel": "jmoe.models.pretrained",
    "MoEConfig": "jmoe.config",
    "MoELayer": "jmoe.layers.moe",
    "MoEMetrics": "jmoe.layers.moe",
    "MoEStats": "jmoe.layers.moe",
    "ModelConfig": "jmoe.config",
    "Router": "jmoe.layers.router",
    "RouterConfig": "jmoe.config",
    "Routing": "jmoe.layers.router",
    "SamplingParams": "jmoe.inference.sampling_params",
    "TrainConfig": "jmoe.config",
    "load_pretrained": "jmoe.models.pretrained",
    "moe_metrics": "jmoe.layers.moe",
    "save_pretrained": "jmoe.models.pretrained",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jmoe' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
