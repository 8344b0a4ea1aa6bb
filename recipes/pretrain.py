"""Train a language model.

    python -m recipes.pretrain                                          the main job, configs/mqar.yaml
    python -m recipes.pretrain --config configs/longdoc-tiny.yaml       another run
    python -m recipes.pretrain --config FILE --model.config.d_model 128 --trainer.max_steps 500
    python -m recipes.pretrain --resume runs/NAME                       go on where a run was stopped
    python -m recipes.pretrain --config FILE --print_config             the full configuration

trainer.val_check_interval counts optimizer steps, whatever the accumulation.
"""

import shlex
import sys
from pathlib import Path

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger

from callbacks import (CheckpointError, FiniteGuard, GradientNorms, JsonlLogger, NonFiniteError, RunCheckpoint, StateNorms,
                       Throughput, progress_bar)
from callbacks.run_folder import RunFolder, default_run_dir, resume_point
from callbacks.run_lock import claimed
from recipes.console import arguments, bad_input, quiet_notices, stopped_by
from vla_lm.checkpoints import check_compatible, checkpoint_step
from vla_lm.module import LanguageModel
from vla_lm.optimization import schedule
from vla_lm.strategy import check_trainer


class PretrainCLI(LightningCLI):
    """The configuration's groups: model, data, trainer, and one for each callback with settings of its own."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--run_dir", type=str | None, default=None,
                            help="Folder of the run; runs/<config>-<job id or time> when not given.")
        parser.add_argument("--resume", type=str | None, default=None,
                            help="auto (newest complete checkpoint of run_dir, if any), a run's folder, or a checkpoint.")
        parser.add_lightning_class_args(StateNorms, "state_norms")
        parser.add_lightning_class_args(Throughput, "throughput")
        parser.add_class_arguments(RunCheckpoint, "checkpoint", skip={"dirpath"})

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str]) -> None:
        self.config = parser.parse_args(args)

    def instantiate_trainer(self, **kwargs) -> Trainer:
        config = self.config
        self.checkpoint, run_dir = resume_point(config.resume, Path(config.run_dir) if config.run_dir else None)
        self.run_dir = run_dir or default_run_dir(str(config.config[0]) if config.config else None)
        if config.resume is None and (self.run_dir / "config.yaml").exists():
            raise ValueError(f"{self.run_dir} holds a run already: go on with it (--resume {self.run_dir}), or name another "
                             "folder (--run_dir runs/NAME)")
        step = checkpoint_step(self.checkpoint) if self.checkpoint else None
        self.save_config_kwargs = {"run_dir": self.run_dir, "resumed_step": step}
        checkpoint = RunCheckpoint(self.run_dir / "checkpoints", **config.checkpoint)
        loggers = [TensorBoardLogger(self.run_dir, name="", version="", purge_step=step), JsonlLogger(self.run_dir, step)]
        self.trainer_defaults["callbacks"] = [GradientNorms(), FiniteGuard(), checkpoint, progress_bar()]
        return super().instantiate_trainer(logger=loggers, use_distributed_sampler=False, check_val_every_n_epoch=None,
                                           enable_model_summary=False, **kwargs)


def main(argv: list[str] | None = None) -> None:
    quiet_notices()
    with bad_input():
        cli = PretrainCLI(LanguageModel, LightningDataModule, subclass_mode_data=True, run=False, seed_everything_default=1,
                          save_config_callback=RunFolder, auto_configure_optimizers=False, load_from_checkpoint_support=False,
                          parser_kwargs={"exit_on_error": False, "prog": "python -m recipes.pretrain"},
                          args=arguments(sys.argv[1:] if argv is None else argv))
        trainer, model, data = cli.trainer, cli.model, cli.datamodule
        check_trainer(trainer, model.config.backend)
        schedule(model.optimizer_config, trainer.max_steps)
        if trainer.is_global_zero:
            data.prepare_data()
            data.setup("validate")
            model.check_data(data)
        trainer.val_check_interval *= data.batch_plan(trainer.world_size).accumulation
        if cli.checkpoint:
            check_compatible(cli.checkpoint, model, trainer.max_steps, data if trainer.is_global_zero else None)
        cli.lock = claimed(cli.run_dir) if trainer.is_global_zero else None  # held while cli lives
    name = shlex.quote(str(cli.run_dir))
    with stopped_by(NonFiniteError, CheckpointError, hint=f"go on with python -m recipes.pretrain --resume {name}"):
        trainer.fit(model, datamodule=data, ckpt_path=cli.checkpoint)
    trainer.print(*(f"{metric[4:]:<36}{value:.4f}" for metric, value in sorted(trainer.callback_metrics.items())
                    if metric.endswith(("exact_match", "bits_per_byte"))), sep="\n")
    trainer.print(f"\nresults in {cli.run_dir}\n  watch     tensorboard --logdir {name}\n"
                  f"  evaluate  python -m recipes.evaluate {name}")


if __name__ == "__main__":
    main()
