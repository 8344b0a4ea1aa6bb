"""Compare a configuration with the machines it is to run on, before they are waited for.

    python -m recipes.preflight --nodes 2 --gpus-per-node 8 --config configs/longdoc-125m.yaml
    python -m recipes.preflight --nodes 8 --gpus-per-node 8 --gpu-gb 80 --config configs/longdoc-350m.yaml \\
                                --config configs/strategy/zero3.yaml
    python -m recipes.preflight --config FILE           inside a job: what SLURM says

All other arguments are those of recipes.pretrain, and mean what they mean in slurm/pretrain.sbatch. Prints what fits, a
rank's memory and the line that submits it, or every mismatch with the line that mends it (exit code 2).
"""

import argparse
import os
import shlex
import sys

from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from recipes.cluster import on_gpus, problems
from recipes.console import arguments, bad_input
from recipes.dry_run import Configuration, check_run, gpu_gb
from recipes.job import Job
from recipes.notices import quiet_notices
from recipes.planning import count, memory, store_problem, strategy_of
from vla_lm.memory_plan import size


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m recipes.preflight", description=__doc__.splitlines()[0],
                                     allow_abbrev=False, epilog="All other arguments go to recipes.pretrain "
                                     "(its --help lists them): --config FILE, --trainer.strategy zero3, ...")
    parser.add_argument("--nodes", type=PositiveInt, help="Machines; inside a job SLURM's.")
    parser.add_argument("--gpus-per-node", type=NonNegativeInt, help="GPUs of each; inside a job SLURM's.")
    parser.add_argument("--tasks-per-node", type=PositiveInt, help="Processes on each; one per GPU when not given.")
    parser.add_argument("--gpu-gb", type=PositiveFloat, help="Memory of a GPU in GB, to compare the plan with.")
    return parser.parse_known_args(argv)


def asked_for(args: argparse.Namespace) -> Job | None:
    """The job that the arguments describe; None where they leave it to the job around this process."""
    if args.nodes is args.gpus_per_node is args.tasks_per_node is None and "SLURM_JOB_ID" in os.environ:
        return None
    gpus = args.gpus_per_node or 0
    return Job(args.nodes or 1, args.tasks_per_node or gpus or 1, gpus)


def main(argv: list[str] | None = None) -> None:
    quiet_notices()
    args, rest = parse(sys.argv[1:] if argv is None else argv)
    with bad_input():
        described = asked_for(args)
        job, given = described or Job.here(), rest
        if described:  # what slurm/job.sh puts before them
            given = ["--trainer.devices", str(job.tasks), "--trainer.num_nodes", str(job.nodes), *rest]
        cli = Configuration(arguments(given), save_config_callback=None)
        config, data = cli.config.as_dict(), cli.datamodule
        trainer, ranks = config["trainer"], job.nodes * (job.tasks or 1)
        gpus = on_gpus(job, trainer)
        found, store = problems(job, trainer, data), [*filter(None, [store_problem(data, ranks)])]
        check_run(cli, ranks, gpus, not store)
        unknown = store and not (config["data"]["init_args"]["vocab_size"] or config["model"]["config"]["vocab_size"])
        if found or unknown:
            raise ValueError(f"{job}, do not fit:\n- " + "\n- ".join([*found, *store]))
        plan, room = data.batch_plan(ranks), args.gpu_gb or (None if described else gpu_gb())
        try:
            held = memory(config, data, ranks, "cuda" if gpus else "cpu")
        except ValueError as error:
            held = f"no estimate: {error}"
        strategy = trainer["strategy"] if isinstance(trainer["strategy"], str) else strategy_of(trainer, ranks)
        strategy = getattr(strategy, "zero_name", strategy if isinstance(strategy, str) else type(strategy).__name__)
        compared = gpus and room and not isinstance(held, str)
        against = f" for a GPU of {room:.4g} GB" if compared else " (--gpu-gb compares it)" * gpus
        if compared and held.device_bytes > 0.95 * room * 1e9:  # CUDA, NCCL, fragments: their share
            found.append(f"a rank's plan is {size(held.device_bytes)}, a GPU has {room:.4g} GB: {held.mend()}")
        print(f"{'does not fit' if found else 'fits, but for the token store' if store else 'fits'}: {job}, "
              f"trainer.strategy {strategy}\n"
              f"a step: {count(plan.rows_per_step, 'row')} of {count(data.row_tokens, 'token')}, "
              f"{count(plan.micro_rows, 'row')} at once on {'each of ' * (ranks > 1)}{count(ranks, 'rank')}, "
              f"accumulation {plan.accumulation}\nmemory of a rank, as planned{against}:\n{held}",
              flush=True)
        if found or store:
            raise ValueError("\n- ".join([*found, *store]))
    if described:
        print(f"submit: sbatch --nodes={job.nodes} --ntasks-per-node={job.tasks} --gpus-per-node={job.gpus} "
              f"--cpus-per-task={data.num_workers + 1} slurm/pretrain.sbatch {shlex.join(rest)}")


if __name__ == "__main__":
    main()
