"""How a run ends other than by its last step: one message, and an exit code."""

import errno
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import distributed

from callbacks.preemption import Preempted
from data.loader import DataError
from recipes.job import in_job
from vla_lm.checkpoint_files import complete_checkpoints

# What gloo and NCCL say on the ranks that are left.
_LOST = re.compile(r"Connection closed by peer|Connection reset by peer|Timed out waiting|Timeout\(ms\)|Broken pipe|"
                   r"NCCL (error|communicator was aborted)|remote process exited|Read error")


@contextmanager
def stopped_by(*errors: type[Exception], folder: Path, source: Path | None = None,
               trainer: Trainer | None = None) -> Iterator[None]:
    """Around a run: these errors say all there is to say, so the process ends with their message alone, exit code 3.

    A full disk, data that does not come and a rank that is gone end it so too, with the line to type next. A run that
    was asked to end and is saved: that line, and `Preempted.code`. A second Ctrl-C, which does not wait for that: that
    line, and exit code 130.

    Args:
        folder: the run's.
        source: the checkpoint that the run started from; None: from step 0.
        trainer: the run's; None: there are no other ranks to take leave of.
    """
    try:
        yield
    except Preempted as stop:
        if rank_zero_only.rank == 0:
            print(f"stopped by {stop}: {_next(folder, source)}", file=sys.stderr)
        if trainer is not None:
            leave(trainer)
        # One code a job: a launcher would take another rank's for a fault and end rank 0 with it.
        sys.exit(stop.code if rank_zero_only.rank == 0 else 0)
    except errors as error:
        print(f"stopped: {error}", file=sys.stderr)
        sys.exit(3)
    except (OSError, RuntimeError) as error:
        reason = _from_outside(error)
        if reason is None:
            raise
        print(f"stopped: {reason}. Complete checkpoints are whole: {_next(folder, source)}", file=sys.stderr)
        sys.exit(3)
    except (KeyboardInterrupt, SystemExit):  # Lightning ends the process itself at Ctrl-C, with a plain exit(1)
        print(f"stopped by a signal: {_next(folder, source)}", file=sys.stderr)
        sys.exit(130)


def leave(trainer: Trainer) -> None:
    """Ends the process group, all ranks together; threads of gloo's that are left abort a process's exit at times."""
    if distributed.is_available() and distributed.is_initialized():
        trainer.strategy.barrier()
        distributed.destroy_process_group()


def _next(folder: Path, source: Path | None) -> str:
    """What to type next: go on where something is whole, else the start again, with the configuration kept by then."""
    name, command = shlex.quote(str(folder)), "python -m recipes.pretrain"
    if in_job():
        return "the job's own log says how it goes on"
    if complete_checkpoints(folder / "checkpoints", kinds=("ckpt", "neutral")):
        return f"go on with {command} --resume {name}"
    if not (folder / "config.yaml").exists():
        return "nothing was saved; start again"
    begin = shlex.quote(str(source)) if source else "auto"
    return f"nothing was saved; start again with {command} --run_dir {name} --resume {begin}"


def _from_outside(error: OSError | RuntimeError) -> str | None:
    """What happened to the run, where it is not the run's own fault."""
    if isinstance(error, DataError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}, free some"
    if isinstance(error, RuntimeError) and _LOST.search(str(error)):
        return f"another rank has ended, or hangs; its own log says why ({str(error).splitlines()[0][:200]})"
    return None
