"""Compare a configuration with the machines it is to run on, before they are waited for.

    python -m recipes.preflight --nodes 2 --gpus-per-node 8 --config configs/longdoc-125m.yaml
    python -m recipes.preflight --nodes 8 --gpus-per-node 8 --gpu-gb 80 --config configs/longdoc-350m.yaml \\
                                --config configs/strategy/zero3.yaml
    python -m recipes.preflight --config FILE           inside a job: what SLURM says

All other arguments are those of recipes.pretrain. Prints what fits and the line that submits it, or every mismatch with
the line that mends it (exit code 2).
"""

import argparse
import shlex
import sys

from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.strategies import StrategyRegistry

from recipes.cluster import Job, problems
from recipes.configuration import PretrainCLI
from recipes.console import arguments, bad_input, quiet_notices
from vla_lm.config import ModelConfig
from vla_lm.memory_plan import MemoryPlan, Sharding, plan_memory, size


class Configuration(PretrainCLI):
    """The configuration alone, checked key by key; of what it describes only the data module is made."""

    def instantiate_classes(self) -> None:
        data = self.config.data.as_dict()
        self.datamodule = instantiate_class((), {"class_path": data["class_path"], "init_args": data["init_args"]})


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m recipes.preflight", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--nodes", type=PositiveInt, help="Machines; inside a job SLURM's.")
    parser.add_argument("--gpus-per-node", type=NonNegativeInt, help="GPUs of each; inside a job SLURM's.")
    parser.add_argument("--tasks-per-node", type=PositiveInt, help="Processes on each; one per GPU when not given.")
    parser.add_argument("--gpu-gb", type=PositiveFloat, help="Memory of a GPU in GB, to compare the plan with.")
    return parser.parse_known_args(argv)


def asked_for(args: argparse.Namespace) -> Job:
    """The job that the arguments describe; what they leave out is that of the job around this process, if any."""
    if args.nodes is args.gpus_per_node is args.tasks_per_node is None:
        return Job.here()
    gpus = args.gpus_per_node or 0
    return Job(args.nodes or 1, args.tasks_per_node or gpus or 1, gpus)


def memory(config: dict, data: object, ranks: int) -> MemoryPlan:
    """What a rank will hold, from the configuration alone."""
    strategy = config["trainer"]["strategy"]
    if isinstance(strategy, dict):
        strategy = instantiate_class((), strategy)
    elif isinstance(strategy, str):
        strategy = StrategyRegistry.get("ddp" if strategy == "auto" else strategy)
    fields, plan, precision = config["model"]["config"], data.batch_plan(ranks), config["trainer"]["precision"]
    model = ModelConfig.from_dict(fields | {"vocab_size": fields["vocab_size"] or data.vocab_size})
    sharding = Sharding.of(strategy, precision if precision in ("bf16-mixed", "bf16-true") else "32-true", ranks)
    return plan_memory(model, sharding, plan.micro_rows, data.row_tokens, plan.accumulation,
                       getattr(data, "carry_state", False))


def main(argv: list[str] | None = None) -> None:
    quiet_notices()
    args, rest = parse(sys.argv[1:] if argv is None else argv)
    with bad_input():
        job = asked_for(args)
        cli = Configuration(arguments(rest), save_config_callback=None)
        config, data = cli.config.as_dict(), cli.datamodule
        trainer = config["trainer"]
        if job != Job.here():
            trainer |= {"devices": job.tasks, "num_nodes": job.nodes}  # as the batch scripts pass them
        machines = f"{job.nodes} nodes x {job.tasks or '?'} tasks, {job.gpus} GPUs a node"
        found = problems(job, trainer, data)
        if found:
            raise ValueError(f"{machines}, do not fit:\n- " + "\n- ".join(found))
        ranks, plan = job.nodes * job.tasks, data.batch_plan(job.nodes * job.tasks)
        held = memory(config, data, ranks)
        if args.gpu_gb and held.device_bytes > 0.95 * args.gpu_gb * 1e9:  # CUDA, NCCL and fragments take their share
            raise ValueError(f"a rank's plan is {size(held.device_bytes)}, a GPU has {args.gpu_gb:g} GB: "
                             f"{held.mend()}\n{held}")
    strategy = trainer["strategy"]
    if isinstance(strategy, dict):
        strategy = f"{strategy['class_path'].rsplit('.', 1)[-1]} {strategy['init_args'].get('stage', '')}".strip()
    gpus = f" --gpus-per-node={job.gpus}" if job.gpus else ""
    print(f"fits: {machines}, trainer.strategy {strategy}\n"
          f"a step: {plan.rows_per_step} rows of {data.row_tokens} tokens, {plan.micro_rows} rows at once on each of "
          f"{ranks} ranks, accumulation {plan.accumulation}\n"
          f"memory of a rank, as planned:\n{held}\n"
          f"submit: sbatch --nodes={job.nodes} --ntasks-per-node={job.tasks}{gpus} "
          f"--cpus-per-task={data.num_workers + 1} slurm/pretrain.sbatch {shlex.join(rest)}")


if __name__ == "__main__":
    main()
