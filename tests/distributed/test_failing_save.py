"""A write that fails on one rank ends all ranks with CheckpointError and leaves a checkpoint to go on from."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from store import write_store

SCRIPT = Path(__file__).with_name("failing.py")
LIMIT_S = 60  # from the start of the run to the error on all ranks; measured: 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failing")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        ports = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "NODE_RANK": "0"}
    settings = os.environ | ports | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2]), "WORLD_SIZE": "2"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), str(write_store(folder))]
    processes = [subprocess.Popen(command, env=settings | {"LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True) for rank in range(2)]  # fmt: skip
    try:
        for process in processes:
            output, _ = process.communicate(timeout=250)
            assert process.returncode == 0, output[-4000:]
    finally:
        for process in processes:
            process.kill()
    return folder


@pytest.mark.cluster
@pytest.mark.parametrize("case", ["zero1", "zero3", "zero3-later", "ddp", "zero3-collect", "zero3-lanes", "ddp-lanes"])
def test_all_ranks_end_and_a_resume_goes_on(folder, case):
    found = [json.loads((folder / f"{case}-rank{rank}.json").read_text()) for rank in range(2)]
    failed = 0 if case == "ddp" else 1
    why = "out of memory" if case.endswith(("collect", "lanes")) else "No space left on device"
    assert why in found[failed]["ended"] and "another rank" in found[1 - failed]["ended"]
    for rank in found:
        assert rank["seconds"] < LIMIT_S and "step=000004.ckpt" in rank["ended"]
        assert rank["resumed"] == "step=000002.ckpt" and rank["newest"] == "step=000006.ckpt"
    assert found[0]["steps"] == [1, 2, 3, 4, 5, 6]
    assert not list((folder / case / "checkpoints").glob("*.partial"))
