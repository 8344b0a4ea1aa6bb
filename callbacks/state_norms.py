"""What the memory does over a sequence: norms of state and penalty matrix, and of the step's Jacobian."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from matplotlib.figure import Figure
from torch import Tensor

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # told apart by everyone


class StateNorms(Callback):
    """Every ``every_n_steps`` optimizer steps, on one batch that stays the same through the run, logs per layer

    ``state_norm/layers.0`` (‖S_T‖_F at the last chunk end), ``penalty_norm/layers.0`` (‖A_T‖_F, for rules with A),
    ``jacobian_norm/layers.0/mean`` and ``…/max`` (true ‖J_t‖₂ over all tokens; above 1 is normal, see
    kernels/README.md), each a mean over rows and heads (the maximum excepted); and, for TensorBoard, the figure
    ``state_norm/curve`` of ‖S_t‖_F over t. In packed batches norms and curve are those of the longest document.

    The batch is the first ``rows`` rows of the data module's validation loader with the longest rows. All ranks
    compute (ZeRO-3 needs them), rank 0 logs. Training is untouched: the same bits with and without this callback.

    Args:
        every_n_steps: Optimizer steps from one measurement to the next.
        rows: Rows of the batch.

    Reads ``pl_module.probe(batch) -> {layer: Diagnostics}`` (``kernels.Diagnostics``, per chunk end and per token);
    where a model has none to give, as softmax attention, it says so once and stays silent.
    """

    def __init__(self, every_n_steps: int = 100, rows: int = 8) -> None:
        if every_n_steps < 1 or rows < 1:
            raise ValueError(f"every_n_steps {every_n_steps} and rows {rows} must be at least 1.")
        self.every_n_steps, self.rows = every_n_steps, rows
        self._batch: dict[str, Tensor] | None = None
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        self._active = hasattr(pl_module, "probe") and trainer.datamodule is not None
        if not self._active:
            rank_zero_info("StateNorms is inactive: it needs a model with probe(batch) and a data module.")
        elif self._batch is None:
            with isolate_rng():  # a loader draws its workers' seed from the global generator
                loaders = trainer.datamodule.val_dataloader()
                firsts = [next(iter(loader)) for loader in (loaders if isinstance(loaders, list) else [loaders])]
            self._active = bool(firsts)
            if firsts:
                self._batch = first_rows(max(firsts, key=lambda batch: batch["tokens"].shape[1]), self.rows)
            else:
                rank_zero_info("StateNorms is inactive: there is no validation data to measure on.")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        stepped, self._step = trainer.global_step > self._step, trainer.global_step
        if not (self._active and stepped and self._step % self.every_n_steps == 0):
            return
        with torch.no_grad(), trainer.precision_plugin.val_step_context():
            layers = pl_module.probe(trainer.strategy.batch_to_device(self._batch))
        if not layers:
            self._active = False
            rank_zero_info("StateNorms is inactive: this model's layers keep no state to measure.")
        elif trainer.is_global_zero:
            self._log(trainer, layers)

    def _log(self, trainer: Trainer, layers: dict[str, Any]) -> None:
        at, length, tokens = self._stretch()
        metrics, curves = {}, {}
        for layer, found in layers.items():
            places, where = at(found.chunk_ends.cpu())
            # [B, NC, H] -> [points of the curve], mean over rows and heads
            curves[layer] = (places, found.state_norm.float().mean((0, 2)).cpu()[where])
            metrics[f"state_norm/{layer}"] = curves[layer][1][-1].item()
            if found.penalty_norm is not None:
                metrics[f"penalty_norm/{layer}"] = found.penalty_norm.float().mean((0, 2)).cpu()[where][-1].item()
            metrics[f"jacobian_norm/{layer}/mean"] = found.jacobian_norm.float().mean().item()
            metrics[f"jacobian_norm/{layer}/max"] = found.jacobian_norm.float().max().item()
        figure = state_figure(curves, f"memory after step {trainer.global_step} ({tokens})", length)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step - 1)  # as Lightning counts: the first step is 0
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure("state_norm/curve", figure, trainer.global_step - 1)

    def _stretch(self) -> tuple[Callable[[Tensor], tuple[Tensor, Tensor]], int, str]:
        """Which chunk ends the curve shows: maps them [NC] to (positions t, from 1, and which of them)."""
        bounds = self._batch.get("cu_seqlens")
        if bounds is None:
            rows, length = self._batch["tokens"].shape
            return (lambda ends: (ends + 1, torch.arange(len(ends)))), length, f"mean of {rows} rows"
        # By targets: the filler at the end of a data set is long at times, and has none.
        targets = torch.cat([bounds.new_zeros(1), (self._batch["targets"] >= 0).flatten().cumsum(0)])
        longest = int(targets[bounds].diff().argmax())
        start, stop = int(bounds[longest]), int(bounds[longest + 1])

        def inside(ends: Tensor) -> tuple[Tensor, Tensor]:
            where = ((ends >= start) & (ends < stop)).nonzero().flatten()
            return ends[where] + 1 - start, where

        return inside, stop - start, f"one document of {stop - start:,} tokens"


def first_rows(batch: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """The first rows of a batch: ``tokens`` [B, T], ``targets`` [B, T] and, where packed, ``cu_seqlens`` [N+1]."""
    tokens = batch["tokens"][:rows]
    cut = {"tokens": tokens, "targets": batch["targets"][:rows]}
    if "cu_seqlens" in batch:
        cut["cu_seqlens"] = batch["cu_seqlens"][batch["cu_seqlens"] <= tokens.numel()]
    return cut


def state_figure(curves: dict[str, tuple[Tensor, Tensor]], title: str, length: int) -> Figure:
    """‖S_t‖_F over t, one line a layer: layer -> (positions [P], norms [P])."""
    figure = Figure(figsize=(4.2, 3.0), dpi=150, layout="constrained")  # fits TensorBoard's card, text readable there
    axes = figure.subplots()
    for index, (layer, (places, norms)) in enumerate(curves.items()):
        axes.plot(places, norms, label=layer, color=COLOURS[index % len(COLOURS)], linewidth=1.8,
                  linestyle=("-", "--", ":", "-.")[index // len(COLOURS) % 4],
                  marker="o" if len(places) <= 64 else None, markersize=3)  # fmt: skip
    axes.set(xlabel="token t", ylabel="state norm  ‖S_t‖_F", xlim=(0, length), ylim=(0, None))
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(ncols=1 + len(curves) // 9, fontsize="small", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
