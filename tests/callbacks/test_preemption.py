"""A signal at any moment: the step is finished, logged, validated and saved, and nothing more is trained."""

import os
import signal
from inspect import getsource
from pathlib import Path

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from tiny import TinyData, TinyModel, trainer

from callbacks import JsonlLogger, RunCheckpoint, read_metrics
from callbacks.preemption import REQUEUE, SIGNALS, Preempted, Preemption

USR1, TERM, INT = signal.SIGUSR1, signal.SIGTERM, signal.SIGINT


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class SendIn(Callback):
    """Sends signals to this process in a hook, after `step` optimizer steps."""

    def __init__(self, hook: str, step: int, *numbers: int) -> None:
        self.step, self.numbers = step, list(numbers)
        setattr(self, hook, self._send)

    def _send(self, trainer, *_) -> None:
        while self.numbers and trainer.global_step == self.step:
            os.kill(os.getpid(), self.numbers.pop(0))


def run(folder: Path, *callbacks: Callback, under_scheduler: bool = False, resume: str | None = None) -> None:
    """Eight optimizer steps of two micro-batches, validated after steps 4 and 8, saved after 3 and 6."""
    checkpoint = RunCheckpoint(folder / "checkpoints", every_n_train_steps=3)
    preemption = Preemption(checkpoint, under_scheduler)
    runner = trainer(folder, 8, [*callbacks, preemption, checkpoint], JsonlLogger(folder), accumulate_grad_batches=2,
                     val_check_interval=8)
    with preemption.listening():
        runner.fit(TinyModel(), datamodule=TinyData(micro=2), ckpt_path=resume, weights_only=False)


def steps(folder: Path, name: str) -> list[int]:
    return [line["step"] for line in read_metrics(folder / "metrics.jsonl") if name in line]


@pytest.mark.parametrize(("hook", "step", "saved"), [
    ("on_before_backward", 1, 2),       # in an optimizer step
    ("on_before_optimizer_step", 3, 4), # in the step that is validated after
    ("on_save_checkpoint", 3, 4),       # in a save
    ("on_validation_start", 4, 5),      # in a validation: it is finished, and one step more is taken
])  # fmt: skip
def test_the_step_is_finished_logged_and_saved(hook, step, saved, tmp_path):
    with pytest.raises(Preempted) as stop:
        run(tmp_path, SendIn(hook, step, USR1, TERM, INT))
    assert stop.value.code == REQUEUE and f"SIGUSR1: step {saved} is saved in" in str(stop.value)
    assert Path(stop.value.saved).name == f"step={saved:06d}.ckpt" and Path(f"{stop.value.saved}.complete").exists()
    assert steps(tmp_path, "train/loss") == list(range(1, saved + 1)), "the last step too, and none after it"
    assert steps(tmp_path, "val/loss") == [4] * (saved >= 4), "a validation that was due is in the curve"
    assert signal.getsignal(TERM) == signal.SIG_IGN, "nothing disturbs the way out"
    signal.signal(USR1, signal.SIG_DFL)
    run(tmp_path, resume=stop.value.saved)
    assert steps(tmp_path, "train/loss") == list(range(1, 9)) and steps(tmp_path, "val/loss") == [4, 8]


@pytest.mark.parametrize("under_scheduler", [True, False])
def test_a_rank_that_lost_another_may_say_so(under_scheduler, tmp_path):
    """In a job: srun sends SIGTERM to the ranks that are left, at once."""
    preemption = Preemption(RunCheckpoint(tmp_path), under_scheduler)
    before = {number: signal.getsignal(number) for number in (USR1, TERM, INT)}
    try:
        with pytest.raises(RuntimeError), preemption.listening():
            raise RuntimeError("Connection closed by peer")
        after = {number: signal.getsignal(number) for number in before}
        assert after == (dict.fromkeys(before, signal.SIG_IGN) if under_scheduler else before)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(("number", "under_scheduler", "code"), [
    (TERM, False, 143), (TERM, True, REQUEUE), (INT, False, 130), (USR1, True, REQUEUE),
])  # fmt: skip
def test_the_exit_code_says_what_to_do(number, under_scheduler, code, tmp_path, capfd):
    with pytest.raises(Preempted) as stop:
        run(tmp_path, SendIn("on_before_backward", 1, number), under_scheduler=under_scheduler)
    assert stop.value.code == code
    assert f"{number.name}: saving after this optimizer step" in capfd.readouterr().err


def test_a_second_interrupt_ends_at_once(tmp_path):
    with pytest.raises(SystemExit):  # Lightning's answer to KeyboardInterrupt
        run(tmp_path, SendIn("on_before_backward", 1, INT, INT))
    assert steps(tmp_path, "train/loss") == [1]


def test_a_signal_in_the_last_step_lets_the_run_finish(tmp_path):
    before = signal.getsignal(TERM)
    run(tmp_path, SendIn("on_before_backward", 7, TERM))
    assert steps(tmp_path, "train/loss") == list(range(1, 9)) and steps(tmp_path, "val/loss") == [4, 8]
    assert signal.getsignal(TERM) == before


def test_no_micro_batch_waits_for_lightnings_question(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("torch.distributed.broadcast", lambda *_, **__: asked.append(1))
    assert "self._broadcast_sigterm_tensor()" in getsource(_TrainingEpochLoop.advance)
    runner = trainer(tmp_path, 2, [])
    runner.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert len(asked) == 1
    Preemption(RunCheckpoint(tmp_path)).on_train_start(runner, TinyModel())
    runner.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert len(asked) == 1


def test_no_handler_of_lightnings_stands_in_between(tmp_path):
    """It runs a collective wherever the signal comes; before the first step SIGTERM ends a process instead."""
    found = []

    class Look(Callback):
        def on_train_start(self, *_):
            found.append(signal.getsignal(TERM))

    run(tmp_path, Look())  # before Preemption
    assert found == [signal.SIG_DFL]


def test_an_ignored_interrupt_stays_ignored(tmp_path):
    """As of a script's background process, which Ctrl-C in the terminal is not meant for."""
    signal.signal(INT, signal.SIG_IGN)
    run(tmp_path, SendIn("on_before_backward", 0, INT), SendIn("on_before_backward", 2, INT))
    assert steps(tmp_path, "train/loss")[-1] == 8 and signal.getsignal(INT) == signal.SIG_IGN
