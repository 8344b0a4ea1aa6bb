"""What libraries say that a person who trains can do nothing about, left out; warnings in one line."""

import logging
import re
import warnings
from pathlib import Path
from typing import Any

_NOTICES = ("litlogger", "`weights_only` was not set", "isinstance(treespec, LeafSpec)", "does not have many workers",
            "torch.jit.script", "TPU available", "It is recommended to use `self.log(",
            "smaller than the logging interval", "The `srun` command is available", "Seed set to", "GPU available: ",
            "`Trainer.fit` stopped",
            "Setting accelerator to CPU",  # DeepSpeed's: preflight plans for other machines, pretrain refuses
            "To properly utilize them",  # float32 matmuls: the precision is the configuration's
            "The AccumulateGrad node's stream does not match",  # Lightning builds DDP on a stream of its own
            "A module has unknown inputs or outputs type")  # ZeRO-3, of the Transformer: it has no own parameters
_PROJECT, _library_format = Path(__file__).parents[1], warnings.formatwarning


def quiet_notices() -> None:
    """Leave the libraries' notices about themselves out of the output; the project's warnings are a line each."""
    def wanted(record: logging.LogRecord) -> bool:
        return not any(notice in record.getMessage() for notice in _NOTICES)

    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.trainer.connectors.checkpoint_connector",
                 "lightning.fabric.utilities.rank_zero", "lightning.fabric.utilities.seed", "DeepSpeed"):
        logging.getLogger(name).addFilter(wanted)
    for notice in _NOTICES:
        warnings.filterwarnings("ignore", message=f"(?s).*{re.escape(notice)}")
    warnings.formatwarning = _format


def _format(message: Warning | str, category: type[Warning], filename: str, *more: Any) -> str:
    own = Path(filename).is_relative_to(_PROJECT) and "site-packages" not in filename
    return f"warning: {message}\n" if own else _library_format(message, category, filename, *more)
