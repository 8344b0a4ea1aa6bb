"""A checkpoint of any strategy and number of processes goes on under any other, and comes out again as it went in.

One process and two, in one launch. Losses are those of the run left alone within 5e-6 (measured: 0), weights within
2e-6 (measured: 7e-9); to the bit where strategy and number of processes stay. The tensors of what was loaded and
exported again are identical.
"""

import os
import shutil
import socket
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from pairs import name, saved
from store import write_store

from callbacks import read_metrics
from vla_lm.checkpoints import load_model
from vla_lm.lanes import merged
from vla_lm.native import export, lanes_of
from vla_lm.neutral import MOMENTS, NeutralCheckpoint

ROOT, PAIRS = Path(__file__).parents[2], Path(__file__).with_name("pairs.py")
QUICK = ["one*1>zero3*2", "zero3*2>one*1", "zero1*2>zero3*2", "zero1*2>zero1*2", "zero3*2>zero3*2", "zero1*2n>zero1*2"]
WAYS = ["one*1", "ddp*2", "zero1*2", "zero2*2", "zero3*2", "zero1*1", "zero3*1"]
EVERY = [f"{a}>{b}" for a, b in product(WAYS, WAYS)] + [f"{way}n>{way}" for way in WAYS]
EVERY += ["one*1>zero3-offload*2", "zero3-offload*2>zero2*2", "zero1*2>zero2-offload*2", "zero2-offload*2>one*1",
          "zero3-offload*2>zero3-offload*2", "zero3*2>zero3-offload*2", "zero3-offload*2n>zero3-offload*2"]
LEAN = [f"bf16-true/{a}>{b}" for a, b in product(["zero1*2", "zero2*2", "zero3*2", "zero1*1"], repeat=2)]
CHAINS = ["one*1>zero3*2>ddp*2", "zero3*2>one*1>zero1*2", "zero2*2>zero1*1>zero3*2"]


def launch(folder: Path, store: Path | str, cases: list[str]) -> None:
    """One process and two; they wait for each other's checkpoints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        ports = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "NODE_RANK": "0"}
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    sources = {case.split(">")[0].rstrip("n") for case in cases if case.count(">") < 2}
    command = [sys.executable, "-W", "ignore", str(PAIRS), str(folder), str(store)]
    command.append(",".join([*sorted(sources), *cases]))
    ranks = [{"WORLD_SIZE": "2", "LOCAL_RANK": str(rank)} | ports for rank in range(2)] + [{}]
    logs = [folder / f"process{number}.log" for number in range(3)]  # a pipe that nobody reads would stop them
    processes = [subprocess.Popen(command, env=settings | rank, stdout=log.open("w"), stderr=subprocess.STDOUT)
                 for rank, log in zip(ranks, logs)]  # fmt: skip
    try:
        for process, log in zip(processes, logs):
            assert process.wait(timeout=800) == 0, log.read_text()[-4000:]
    finally:
        for process in processes:
            process.kill()


def check(folder: Path, case: str) -> None:
    """A resumed case against the run it comes from."""
    source, way = case.split(">")
    lean = "/" in case  # bfloat16 on a CPU: a run differs by 1e-5 with what the process computed before it
    exact = source.rstrip("n") == way and not lean
    source = source.rstrip("n")
    whole, found = (torch.load(folder / f"{name(part)}.pt", weights_only=False) for part in (source, case))
    assert found["began"] == 4 and sorted(found["losses"]) == [5, 6]
    close = 0 if exact else 1e-3 if lean else 5e-6
    assert found["losses"] == pytest.approx({step: whole["losses"][step] for step in (5, 6)}, rel=close, abs=0)
    for parameter, weight in whole["weights"].items():
        difference = (found["weights"][parameter] - weight).abs().max()
        assert difference == 0 if exact else difference < (1e-3 if lean else 2e-6), parameter
    before = NeutralCheckpoint(saved(folder, source).with_suffix(".neutral"))
    after = NeutralCheckpoint(export(folder / name(case) / "untouched.ckpt", folder / name(case) / "again.neutral"))
    assert before.names("weights") and before.state["global_step"] == after.state["global_step"] == 4
    for kind in ("weights", *MOMENTS):
        assert sorted(before.names(kind)) == sorted(after.names(kind))
        for parameter in before.names(kind):
            assert torch.equal(before.tensor(kind, parameter), after.tensor(kind, parameter)), (kind, parameter)
    assert before.state["lanes"] == after.state["lanes"]
    for here, there in zip(before.lanes().get("layers", []), after.lanes().get("layers", []), strict=True):
        assert here.keys() == there.keys() and all(torch.equal(value, there[key]) for key, value in here.items())


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Documents whose states are carried on."""
    folder = tmp_path_factory.mktemp("quick")
    launch(folder, write_store(folder), QUICK)
    return folder


@pytest.mark.parametrize("case", QUICK)
def test_saved_here_resumed_there(quick, case):
    check(quick, case)
    state = NeutralCheckpoint(saved(quick, case.split(">")[0].rstrip("n")).with_suffix(".neutral")).state
    assert state["lanes"] == list(range(8)) and state["DocumentsDataModule"]["samples"] == 4 * 8


def test_under_zero_each_rank_writes_its_own_lanes(quick):
    folder = saved(quick, "zero3*2") / "checkpoint"
    lanes = [torch.load(folder / f"lanes_rank_0000{rank}.pt", weights_only=True)["lanes"] for rank in range(2)]
    assert len(lanes[0]) == len(lanes[1]) == 4 and sorted(lanes[0] + lanes[1]) == list(range(8))
    states = list(folder.glob("*model_states.pt"))
    assert len(states) == 2 and not any("lanes" in torch.load(file, weights_only=False) for file in states)


def test_lanes_of_an_older_version(quick, tmp_path):
    """Among what Lightning saves, all of them in every file."""
    source, old = saved(quick, "zero1*2"), tmp_path / "step=000004.ckpt"
    shutil.copytree(source, old)
    parts = lanes_of(source)
    for file in (old / "checkpoint").glob("lanes_rank_*.pt"):
        file.unlink()
    for file in (old / "checkpoint").glob("*model_states.pt"):
        torch.save(torch.load(file, weights_only=False) | {"lanes": merged(parts)}, file)
    expected = NeutralCheckpoint(source.with_suffix(".neutral")).lanes()
    found = NeutralCheckpoint(export(old)).lanes()
    assert len(parts) == 2 and found["lanes"] == expected["lanes"] == list(range(8))
    for one, other in zip(found["layers"], expected["layers"], strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_evaluated_on_a_laptop(quick):
    """load_model of ZeRO's folders and of their neutral form, in a process without a group."""
    expected = None
    for path in (saved(quick, "one*1"), saved(quick, "zero3*2").with_suffix(".neutral")):
        weights = load_model(path, trust_pickle=True).state_dict()
        expected = expected or weights
        assert all((weights[key] - value).abs().max() < 2e-6 for key, value in expected.items())
    folder = load_model(saved(quick, "zero3*2"), trust_pickle=True).state_dict()
    assert all(torch.equal(folder[key], value) for key, value in weights.items())
    with pytest.raises(ValueError, match="--trust-pickle"):
        load_model(saved(quick, "zero3*2"))


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    folder = tmp_path_factory.mktemp("every")
    launch(folder, "none", EVERY + LEAN + CHAINS)
    return folder


@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", EVERY + LEAN)
def test_every_ordered_pair(every, case):
    check(every, case)


@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CHAINS)
def test_resumed_twice_with_other_numbers_of_processes(every, case):
    whole, found = (torch.load(every / f"{name(part)}.pt", weights_only=False) for part in ("one*1", case))
    lines = read_metrics(every / name(case) / "metrics.jsonl")
    losses = {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
    assert losses == pytest.approx(whole["losses"], rel=5e-6) and sorted(losses) == [1, 2, 3, 4, 5, 6]
    for parameter, weight in whole["weights"].items():
        assert (found["weights"][parameter] - weight).abs().max() < 2e-6, parameter
