"""Ends a run on a signal with nothing lost: the step is finished, the run saved, the exit code says what to do."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from callbacks.checkpoint import RunCheckpoint

REQUEUE = 85  # Linux's ERESTART; no code of Python, of a shell or of a signal's death
LAUNCHER = "VLA_LM_LAUNCHER"  # id of the process that starts the ranks of this machine, where Lightning starts them
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


class Preempted(Exception):
    """The run was asked to end and is saved.

    Attributes:
        code: exit code for the process: :data:`REQUEUE` where the job is to be started again, 143 after SIGTERM, 130
            after Ctrl-C.
        saved: the checkpoint.
    """

    def __init__(self, name: str, step: int, saved: str, code: int) -> None:
        super().__init__(f"{name}: step {step} is saved in {saved}")
        self.code, self.saved = code, saved


class Preemption(Callback):
    """SIGUSR1 (a scheduler's warning), SIGTERM or Ctrl-C: the run ends after the optimizer step, saved, on all ranks.

    The signal's handler sets a flag and nothing else. Once an optimizer step the ranks agree whether any of them has
    it (one small collective); then all save through the run's :class:`RunCheckpoint`, and :class:`Preempted` is raised
    on all ranks before the next step. In between a validation that is due at this very step is run to its end, so that
    the curve has no gap; it comes after the save, so losing it loses nothing else. A signal that comes during a
    validation waits for its end and for one step more. So a warning must come early enough for one validation, one
    optimizer step and one save. Before the first validation or step, when there is nothing to save, a signal ends the
    process at once and without a message: a process that waits for other ranks does not run Python. Later signals
    change nothing, except a second Ctrl-C, which ends the run at once. A signal in the run's last step changes nothing:
    the run is finished and saved anyway.

    Args:
        checkpoint: what saves the run.
        under_scheduler: whether SIGTERM means that the job is to be started again, as SIGUSR1 always does.
    """

    def __init__(self, checkpoint: RunCheckpoint, under_scheduler: bool = False) -> None:
        self.checkpoint, self.under_scheduler = checkpoint, under_scheduler
        self.received: signal.Signals | None = None
        self._heard = SIGNALS
        self._step, self._leaving_by, self._begun = 0, None, Event()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Around `trainer.fit`: the signals end the process until it has begun, and are heard then. After
        :class:`Preempted`, and any error in a job, they stay ignored, so that nothing disturbs the ranks that are still
        on their way out or say what happened; else what stood before comes back."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        if before[signal.SIGINT] == signal.SIG_IGN:  # a script's background process: Ctrl-C is not meant for it
            self._heard = (signal.SIGUSR1, signal.SIGTERM)
        for number in self._heard:  # the rendezvous waits in C++, where no handler of Python's is run
            signal.signal(number, signal.SIG_DFL)
        launcher = int(os.environ.setdefault(LAUNCHER, str(os.getpid())))
        Thread(target=self._end_with, args=(launcher,), daemon=True).start()
        try:
            yield
        except Exception as error:
            if isinstance(error, Preempted) or self.under_scheduler:  # srun ends the others of a rank that has failed
                before = dict.fromkeys(SIGNALS, signal.SIG_IGN)
            raise
        finally:
            self._begun.set()
            os.environ.pop(LAUNCHER, None)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end_with(self, launcher: int) -> None:
        """Ends a rank whose launcher was ended during the start: it would wait for it until the rendezvous gives up."""
        while os.getpid() != launcher and not self._begun.wait(1.0):
            if os.getppid() != launcher:
                os._exit(128 + signal.SIGTERM)

    def _listen(self) -> None:
        self._begun.set()
        for number in self._heard:
            signal.signal(number, self._receive)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning's handler of SIGTERM runs a collective inside it, wherever it comes, and so waits for ever.
        trainer._signal_connector.register_signal_handlers = lambda: None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":  # before training: the sanity check, or one that a kill had cut off
            self._listen()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()
        self._step = trainer.global_step
        # Lightning 2.6 asks rank 0 about SIGTERM before each micro-batch and waits for the device each time. Once an
        # optimizer step, as below, is enough.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None

    def _receive(self, number: int, frame: Any) -> None:
        if self.received == signal.SIGINT == number:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number)
            if rank_zero_only.rank == 0:  # print() must not be entered twice, os.write may
                again = " (Ctrl-C again: at once)" if number == signal.SIGINT else ""
                os.write(2, f"\n{self.received.name}: saving after this optimizer step{again}\n".encode())

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if step == self._step or step >= trainer.max_steps > 0:
            return
        self._step = step
        if trainer.strategy.reduce_boolean_decision(self.received is not None, all=False):
            self.checkpoint.save(trainer)
            mine = torch.tensor(int(self.received or 0), device=pl_module.device)
            # Raising here would leave out what Lightning logs at the step's end, and this step's validation.
            self._leaving_by = signal.Signals(int(trainer.strategy.reduce(mine, reduce_op="max")))

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if number := self._leaving_by:
            again = number == signal.SIGUSR1 or (self.under_scheduler and number == signal.SIGTERM)
            code = REQUEUE if again else 128 + number
            raise Preempted(number.name, trainer.global_step, self.checkpoint.last_model_path, code)
