"""The loader of both data modules: resumes by itself, outlives the signals that end a run, and says what is wrong."""

import multiprocessing
import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

WORKER_TIMEOUT_S = 300  # longest wait for a batch of the workers; below the time-out of collectives
_GRACE_S = 120  # how long a worker goes on after SIGTERM


class DataError(RuntimeError):
    """The data does not come any more: a worker hangs or has died, or the files cannot be read."""


class ResumableLoader(DataLoader):
    """Batches as the data set's `__getitems__` gives them.

    It tells the trainer that it resumes: its position is the restored global step, nothing is to be saved.

    Args:
        rows: data set; batches: index lists of its batches.
        num_workers: processes that make them.
        pin_memory: make them in page-locked memory.
        timeout: seconds to wait for the workers' next batch.

    Raises:
        DataError: while iterating; the message says what to look at.
    """

    def __init__(
        self, rows: Dataset, batches: Sampler, num_workers: int, pin_memory: bool, timeout: float | None = None
    ) -> None:
        super().__init__(
            rows,
            batch_sampler=batches,
            num_workers=num_workers,
            collate_fn=_as_is,
            pin_memory=pin_memory,
            timeout=(WORKER_TIMEOUT_S if timeout is None else timeout) if num_workers else 0,
            worker_init_fn=_outlive_signals,
            generator=torch.Generator(),  # without its own, the loader draws from the global generator
        )

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from super().__iter__()
        except RuntimeError as error:
            if not str(error).startswith("DataLoader"):
                raise
            # A worker that hangs would keep this process from ending; torch would take its death for another error.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for worker in multiprocessing.active_children():
                worker.kill()
            if "timed out" in str(error):
                raise DataError(f"no batch came from {self.num_workers} loader workers within {self.timeout:g} s: "
                                "one of them hangs, mostly on the file system that holds the data") from error
            raise DataError(f"a loader worker has died ({str(error).splitlines()[0]}): mostly for want of memory; take "
                            "fewer data.num_workers, or more memory") from error
        except OSError as error:
            raise DataError(f"the data cannot be read any more ({str(error).splitlines()[-1]}): put the token store "
                            "back where it was") from error

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        del state_dict


def _as_is(batch: Any) -> Any:
    return batch


def _outlive_signals(worker: int) -> None:
    # A scheduler, and a terminal at Ctrl-C, signals every process of a run. The main one finishes its step and saves; a
    # worker that died meanwhile would end it at once.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE_S))
