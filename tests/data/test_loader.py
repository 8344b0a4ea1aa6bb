"""A loader whose workers hang, die or lose their files says so, and one that is signalled goes on."""

import os
import signal
import time

import pytest
from torch.utils.data import Dataset

from data.loader import DataError, ResumableLoader


class Rows(Dataset):
    """Row 2 runs `deed`; a row is its index."""

    def __init__(self, deed) -> None:
        self.deed = deed

    def __getitems__(self, indices):
        if 2 in indices:
            self.deed()
        return indices


def read(deed, workers=1, timeout=None):
    return list(ResumableLoader(Rows(deed), [[0, 1], [2, 3], [4, 5]], workers, False, timeout))


def vanished():
    open("/nowhere/tokens.bin")


@pytest.mark.parametrize(("deed", "message"), [
    (lambda: time.sleep(1000), "no batch came from 1 loader workers within 1 s"),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), "a loader worker has died"),
    (vanished, r"cannot be read any more \(.*/nowhere/tokens.bin.*put the token store back"),
], ids=["hangs", "dies", "vanishes"])  # fmt: skip
def test_what_is_wrong_is_said_at_once(deed, message):
    begun = time.monotonic()
    with pytest.raises(DataError, match=message):
        read(deed, timeout=1)
    assert time.monotonic() - begun < 8


def test_files_that_vanish_without_workers():
    with pytest.raises(DataError, match="put the token store back"):
        read(vanished, workers=0)


def test_other_errors_are_left_alone():
    def fault():
        raise RuntimeError("a fault of the program")

    with pytest.raises(RuntimeError, match="a fault of the program") as caught:
        read(fault, workers=0)
    assert not isinstance(caught.value, DataError)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_workers_outlive_the_signals_that_end_a_run(number):
    assert read(lambda: os.kill(os.getpid(), number)) == [[0, 1], [2, 3], [4, 5]]
