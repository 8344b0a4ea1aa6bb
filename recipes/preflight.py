"""Compare a configuration with the machines it is to run on, before they are waited for.

    python -m recipes.preflight --nodes 2 --gpus-per-node 8 --config configs/longdoc-125m.yaml
    python -m recipes.preflight --nodes 8 --gpus-per-node 8 --config configs/longdoc-350m.yaml --config configs/strategy/zero3.yaml
    python -m recipes.preflight --config FILE           inside a job: what SLURM says

All other arguments are those of recipes.pretrain. Prints what fits, or every mismatch with the line that mends it (exit code 2).
"""

import argparse
import shlex
import sys

from lightning.pytorch.cli import instantiate_class

from recipes.cluster import Job, problems
from recipes.configuration import PretrainCLI
from recipes.console import arguments, bad_input, quiet_notices


class Configuration(PretrainCLI):
    """The configuration alone, checked key by key; nothing is built."""

    def instantiate_classes(self) -> None:
        data = self.config.data.as_dict()
        self.datamodule = instantiate_class((), {"class_path": data["class_path"], "init_args": data["init_args"]})


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m recipes.preflight", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--nodes", type=int, help="Machines; inside a job SLURM's.")
    parser.add_argument("--gpus-per-node", type=int, help="GPUs of each; inside a job SLURM's.")
    parser.add_argument("--tasks-per-node", type=int, help="Processes on each; the number of GPUs when not given.")
    return parser.parse_known_args(argv)


def main(argv: list[str] | None = None) -> None:
    quiet_notices()
    args, rest = parse(sys.argv[1:] if argv is None else argv)
    with bad_input():
        for name, value in vars(args).items():
            if value is not None and value < (name != "gpus_per_node"):
                raise ValueError(f"--{name.replace('_', '-')} is {value}: it must be at least {int(name != 'gpus_per_node')}")
        here = Job.here()
        nodes = args.nodes or here.nodes
        gpus = here.gpus if args.gpus_per_node is None else args.gpus_per_node
        given = args.nodes is not None or args.gpus_per_node is not None
        job = Job(nodes, args.tasks_per_node or (gpus or 1 if given else here.tasks), gpus, None if given else here.cpus)
        config = Configuration(arguments(rest), save_config_callback=None)
        trainer, data = config.config.trainer.as_dict(), config.datamodule
        if given:  # what the batch scripts pass themselves
            trainer |= {"devices": job.tasks, "num_nodes": job.nodes}
        found = problems(job, trainer, data)
        if found:
            raise ValueError(f"{job.nodes} nodes x {job.tasks or '?'} tasks, {job.gpus} GPUs a node, do not fit:\n- "
                             + "\n- ".join(found))
        plan = data.batch_plan(job.nodes * job.tasks)
    lines = [f"fits: {job.nodes} nodes x {job.tasks} tasks, {job.gpus} GPUs a node, trainer.strategy {trainer['strategy']}",
             f"a step: {plan.rows_per_step} rows of {data.row_tokens} tokens, {plan.micro_rows} rows at once on each of "
             f"{job.nodes * job.tasks} ranks, accumulation {plan.accumulation}"]
    resources = f"--nodes={job.nodes} --ntasks-per-node={job.tasks}" + (f" --gpus-per-node={job.gpus}" if job.gpus else "")
    lines.append(f"submit: sbatch {resources} --cpus-per-task={data.num_workers + 1} slurm/pretrain.sbatch {shlex.join(rest)}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
