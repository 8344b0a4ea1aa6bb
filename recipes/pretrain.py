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

from torch.distributed.elastic.multiprocessing.errors import record

from callbacks import CheckpointError, NonFiniteError
from callbacks.run_lock import claimed
from recipes.configuration import PretrainCLI
from recipes.console import arguments, bad_input
from recipes.ending import leave, stopped_by
from recipes.notices import quiet_notices
from vla_lm.checkpoint_io import NoNeutralForm
from vla_lm.checkpoints import check_compatible
from vla_lm.optimization import schedule
from vla_lm.strategy import check_trainer


def main(argv: list[str] | None = None) -> None:
    quiet_notices()
    with bad_input():
        cli = PretrainCLI(arguments(sys.argv[1:] if argv is None else argv))
        trainer, model, data = cli.trainer, cli.model, cli.datamodule
        check_trainer(trainer, model.config.backend)
        schedule(model.optimizer_config, trainer.max_steps)
        trainer.val_check_interval *= data.batch_plan(trainer.world_size).accumulation
        model.check_data(data, made=False)  # a token store may take hours
        if trainer.is_global_zero:
            data.prepare_data()
            data.setup("validate")
            model.check_data(data)
        if cli.checkpoint:
            check_compatible(cli.checkpoint, model, trainer.max_steps, data if trainer.is_global_zero else None,
                             cli.config.trust_pickle)
        cli.lock = claimed(cli.run_dir) if trainer.is_global_zero else None  # held while cli lives
    name = shlex.quote(str(cli.run_dir))
    ended = stopped_by(NonFiniteError, CheckpointError, NoNeutralForm, folder=cli.run_dir, source=cli.checkpoint,
                       trainer=trainer)
    with ended, cli.preemption.listening():
        trainer.fit(model, datamodule=data, ckpt_path=cli.checkpoint)
        leave(trainer)
    if trainer.is_global_zero:  # trainer.print would say it once a node
        print(*(f"{metric[4:]:<36}{value:.4f}" for metric, value in sorted(trainer.callback_metrics.items())
                if metric.endswith(("exact_match", "bits_per_byte"))), sep="\n")
        print(f"\nresults in {cli.run_dir}\n  watch     tensorboard --logdir {name}\n"
              f"  evaluate  python -m recipes.evaluate {name}")


if __name__ == "__main__":
    record(main)()  # leaves a traceback in TORCHELASTIC_ERROR_FILE, where a launcher names one
