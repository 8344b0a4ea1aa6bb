"""Processes that a recipe starts: they end with it, and with one another."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
GRACE = 60.0  # seconds from the first that fails until the others are killed


def to_the_end(command: list[str], output: IO[str] | None = None,
               environments: Sequence[Mapping[str, str]] = ({},)) -> int:
    """Exit code of a command's processes: 0, or that of the first that failed, 128 + n where signal n ended it.

    A signal reaches all of them, as often as it is sent, and ends this process too, once they have ended: SystemExit
    with their code, or 128 + n where that is 0.
    Where one fails the others are asked to end (SIGTERM), later killed. They do not outlive this process.

    Args:
        output: where all that they print goes; None: where this process prints, but only the first to stdout.
        environments: variables of each process, beside those that are there.
    """
    asked: list[int] = []
    running: list[subprocess.Popen] = []

    def forward(number: int, _: object) -> None:
        asked.append(number)
        for process in running:
            if process.returncode is None:
                process.send_signal(number)

    heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup's stays ignored
    before = {number: signal.signal(number, forward) for number in heard}
    try:
        for place, more in enumerate(environments):
            out: Any = output or (None if place == 0 else subprocess.DEVNULL)
            running.append(subprocess.Popen(  # in a session of its own: Ctrl-C reaches it once
                command, stdout=out, stderr=subprocess.STDOUT if output else None, env=os.environ | more,
                start_new_session=True, preexec_fn=_end_with_parent))
            if asked:
                running[-1].send_signal(asked[0])
        code = _wait(running)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked:
        sys.exit(code or 128 + asked[0])
    return code


def _wait(running: list[subprocess.Popen]) -> int:
    failed, end = 0, 0.0
    while any([process.poll() is None for process in running]):
        codes = [process.returncode for process in running if process.returncode]
        if codes and not failed:
            failed, end = codes[0], time.monotonic() + GRACE
            for process in running:
                if process.poll() is None:
                    process.terminate()
        if failed and time.monotonic() > end:
            for process in running:
                if process.poll() is None:
                    process.kill()
        time.sleep(0.05)
    failed = failed or next((process.returncode for process in running if process.returncode), 0)
    return failed if failed >= 0 else 128 - failed


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: also when this process is killed
