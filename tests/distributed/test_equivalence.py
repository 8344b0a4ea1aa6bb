"""Two processes train what one process trains: losses, gradient norms, weights, resume, and a stop for all.

Under DDP and ZeRO 1, 2, 3, at accumulation 1 and 4, with the real model, data and callbacks, and with numbers of valid
targets that differ from rank to rank. Everything is float32; sums are taken in another order, nothing else differs:

    losses     relative 5e-6        (measured: 7e-8)
    norms      relative 3e-5        (measured: 6e-7, with documents 8e-6)
    weights    absolute 2e-6 after six AdamW steps of up to 3e-3        (measured: 2e-7)
    initial    to the bit
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import run
from callbacks import read_metrics
from data.mqar import MQARDataModule
from store import write_store
from vla_lm.memory_plan import Sharding, plan_memory

RUN = Path(__file__).with_name("run.py")
ROOT = RUN.parents[2]
SHARDED = ["zero1", "zero2", "zero3"]
CLOSE = dict(rel=5e-6, abs=1e-9)


def start(folder, store, cases, **environment):
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-W", "ignore", str(RUN), str(folder), str(store), cases]
    return subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return trained(folder, write_store(folder), "every_case")


def trained(folder, store, cases):
    """Runs the cases on two processes and on one, beside each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0"}
    processes = [start(folder, store, cases, LOCAL_RANK=str(rank), **ranks) for rank in range(2)]
    processes.append(start(folder, store, cases))
    try:
        for process in processes:
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, output[-4000:]
    finally:
        for process in processes:
            process.kill()
    return folder


def load(folder, case):
    return torch.load(folder / f"{case}.pt", weights_only=False)


def assert_same_training(found, expected, weights=2e-6):
    assert found["losses"] == pytest.approx(expected["losses"], **CLOSE) and len(expected["losses"]) == 6
    assert found["val"] == pytest.approx(expected["val"], **CLOSE) and list(expected["val"]) == [2, 4, 6]
    assert found["state_norms"] == pytest.approx(expected["state_norms"], rel=3e-5) and len(found["state_norms"]) == 3
    assert len(found["norms"]) == len(expected["norms"]) == 6
    for here, there in zip(found["norms"], expected["norms"]):
        assert here == pytest.approx(there, rel=3e-5)
    assert found["weights"].keys() == expected["weights"].keys() == found["initial"].keys()
    assert found["began"] or all(torch.equal(found["initial"][name], w) for name, w in expected["initial"].items())
    for name, weight in expected["weights"].items():
        assert (found["weights"][name] - weight).abs().max() < weights, name


def test_the_setting_is_a_hard_one(runs):
    """Valid targets differ between the ranks and between the micro-batches, and clipping acts."""
    data = MQARDataModule(vocab_size=32, n_pairs=[2, 6], length=26, global_batch_tokens=8 * 26)
    rows = data.train_set(data.batch_plan(1)).__getitems__(list(range(48)))["targets"]
    pieces = (rows >= 0).sum(1).view(6, 4, 2).sum(2)  # [steps, ranks and micro-batches of two rows]
    ranks = pieces.view(6, 2, 2).sum(2)
    assert (ranks[:, 0] != ranks[:, 1]).sum() >= 2 and sum(len(set(step)) > 1 for step in pieces.tolist()) >= 4
    norms = load(runs, "one-1")["norms"]
    assert {"layers.0", "layers.1", "embedding", "norm", "global"} <= norms[0].keys()
    assert all(step["global"] > 0.5 and step["clip_rate"] == 1 for step in norms)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("way", ["one", "ddp", *SHARDED])
def test_the_same_training(runs, way, accumulation):
    found = load(runs, f"{way}-{accumulation}")
    assert_same_training(found, load(runs, "one-1"))
    if way in SHARDED:
        assert found["engine_norms"] == pytest.approx([step["global"] for step in found["norms"]], rel=1e-5)


@pytest.mark.parametrize("way", ["one", "ddp", "zero3"])
def test_the_same_training_on_documents_with_carried_states(runs, way):
    assert_same_training(load(runs, f"{way}-documents"), load(runs, "one-documents"))


@pytest.mark.parametrize(
    "case, whole",
    [(f"{way}-resumed", f"{way}-{run.RESUMED[way]}") for way in ("one", "ddp", *SHARDED)]
    + [(f"{way}-documents-resumed", f"{way}-documents") for way in ("one", "ddp", "zero3")],
)
def test_resume_goes_on_to_the_bit(runs, case, whole):
    found, expected = load(runs, case), load(runs, whole)
    assert found["began"] == 4 and expected["began"] == 0
    for name in ("losses", "val", "norms", "state_norms"):
        assert found[name] == expected[name]
    assert all(torch.equal(found["weights"][name], weight) for name, weight in expected["weights"].items())


@pytest.mark.parametrize("kind", ["", "-documents"])
def test_resume_on_another_number_of_processes(runs, tmp_path, kind):
    """Saved by two processes at accumulation 4, resumed by one process at accumulation 1."""
    whole = f"ddp{kind or '-4'}"
    saved = runs / whole / "checkpoints" / "step=000004.ckpt"
    watch = run.train(tmp_path, "one", 1, resume=saved, store=runs / "store" if kind else None)
    expected = load(runs, whole)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    losses = {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
    assert losses == pytest.approx({step: expected["losses"][step] for step in (5, 6)}, **CLOSE)
    for name, weight in expected["weights"].items():
        assert (watch.weights[6][name] - weight).abs().max() < 2e-6, name


@pytest.mark.parametrize("way", ["one", "ddp", *SHARDED])
def test_a_nan_on_one_rank_stops_all_with_the_weights_untouched(runs, way):
    stops = [load(runs, f"{way}-nan-rank{rank}") for rank in range(1 if way == "one" else 2)]
    expected = load(runs, f"{way}-4")
    for stopped, weights, at_exception in stops:
        assert stopped["step"] == 4 and stopped["layer"] == "layers.0"
        assert stopped == stops[0][0] and "step=000002.ckpt" in stopped["message"]
        assert list(weights) == [0, 1, 2, 3]
        assert all(torch.equal(weights[3][name], weight) for name, weight in at_exception.items())
        assert not torch.equal(at_exception["transformer.norm.weight"], expected["weights"]["transformer.norm.weight"])


def test_bf16_mixed_under_zero_is_what_it_is_elsewhere(runs):
    """Float32 weights and sums, bfloat16 matmuls: as close to one process as that process's own rounding allows."""
    found, expected, exact = load(runs, "zero3-mixed"), load(runs, "one-mixed"), load(runs, "one-1")
    assert_same_training_in_bf16(found, expected, exact)
    assert all(torch.equal(found["initial"][name], weight) for name, weight in exact["initial"].items())


def assert_same_training_in_bf16(found, expected, exact):
    """`expected`: one process in bf16-mixed, `exact`: in float32. Losses within 2e-3, norms 2 %, weights 6e-4 (six
    steps of up to 3e-3)."""
    norms = [step["global"] for step in found["norms"]]
    assert found["engine_norms"] == pytest.approx(norms, rel=1e-5)
    assert norms == pytest.approx([step["global"] for step in expected["norms"]], rel=0.02)
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-3)
    assert found["losses"] != exact["losses"], "the matmuls are not float32"
    for name, weight in expected["weights"].items():
        assert (found["weights"][name].float() - weight).abs().max() < 6e-4, name


def assert_allocated_as_planned(found, way, precision="32-true"):
    """Every part to the byte, on the first rank at accumulation 4.

    Pieces of float32 gradients under ZeRO-1 and 2 may hold on to the whole of the one parameter that the ranks' border
    cuts, in each of the two groups.
    """
    config = run.model_config(run.VOCAB, "paper")
    stage = int(way[4]) if way in SHARDED or "offload" in way else 0
    sharding = Sharding(stage, 1 if way == "one" else 2, precision, "offload" in way, reduce_bucket_size=200_000_000,
                        bucket_view=way != "ddp")
    plan = plan_memory(config, sharding, rows=1, row_tokens=run.LENGTH, device="cpu")
    real = {part: sum(sizes.values()) for part, sizes in found["allocated"].items()}
    for part in ("parameters", "masters", "optimizer states"):
        assert real[part] == plan.bytes(part), part
    assert real["gathered"] <= plan.bytes("small parameters"), "here all are small"
    assert real["buckets"] == (plan.bytes("buckets") if stage in (0, 3) else 0), "ZeRO-1 and 2 give theirs back"
    spare = 2 * 4 * config.vocab_size * config.d_model if stage in (1, 2) and precision != "bf16-true" else 0
    assert plan.bytes("gradients") <= real["gradients"] <= plan.bytes("gradients") + spare
    if way == "zero1" and precision != "bf16-true":  # whole between micro-batches, cut at the last
        whole = plan_memory(config, sharding, rows=1, row_tokens=run.LENGTH, accumulation=4, device="cpu")
        assert real["between"] == whole.bytes("gradients") > real["gradients"]
    elif stage > 1:
        assert real["between"] == 0
    weights = {torch.bfloat16 if precision == "bf16-true" else torch.float32}
    assert set(found["allocated"]["parameters"]) == weights
    for part in ("masters", "optimizer states"):
        assert set(found["allocated"][part]) <= {torch.float32}


@pytest.mark.parametrize("way", ["one", "ddp", *SHARDED])
def test_memory_is_what_was_planned(runs, way):
    assert_allocated_as_planned(load(runs, f"{way}-4"), way)


def test_the_report_at_start_names_what_is_real(runs):
    """Under ZeRO-3 in bf16-mixed: Lightning's own plugin would have made it bfloat16 throughout."""
    text = (runs / "zero3-mixed" / "start.txt").read_text()
    types = next(line for line in text.splitlines() if line.startswith("as they are: "))
    assert "parameters float32; masters float32; gradients' sums over ranks float32" in types
    assert "memory.S float32, memory.A float32" in types and "precision bf16-mixed" in types
    assert "each of 2 ranks" in text and "optimizer states" in text.split("after 2 steps")[1]


@pytest.fixture(scope="module")
def more_runs(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("more"), "none", "offload_and_lean")


@pytest.mark.cluster
class TestOffloadAndLean:
    @pytest.mark.parametrize("way", ["zero2-offload", "zero3-offload"])
    def test_the_optimizer_on_the_host(self, more_runs, way):
        found = load(more_runs, way)
        assert_same_training(found, load(more_runs, "one-1"))
        assert found["engine_norms"] == pytest.approx([step["global"] for step in found["norms"]], rel=1e-5)

    def test_fused_adamw_on_the_host(self, more_runs):
        assert_same_training(load(more_runs, "zero3-fused"), load(more_runs, "one-1"))
        assert_same_training(load(more_runs, "one-fused"), load(more_runs, "one-1"))

    @pytest.mark.parametrize("way", SHARDED)
    def test_bf16_mixed(self, more_runs, way):
        found, expected, exact = (load(more_runs, case) for case in (f"{way}-mixed", "one-mixed", "one-1"))
        assert_same_training_in_bf16(found, expected, exact)

    @pytest.mark.parametrize("way", SHARDED)
    def test_lean_has_float32_masters_and_sums(self, more_runs, way):
        """bfloat16 parameters beside masters that start from the rounded weights: 2^-9 of a weight away."""
        found, exact = load(more_runs, f"{way}-lean"), load(more_runs, "one-1")
        for name, weight in exact["initial"].items():
            assert torch.equal(found["initial"][name], weight.bfloat16().float()), name
        norms = [step["global"] for step in found["norms"]]
        assert found["engine_norms"] == pytest.approx(norms, rel=1e-5)
        assert norms == pytest.approx([step["global"] for step in exact["norms"]], rel=0.05)
        assert found["losses"] == pytest.approx(exact["losses"], rel=5e-3)
        change = [(exact["weights"][n] - exact["initial"][n]).norm() for n in exact["weights"]]
        apart = [(found["weights"][n] - exact["weights"][n] - found["initial"][n] + exact["initial"][n]).norm()
                 for n in exact["weights"]]  # fmt: skip
        assert sum(apart) < 0.15 * sum(change), "what was learned is the same but for rounding"
        masters = torch.cat([weight.flatten() for weight in found["weights"].values()])
        assert (masters != masters.bfloat16().float()).float().mean() > 0.9, "masters have float32's digits"

    @pytest.mark.parametrize("way", SHARDED)
    def test_a_nan_stops_all_ranks_also_without_the_callback(self, more_runs, way):
        for rank in range(2):
            stopped, weights, at_exception = load(more_runs, f"{way}-unguarded-nan-rank{rank}")
            assert stopped["message"].startswith("optimizer step 4: a gradient is not finite; the weights are those of")
            assert all(torch.equal(weights[3][name], weight) for name, weight in at_exception.items())

    @pytest.mark.parametrize("way", SHARDED)
    def test_the_lean_form_s_report_names_what_is_real(self, more_runs, way):
        text = (more_runs / f"{way}-lean" / "start.txt").read_text()
        types = next(line for line in text.splitlines() if line.startswith("as they are: "))
        assert "parameters bfloat16; masters float32; gradients' sums over ranks float32" in types

    @pytest.mark.parametrize("way", SHARDED)
    def test_memory_is_what_was_planned(self, more_runs, way):
        assert_allocated_as_planned(load(more_runs, f"{way}-lean"), way, "bf16-true")
        assert_allocated_as_planned(load(more_runs, f"{way}-mixed"), way, "bf16-mixed")
        if way != "zero1":
            assert_allocated_as_planned(load(more_runs, f"{way}-offload"), f"{way}-offload")

    @pytest.mark.parametrize(
        "case", ["zero2-offload", "zero3-offload", *(f"{way}-{kind}" for way in SHARDED for kind in ("lean", "mixed"))]
    )
    def test_resume_and_a_nan_on_one_rank(self, more_runs, case):
        found, expected = load(more_runs, f"{case}-resumed"), load(more_runs, case)
        assert found["began"] == 4 and found["losses"] == expected["losses"]
        assert all(torch.equal(found["weights"][name], weight) for name, weight in expected["weights"].items())
        stops = [load(more_runs, f"{case}-nan-rank{rank}") for rank in range(2)]
        for stopped, weights, at_exception in stops:
            assert stopped["step"] == 4 and stopped == stops[0][0]
            assert all(torch.equal(weights[3][name], weight) for name, weight in at_exception.items())
