"""The command line under each file of configs/strategy: the model built from the data's vocabulary, in pieces or whole.

Two CPU processes train what one trains: in float32 to rounding, in the lean form to bfloat16's.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from callbacks import read_metrics
from store import write_store

SCRIPT = Path(__file__).with_name("pretrain_on_cpus.py")
ROOT = SCRIPT.parents[2]
OVERLAYS = sorted(path.stem for path in (ROOT / "configs/strategy").glob("*.yaml"))
# By trainers of earlier tests, in this process: with them Lightning waits for ranks that nobody starts.
LEFT_BEHIND = ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
SIZES = {"model.config.d_model": 128, "model.config.n_heads": 2, "data.row_tokens": 64, "data.micro_batch_rows": 2,
         "data.global_batch_tokens": 512, "data.carry_state": "true", "data.val_rows": 8, "data.num_workers": 0,
         "trainer.max_steps": 4, "trainer.val_check_interval": 4, "trainer.log_every_n_steps": 1,
         "model.optimizer.warmup_steps": 1, "checkpoint.every_n_train_steps": 2, "trainer.accelerator": "cpu"}

KEYS = {"config": "trainer.strategy.init_args.config", "again": "model.config.activation_checkpointing"}
GATHERED = "{zero_optimization: {stage3_param_persistence_threshold: 100}}"  # by default all of so small a model stays
BY_MODULE = "{zero_optimization: {stage3_param_persistence_threshold: 100, stage3_prefetch_bucket_size: 1000}}"


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Of a strategy's run, by step; of one that goes on from step 2 of another strategy's."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    store = write_store(folder)

    def of(overlay, after=None, **changes):
        values = (re.sub(r"\W+", "_", str(value)) for value in changes.values())
        name = "-".join([overlay, *(["after", after] if after else []), *values])
        if name not in found:
            if after:
                of(after)
            settings = SIZES | {"data.store": store, "data.source": "null", "data.vocab_size": "null",
                                "trainer.devices": 1 if overlay == "single" else 2, "run_dir": folder / name}
            settings |= {"resume": folder / after / "checkpoints/step=000002.ckpt"} if after else {}
            settings |= {KEYS.get(key, f"trainer.{key}"): value for key, value in changes.items()}
            command = [sys.executable, "-W", "ignore", SCRIPT, "--config", ROOT / "configs/longdoc-tiny.yaml",
                       "--config", ROOT / f"configs/strategy/{overlay}.yaml",
                       *(text for key, value in settings.items() for text in (f"--{key}", value))]
            environment = {k: v for k, v in os.environ.items() if k not in LEFT_BEHIND}
            environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(list(map(str, command)), env=environment, cwd=folder, capture_output=True, text=True,
                                  timeout=240)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
            late = re.findall(r"got during saves: (\d+) bytes; gathered at once: (\d+ parts of \d+)", done.stdout)
            assert len(late) == settings["trainer.devices"]
            assert max(int(size) for size, _ in late) < 1000, "counters of steps alone"
            whole = "0 parts of 4" if changes.get("config") == BY_MODULE else "2 parts of 4"
            assert {parts for _, parts in late} == {whole if "zero3" in overlay else "0 parts of 0"}
            lines = read_metrics(folder / name / "metrics.jsonl")
            found[name] = {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
        return found[name]

    return of


@pytest.mark.parametrize("overlay", [
    pytest.param(name, marks=[] if name == "zero3" else pytest.mark.cluster) for name in OVERLAYS if name != "single"])
def test_it_trains_what_one_process_trains(losses, overlay):
    alone = losses("single")
    assert list(alone) == [1, 2, 3, 4] and alone[4] < alone[1]
    assert losses(overlay) == pytest.approx(alone, rel=1e-2 if overlay == "zero3-lean" else 1e-5)


@pytest.mark.cluster
@pytest.mark.parametrize("before, overlay", [("zero3", "zero3-lean"), ("zero3-lean", "zero3")])
def test_it_goes_on_at_another_precision_of_the_same_stage(losses, before, overlay):
    rest = {step: loss for step, loss in losses("single").items() if step > 2}
    assert losses(overlay, after=before) == pytest.approx(rest, rel=1e-2)


@pytest.mark.cluster
@pytest.mark.parametrize("overlay", ["zero1", "zero2"])
def test_without_clipping_it_is_the_same_to_the_bit(losses, overlay):
    """With it DeepSpeed's norm of all gradients ends in another bit."""
    alone = losses("single", gradient_clip_val="null", precision="bf16-mixed")
    assert losses(overlay, gradient_clip_val="null", precision="bf16-mixed", devices=1) == alone


@pytest.mark.cluster
@pytest.mark.parametrize("config, again", [(GATHERED, "true"), (BY_MODULE, "false"), (BY_MODULE, "true")])
def test_blocks_gathered_at_once_or_by_module_once_or_again(losses, config, again):
    """Blocks larger than what is gathered ahead are gathered by module; recomputed ones once more."""
    assert losses("zero3", config=config, again=again) == pytest.approx(losses("single"), rel=1e-5)
