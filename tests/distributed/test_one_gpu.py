"""`python -m recipes.virtual_nodes` on a GPU: two ranks share it, through NCCL and DeepSpeed as on two nodes."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from callbacks import read_metrics
from store import write_store

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
STRATEGIES = ["single", "ddp", "zero1", "zero2", "zero3", "zero3-offload"]
STEPS, MORE = 6, 4
SIZES = {"data.row_tokens": 128, "data.micro_batch_rows": 2, "data.global_batch_tokens": 1024, "data.val_rows": 4,
         "data.num_workers": 0, "data.source": "null", "data.vocab_size": "null", "model.optimizer.warmup_steps": 1,
         "trainer.max_steps": STEPS + MORE, "trainer.log_every_n_steps": 1, "checkpoint.every_n_train_steps": STEPS,
         "checkpoint.keep_every_n_steps": STEPS}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Lines of metrics by strategy, and by strategy and the one before it in the list, which it goes on from."""
    folder = tmp_path_factory.mktemp("runs")
    settings = SIZES | {"data.store": write_store(folder)}

    def train(strategy, before=None):
        recipe = ["recipes.pretrain"] if strategy == "single" else ["recipes.virtual_nodes", "2"]
        run = folder / (f"{strategy}-after-{before}" if before else strategy)
        start = ["--resume", folder / before / f"checkpoints/step={STEPS:06d}.ckpt"] if before else []
        command = [sys.executable, "-m", *recipe, "--config", "configs/longdoc-tiny.yaml", "--config",
                   f"configs/strategy/{strategy}.yaml", "--run_dir", run, *start,
                   *(text for key, value in settings.items() for text in (f"--{key}", value))]
        done = subprocess.run(list(map(str, command)), cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
                              capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, f"{strategy} after {before}:\n" + done.stdout[-2000:] + done.stderr[-4000:]
        return read_metrics(run / "metrics.jsonl")

    with ThreadPoolExecutor(len(STRATEGIES)) as pool:  # a start takes longer than the steps
        alone = dict(zip(STRATEGIES, pool.map(train, STRATEGIES)))
        pairs = list(zip(STRATEGIES, STRATEGIES[1:] + STRATEGIES[:1]))
        return alone | {(after, before): lines for (before, after), lines in zip(
            pairs, pool.map(lambda pair: train(pair[1], before=pair[0]), pairs))}


def losses(lines, after=0):
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line and line["step"] > after}


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_two_ranks_train_what_one_trains(runs, strategy):
    """To float32's rounding, which further steps multiply: sums over ranks have another order than over rows."""
    alone = losses(runs["single"])
    assert list(alone) == list(range(1, STEPS + MORE + 1)) and alone[STEPS + MORE] < 0.9 * alone[1]
    assert losses(runs[strategy]) == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("before, strategy", list(zip(STRATEGIES, STRATEGIES[1:] + STRATEGIES[:1])))
def test_it_goes_on_from_another(runs, before, strategy):
    rest = losses(runs[strategy, before])
    assert list(rest) == list(range(STEPS + 1, STEPS + MORE + 1))
    assert rest == pytest.approx(losses(runs[before], after=STEPS), rel=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_takes_the_memory_that_was_planned(runs, strategy):
    """To the allocator's and the kernels' small things, which are much of so small a model."""
    peaks, planned = ([line[name] for line in runs[strategy] if line.get(name) is not None]
                      for name in ("throughput/device_memory_gb", "memory/planned_gb"))
    assert 0 < max(peaks) < 1.2 * planned[-1] + 0.3
