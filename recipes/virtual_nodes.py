"""Train as a cluster of N nodes of one process each would, all of them on this machine.

    python -m recipes.virtual_nodes 2 --config configs/longdoc-125m.yaml --config configs/strategy/zero3.yaml

All other arguments go to recipes.pretrain. Where there is a GPU all nodes share the first one: what several ranks do
through NCCL and DeepSpeed, tried on one GPU. Losses and memory are those of as many GPUs, speed is not: the ranks take
turns, and what they send goes through the host.
"""

import argparse
import logging
import os
import signal
import sys

from jsonargparse.typing import PositiveInt
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes

from recipes.console import bad_input, quiet_notices
from recipes.job import in_job

GRACE = 60  # seconds in which ranks that are told to end may save


def environment(node: int, nodes: int, port: int) -> dict[str, str]:
    """Variables that tell a process which node it is: Lightning's, and NCCL's.

    NCCL refuses two ranks on one GPU of one host. To it each is a host of its own (NCCL_HOSTID), reached by sockets.
    """
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(node), "LOCAL_RANK": "0",
            "WORLD_SIZE": str(nodes), "NCCL_HOSTID": f"node-{node}", "NCCL_NET": "Socket",
            "NCCL_SOCKET_IFNAME": "lo"}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.virtual_nodes", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nodes", type=PositiveInt, help="How many.")
    args, rest = parser.parse_known_args(argv)
    quiet_notices()
    with bad_input():
        if in_job():
            raise ValueError("this process is a task of a SLURM job, whose nodes are real: start recipes.pretrain")
    command = ("-m", "recipes.pretrain", *rest, "--trainer.devices", "1", "--trainer.num_nodes", str(args.nodes))
    nodes, port = range(args.nodes), find_free_network_port()
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").disabled = True  # the ranks say what happened
    ranks = start_processes("pretrain", sys.executable, {node: command for node in nodes},
                            {node: environment(node, args.nodes, port) for node in nodes},
                            DefaultLogsSpecs(os.devnull))  # what they say is not written anywhere else
    try:
        failures = ranks.wait().failures.values()  # where one has failed the others are ended
    except SignalException as asked:
        ranks.close(signal.Signals(asked.sigval), GRACE)
        sys.exit(128 + asked.sigval)
    code = min(failures, key=lambda failure: failure.timestamp).exitcode if failures else 0
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
