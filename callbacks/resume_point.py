"""Where a run goes on: the checkpoint that is meant, and whether it belongs to the run's folder."""

from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info

from callbacks.run_folder import starts_of
from vla_lm.checkpoint_files import newest_complete
from vla_lm.checkpoints import complete_checkpoint


def resume_point(resume: str | None, run_dir: Path | None) -> tuple[Path | None, Path | None]:
    """The checkpoint to resume from and the folder of its run; (None, run_dir) where nothing is to be resumed.

    Args:
        resume: None; "auto" (the newest complete checkpoint in ``run_dir``, a fresh start where there is none);
            a checkpoint; or a run's folder (its newest complete checkpoint).
        run_dir: the run's folder, where one was named.

    Raises:
        ValueError: "auto" without a folder, or a checkpoint that is not whole.
        FileNotFoundError: the path does not exist, or holds no complete checkpoint.
    """
    if resume is None:
        return None, run_dir
    if resume == "auto":
        if run_dir is None:
            raise ValueError("--resume auto looks into the run's own folder, which was not named: "
                             "add --run_dir runs/NAME, or give the path: --resume runs/NAME")
        found = newest_complete(run_dir / "checkpoints", verify=True)
        rank_zero_info(f"--resume auto: {found} is the newest complete checkpoint in {run_dir}" if found else
                       f"--resume auto: no complete checkpoint in {run_dir}, starting at step 0")
        return found, run_dir
    path = Path(resume)
    if not path.exists():
        raise FileNotFoundError(f"--resume {resume}: no such file or folder; give a checkpoint, a run's folder or auto")
    found = complete_checkpoint(path, verify=True)
    return found, run_dir or (found.parent.parent if found.parent.name == "checkpoints" else None)


def origin_of(run_dir: Path) -> Path | None:
    """The checkpoint that a run began from."""
    starts = starts_of(run_dir)
    return Path(starts[0]["resumed_from"]) if starts and starts[0].get("resumed_from") else None


def of_run(checkpoint: Path, run_dir: Path) -> bool:
    """Whether a checkpoint is a run's own, an export of it, or what the run began from."""
    taken, origin, own = checkpoint / "config.yaml", origin_of(run_dir), run_dir / "checkpoints"  # a link, perhaps
    if checkpoint.resolve().is_relative_to(run_dir.resolve()) or checkpoint.parent.resolve() == own.resolve():
        return True
    if origin and origin.parts[-3:] == checkpoint.resolve().parts[-3:]:  # the project may have moved since
        return True
    return taken.is_file() and taken.read_bytes() in [config.read_bytes() for config in run_dir.glob("config*.yaml")]
