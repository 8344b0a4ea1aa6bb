"""Compare a configuration with the machines it is to run on, before they are waited for.

    python -m recipes.preflight --nodes 2 --gpus-per-node 8 --config configs/longdoc-125m.yaml
    python -m recipes.preflight --nodes 8 --gpus-per-node 8 --config configs/longdoc-350m.yaml \\
                                --config configs/strategy/zero3.yaml
    python -m recipes.preflight --config FILE           inside a job: what SLURM says

All other arguments are those of recipes.pretrain. Prints what fits and the line that submits it, or every mismatch with
the line that mends it (exit code 2).
"""

import argparse
import shlex
import sys

from lightning.pytorch.cli import instantiate_class

from recipes.cluster import Job, problems
from recipes.configuration import PretrainCLI
from recipes.console import arguments, bad_input, quiet_notices


class Configuration(PretrainCLI):
    """The configuration alone, checked key by key; of what it describes only the data module is made."""

    def instantiate_classes(self) -> None:
        data = self.config.data.as_dict()
        self.datamodule = instantiate_class((), {"class_path": data["class_path"], "init_args": data["init_args"]})


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m recipes.preflight", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--nodes", type=int, help="Machines; inside a job SLURM's.")
    parser.add_argument("--gpus-per-node", type=int, help="GPUs of each; inside a job SLURM's.")
    parser.add_argument("--tasks-per-node", type=int, help="Processes on each; one per GPU when not given.")
    return parser.parse_known_args(argv)


def asked_for(args: argparse.Namespace) -> Job:
    """The job that the arguments describe; what they leave out is that of the job around this process, if any."""
    for name, least in (("nodes", 1), ("gpus_per_node", 0), ("tasks_per_node", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}: it must be at least {least}")
    if args.nodes is args.gpus_per_node is args.tasks_per_node is None:
        return Job.here()
    gpus = args.gpus_per_node or 0
    return Job(args.nodes or 1, args.tasks_per_node or gpus or 1, gpus)


def main(argv: list[str] | None = None) -> None:
    quiet_notices()
    args, rest = parse(sys.argv[1:] if argv is None else argv)
    with bad_input():
        job = asked_for(args)
        cli = Configuration(arguments(rest), save_config_callback=None)
        trainer, data = cli.config.trainer.as_dict(), cli.datamodule
        if job != Job.here():
            trainer |= {"devices": job.tasks, "num_nodes": job.nodes}  # as the batch scripts pass them
        machines = f"{job.nodes} nodes x {job.tasks or '?'} tasks, {job.gpus} GPUs a node"
        found = problems(job, trainer, data)
        if found:
            raise ValueError(f"{machines}, do not fit:\n- " + "\n- ".join(found))
        ranks, plan = job.nodes * job.tasks, data.batch_plan(job.nodes * job.tasks)
    strategy = trainer["strategy"]
    if isinstance(strategy, dict):
        stage = strategy["init_args"].get("stage", "")
        strategy = f"{strategy['class_path'].rsplit('.', 1)[-1]} {stage}".strip()
    gpus = f" --gpus-per-node={job.gpus}" if job.gpus else ""
    print(f"fits: {machines}, trainer.strategy {strategy}\n"
          f"a step: {plan.rows_per_step} rows of {data.row_tokens} tokens, {plan.micro_rows} rows at once on each of "
          f"{ranks} ranks, accumulation {plan.accumulation}\n"
          f"submit: sbatch --nodes={job.nodes} --ntasks-per-node={job.tasks}{gpus} "
          f"--cpus-per-task={data.num_workers + 1} slurm/pretrain.sbatch {shlex.join(rest)}")


if __name__ == "__main__":
    main()
