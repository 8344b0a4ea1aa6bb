"""How a run ends other than by its last step: one message, and an exit code."""

import errno
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from callbacks.preemption import Preempted
from data.loader import DataError

# What gloo and NCCL say on the ranks that are left.
_LOST = re.compile(r"Connection closed by peer|Connection reset by peer|Timed out waiting|Timeout\(ms\)|Broken pipe|"
                   r"NCCL (error|communicator was aborted)|remote process exited|Read error")


@contextmanager
def stopped_by(*errors: type[Exception], hint: str = "") -> Iterator[None]:
    """Around a run: these errors say all there is to say, so the process ends with their message alone, exit code 3.

    A full disk, data that does not come and a rank that is gone end it so too, with the hint. A run that was asked to
    end and is saved: the hint, and `Preempted.code`. A signal that could not wait for that: the hint, and exit code 130
    for Ctrl-C, 143 for SIGTERM.
    """
    try:
        yield
    except Preempted as stop:
        if rank_zero_only.rank == 0:
            print(f"stopped by {stop}: {hint}", file=sys.stderr)
        # One code a job: a launcher would take another rank's for a fault and end rank 0 with it.
        sys.exit(stop.code if rank_zero_only.rank == 0 else 0)
    except errors as error:
        print(f"stopped: {error}", file=sys.stderr)
        sys.exit(3)
    except (OSError, RuntimeError) as error:
        reason = _from_outside(error)
        if reason is None:
            raise
        print(f"stopped: {reason}. Complete checkpoints are whole: {hint}", file=sys.stderr)
        sys.exit(3)
    except (KeyboardInterrupt, SystemExit) as stop:  # Lightning ends the process itself at Ctrl-C, with a plain exit(1)
        print(f"stopped by a signal: {hint}", file=sys.stderr)
        sys.exit(143 if isinstance(stop, SIGTERMException) else 130)


def _from_outside(error: OSError | RuntimeError) -> str | None:
    """What happened to the run, where it is not the run's own fault."""
    if isinstance(error, DataError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}, free some"
    if isinstance(error, RuntimeError) and _LOST.search(str(error)):
        return f"another rank has ended, or hangs; its own log says why ({str(error).splitlines()[0][:200]})"
    return None
