"""The run file: typed, documented, validated. Acts on nothing."""

from headway.config.checkpoint import CheckpointConfig
from headway.config.data import DataConfig, Source
from headway.config.diff import Change, config_diff, identity
from headway.config.dump import dump_yaml
from headway.config.evaluate import EvalConfig
from headway.config.load import LoadedRun, load_run
from headway.config.log import HardwareConfig, LogConfig
from headway.config.model import LoraConfig, ModelConfig
from headway.config.optim import OptimConfig, ScheduleConfig
from headway.config.parallel import ParallelConfig
from headway.config.run import RunConfig
from headway.config.show import Row, show_records, show_rows, show_text
from headway.config.train import LossConfig, TrainConfig

__all__ = [
    "Change",
    "CheckpointConfig",
    "DataConfig",
    "EvalConfig",
    "HardwareConfig",
    "LoadedRun",
    "LogConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "Row",
    "RunConfig",
    "ScheduleConfig",
    "Source",
    "TrainConfig",
    "config_diff",
    "dump_yaml",
    "identity",
    "load_run",
    "show_records",
    "show_rows",
    "show_text",
]
