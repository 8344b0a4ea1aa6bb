"""How a run ends other than by its last step: one message, and an exit code."""

import errno
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from callbacks.preemption import Preempted

# What gloo and NCCL say on the ranks that are left.
_LOST = re.compile(r"Connection closed by peer|Connection reset by peer|Timed out waiting|Timeout\(ms\)|Broken pipe|"
                   r"NCCL (error|communicator was aborted)|remote process exited|Read error")


@contextmanager
def stopped_by(*errors: type[Exception], hint: str = "") -> Iterator[None]:
    """Around a run: these errors say all there is to say, so the process ends with their message alone, exit code 3.

    A full disk and a rank that is gone end it so too, with the hint. A run that was asked to end and is saved: the hint,
    and `Preempted.code`. A signal that could not wait for that: the hint, and exit code 130 for Ctrl-C, 143 for SIGTERM.
    """
    try:
        yield
    except Preempted as stop:
        if rank_zero_only.rank == 0:
            print(f"stopped by {stop}: {hint}", file=sys.stderr)
        sys.exit(stop.code if rank_zero_only.rank == 0 else 0)  # one code a job: launchers take the first bad one for a fault
    except errors as error:
        print(f"stopped: {error}", file=sys.stderr)
        sys.exit(3)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"stopped: {error.strerror}. Complete checkpoints are whole: free space, then {hint}", file=sys.stderr)
        sys.exit(3)
    except RuntimeError as error:
        if not _LOST.search(str(error)):
            raise
        print(f"stopped: another rank has ended, or hangs; its own log says why. What came here: "
              f"{str(error).splitlines()[0][:200]}. Complete checkpoints are whole: {hint}", file=sys.stderr)
        sys.exit(3)
    except (KeyboardInterrupt, SystemExit) as stop:  # Lightning ends the process itself at Ctrl-C, with a plain exit(1)
        print(f"stopped by a signal: {hint}", file=sys.stderr)
        sys.exit(143 if isinstance(stop, SIGTERMException) else 130)
