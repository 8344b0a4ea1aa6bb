"""One process trains in a run's folder at a time."""

import fcntl
from pathlib import Path
from typing import IO


def claimed(run_dir: Path) -> IO:
    """Makes the folder and takes it for this process: its lock file, held until it is closed or the process ends.

    Raises:
        OSError: the folder cannot be made or written to, or another process trains in it.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = open(run_dir / ".lock", "w")
    except OSError as error:
        raise OSError(f"cannot write into the run's folder {run_dir} ({error.strerror}): name another one, "
                      "--run_dir runs/NAME") from None
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of the process: not handed on to loader workers
    except BlockingIOError:
        lock.close()
        raise OSError(f"another process is training in {run_dir}: wait for it, or name another folder, "
                      "--run_dir runs/NAME") from None
    return lock
