"""Every setting of jmoe and every check of a user's value. Standard library only."""

from jmoe.config.checks import check as check
from jmoe.config.distil import DistilConfig as DistilConfig
from jmoe.config.metrics import MetricsConfig as MetricsConfig
from jmoe.config.model import TRAINING_ONLY as TRAINING_ONLY
from jmoe.config.model import LayerKind as LayerKind
from jmoe.config.model import ModelConfig as ModelConfig
from jmoe.config.model import MoEConfig as MoEConfig
from jmoe.config.model import RouterConfig as RouterConfig
from jmoe.config.model import YarnConfig as YarnConfig
from jmoe.config.model import check_routing as check_routing
from jmoe.config.parallel import CommConfig as CommConfig
from jmoe.config.parallel import MeshConfig as MeshConfig
from jmoe.config.tiers import MachineConfig as MachineConfig
from jmoe.config.tiers import TiersConfig as TiersConfig
from jmoe.config.train import CheckpointConfig as CheckpointConfig
from jmoe.config.train import DataConfig as DataConfig
from jmoe.config.train import DistributedConfig as DistributedConfig
from jmoe.config.train import EvaluationConfig as EvaluationConfig
from jmoe.config.train import LossScaleConfig as LossScaleConfig
from jmoe.config.train import OptimizerConfig as OptimizerConfig
from jmoe.config.train import ProfileConfig as ProfileConfig
from jmoe.config.train import TrainConfig as TrainConfig
from jmoe.config.train import differences as differences
from jmoe.config.vision import TaskConfig as TaskConfig
from jmoe.config.vision import VisionModelConfig as VisionModelConfig
from jmoe.config.vision import VisionTrainConfig as VisionTrainConfig
