"""What recipes.pretrain would refuse, found without the devices and the ranks that it asks for."""

from types import SimpleNamespace

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.plugins import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy

from callbacks import RunCheckpoint, StateNorms, Throughput
from recipes.configuration import PretrainCLI
from recipes.planning import FULL_NAME, strategy_of
from vla_lm.checkpoints import check_compatible
from vla_lm.config import ModelConfig, OptimizerConfig
from vla_lm.module import LanguageModel
from vla_lm.optimization import schedule
from vla_lm.strategy import check_trainer

UNSET = {"max_steps": -1, "log_every_n_steps": 50, "val_check_interval": 1.0, "accumulate_grad_batches": 1,
         "max_epochs": None, "limit_train_batches": 1.0, "overfit_batches": 0.0, "gradient_clip_val": None,
         "fast_dev_run": False}  # Lightning's own
OF_THE_DEVICES = {"accelerator", "strategy", "devices", "num_nodes", "precision", "plugins", "logger", "callbacks"}


class Configuration(PretrainCLI):
    """The configuration alone, checked key by key; of what it describes only the data module is made."""

    def instantiate_classes(self) -> None:
        for name, kind in (("config", ModelConfig), ("optimizer", OptimizerConfig)):
            if self.config.model[name] is None:
                self.config.model[name] = kind().to_dict()
        data = self.config.data.as_dict()
        self.datamodule = instantiate_class((), {"class_path": data["class_path"], "init_args": data["init_args"]})
        if self.config.resume or self.config.run_dir:
            self.find_place()


def check_run(cli: Configuration, ranks: int, cuda: bool, store: bool) -> None:
    """ValueError, TypeError or Lightning's MisconfigurationException with what is wrong.

    Args:
        cuda: whether the run trains on GPUs.
        store: whether the data's token store, where it needs one, is there.
    """
    config, run_dir, source = cli.config.as_dict(), getattr(cli, "run_dir", None), getattr(cli, "checkpoint", None)
    asked, fields = config["trainer"], config["model"]
    checkpoint = RunCheckpoint(run_dir and run_dir / "checkpoints", **config["checkpoint"])
    StateNorms(**config["state_norms"])
    Throughput(**config["throughput"])
    Trainer(**{name: value for name, value in asked.items() if name not in OF_THE_DEVICES}, callbacks=[checkpoint],
            accelerator="cpu", devices=1, logger=False)
    strategy = strategy_of(asked, ranks)
    if isinstance(strategy, DeepSpeedStrategy):
        DeepSpeedPrecision(asked["precision"] or "32-true")
    given = {name: value if asked[name] is None else asked[name] for name, value in UNSET.items()}
    given["precision"] = FULL_NAME.get(asked["precision"], asked["precision"])
    check_trainer(SimpleNamespace(**given, accelerator=CUDAAccelerator() if cuda else CPUAccelerator(),
                                  strategy=strategy, checkpoint_callback=checkpoint), fields["config"]["backend"])
    optimizer = OptimizerConfig.from_dict(fields["optimizer"])
    schedule(optimizer, given["max_steps"])
    with torch.device("meta"):
        model = LanguageModel(ModelConfig.from_dict(fields["config"]), optimizer)
    model.check_data(cli.datamodule, store)
    if source:
        check_compatible(source, model, given["max_steps"], cli.datamodule if store else None, config["trust_pickle"])


def gpu_gb() -> float | None:
    """Memory of this machine's GPU, in GB."""
    return torch.cuda.get_device_properties(0).total_memory / 1e9 if torch.cuda.is_available() else None
