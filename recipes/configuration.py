"""The configuration of a training run: its groups of keys, and the trainer made of them."""

from argparse import ArgumentError
from pathlib import Path

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment

from callbacks import (
    FiniteGuard,
    GradientNorms,
    JsonlLogger,
    MissedValidation,
    RunCheckpoint,
    SameKernels,
    StartReport,
    StateNorms,
    Throughput,
    progress_bar,
)
from callbacks.preemption import Preemption
from callbacks.resume_point import of_run, origin_of, resume_point
from callbacks.run_folder import RunFolder, default_run_dir
from recipes.cluster import check_machine, check_task
from recipes.console import refuse_nulls
from recipes.job import in_job
from recipes.near_keys import nearest_key
from vla_lm.checkpoints import checkpoint_step
from vla_lm.module import LanguageModel


class PretrainCLI(LightningCLI):
    """The configuration's groups: model, data, trainer, and one for each callback with settings of its own."""

    def __init__(self, args: list[str], save_config_callback: type[RunFolder] | None = RunFolder) -> None:
        super().__init__(LanguageModel, LightningDataModule, subclass_mode_data=True, run=False, args=args,
                         seed_everything_default=1, save_config_callback=save_config_callback,
                         auto_configure_optimizers=False, load_from_checkpoint_support=False,
                         parser_kwargs={"exit_on_error": False, "prog": "python -m recipes.pretrain"})

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--run_dir", type=str | None, default=None,
                            help="Folder of the run; runs/<config>-<job id or time> when not given.")
        parser.add_argument("--resume", type=str | None, default=None,
                            help="auto (newest complete checkpoint of run_dir, if any), a run's folder, a checkpoint.")
        parser.add_argument("--trust_pickle", "--trust-pickle", action="store_true",
                            help="Resume a DeepSpeed folder of outside a run's folder; its pickles can run any code.")
        parser.add_lightning_class_args(StateNorms, "state_norms")
        parser.add_lightning_class_args(Throughput, "throughput")
        parser.add_class_arguments(RunCheckpoint, "checkpoint", skip={"dirpath"})

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str]) -> None:
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            if hint := nearest_key(str(error), parser):
                error.add_note(hint)
            raise
        refuse_nulls(parser, self.config)

    def find_place(self) -> None:
        """Sets `run_dir`, and `checkpoint` (None: from step 0). ValueError where the folder holds another run."""
        config = self.config
        self.checkpoint, run_dir = resume_point(config.resume, Path(config.run_dir) if config.run_dir else None)
        self.run_dir = run_dir or default_run_dir(str(config.config[0]) if config.config else None)
        if not (self.run_dir / "config.yaml").exists():
            return
        if config.resume == "auto" and not self.checkpoint and (origin := origin_of(self.run_dir)):
            self.checkpoint, _ = resume_point(str(origin), self.run_dir)  # it has saved nothing of its own yet
        if config.resume is None:
            raise ValueError(f"{self.run_dir} holds a run already: go on with it (--resume {self.run_dir}), or name "
                             "another folder (--run_dir runs/NAME)")
        if self.checkpoint and not of_run(self.checkpoint, self.run_dir):
            raise ValueError(f"{self.run_dir} holds another run than the checkpoint {self.checkpoint} is of: go on "
                             f"with that run (--resume {self.run_dir}), or name another folder (--run_dir runs/NAME)")

    def instantiate_trainer(self, **kwargs) -> Trainer:
        config, plugins = self.config, self.config_init.trainer.plugins or []
        check_machine(config.trainer.as_dict())
        if in_job():
            check_task(config.trainer.as_dict(), self.datamodule)
            plugins = [*(plugins if isinstance(plugins, list) else [plugins]), SLURMEnvironment(auto_requeue=False)]
        self.find_place()
        step = checkpoint_step(self.checkpoint) if self.checkpoint else None
        self.save_config_kwargs = {"run_dir": self.run_dir, "resumed_step": step, "resumed_from": self.checkpoint}
        checkpoint = RunCheckpoint(self.run_dir / "checkpoints", **config.checkpoint)
        loggers = [TensorBoardLogger(self.run_dir, name="", version="", purge_step=step, default_hp_metric=False),
                   JsonlLogger(self.run_dir, step)]
        self.preemption = Preemption(checkpoint, under_scheduler=in_job())
        self.trainer_defaults["callbacks"] = [
            StartReport(self.run_dir), SameKernels(), GradientNorms(), FiniteGuard(),
            MissedValidation(checkpoint, loggers[1].path), self.preemption, checkpoint, progress_bar()]
        return super().instantiate_trainer(
            logger=loggers, plugins=plugins, use_distributed_sampler=False, check_val_every_n_epoch=None,
            enable_model_summary=False, **kwargs)
