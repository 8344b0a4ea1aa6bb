"""Train as a cluster of N nodes of one process each would, all of them on this machine.

    python -m recipes.virtual_nodes 2 --config configs/longdoc-125m.yaml --config configs/strategy/zero3.yaml

All other arguments go to recipes.pretrain. Where there is a GPU all nodes share the first one: what several ranks do
through NCCL and DeepSpeed, tried on one GPU. Losses and memory are those of as many GPUs, speed is not: the ranks take
turns, and what they send goes through the host.
"""

import argparse
import os
import sys
import time

from jsonargparse.typing import PositiveInt
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch.accelerators import CUDAAccelerator

from data.token_store import usable_cores
from recipes.console import arguments, bad_input
from recipes.dry_run import Configuration, check_run
from recipes.job import in_job
from recipes.notices import quiet_notices
from recipes.processes import to_the_end

OWN = ("--trainer.devices", "--trainer.num_nodes")


def environment(node: int, nodes: int, port: int) -> dict[str, str]:
    """Variables that tell a process which node it is: Lightning's, and NCCL's.

    NCCL refuses two ranks on one GPU of one host. To it each is a host of its own (NCCL_HOSTID), reached by sockets.
    Where the number of threads is not set, they share the cores.
    """
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, usable_cores() // nodes)))
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(node), "LOCAL_RANK": "0",
            "WORLD_SIZE": str(nodes), "NCCL_HOSTID": f"node-{node}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": threads, "VLA_LM_START": time.strftime("%Y%m%d-%H%M%S")}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.virtual_nodes", description=__doc__, allow_abbrev=False,
        usage="%(prog)s NODES [--config FILE] [--KEY VALUE ...]", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nodes", type=PositiveInt, metavar="NODES", help="How many: the first argument.")
    args, rest = parser.parse_known_args(argv)
    quiet_notices()
    with bad_input():  # once, before there are as many to say it
        if in_job():
            raise ValueError("this process is a task of a SLURM job, whose nodes are real: start recipes.pretrain")
        if given := [word for word in rest if word.split("=")[0] in OWN]:
            raise ValueError(f"{given[0]} is set by recipes.virtual_nodes, one device on each node: leave it out")
        rest += [OWN[0], "1", OWN[1], str(args.nodes)]
        cli = Configuration(arguments(rest), save_config_callback=None)
        gpus = CUDAAccelerator.is_available() and cli.config.trainer.accelerator != "cpu"
        check_run(cli, args.nodes, gpus, store=False)
        cli.datamodule.batch_plan(args.nodes)
    port = find_free_network_port()
    nodes = [environment(node, args.nodes, port) for node in range(args.nodes)]
    sys.exit(to_the_end([sys.executable, "-m", "recipes.pretrain", *rest], environments=nodes))


if __name__ == "__main__":
    main()
