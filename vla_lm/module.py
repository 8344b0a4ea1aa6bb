"""The language model as a LightningModule: loss, logging, validation, optimizer, carried states."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from kernels import Diagnostics
from vla_lm.config import ModelConfig, OptimizerConfig
from vla_lm.flops import training_flops_per_token
from vla_lm.lanes import LaneStates
from vla_lm.memory_plan import MemoryPlan, Sharding, plan_memory
from vla_lm.metrics import PredictionMetrics, token_losses
from vla_lm.neutral import NeutralCheckpoint, portable
from vla_lm.optimization import build_optimizer, check_learning_rate, schedule
from vla_lm.transformer import Transformer


class LanguageModel(LightningModule):
    """Trains a `Transformer` on batches of tokens and targets (see `training_step` for their keys).

    The loss is the mean over the valid targets of the whole optimizer step, over all ranks and micro-batches, under any
    strategy that averages gradients over ranks and divides by the accumulation once.

    Args:
        config: the architecture. With vocab_size null the network is built in `configure_model`, from the data module,
            and under ZeRO-3 it is sharded as it is built.
        optimizer: AdamW and its schedule.
        compile: compile the blocks with torch.compile; parameter names do not change.
    """

    def __init__(
        self,
        config: ModelConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__()
        # Checkpoints hold plain types, so a mapping comes back when one is loaded.
        config = ModelConfig.from_dict(config) if isinstance(config, dict) else config or ModelConfig()
        if isinstance(optimizer, dict):
            optimizer = OptimizerConfig.from_dict(optimizer)
        self.optimizer_config, self.compile_network = optimizer or OptimizerConfig(), compile
        self.transformer: Transformer | None = None
        self.lanes = LaneStates()
        self._nats: Tensor | None = None
        self._metrics: dict[str, PredictionMetrics] = {}
        self._set_config(config)
        if config.vocab_size is not None:
            self._build()

    def forward(self, tokens: Tensor, cu_seqlens: Tensor | None = None, **options):
        """`Transformer.forward`."""
        return self.transformer(tokens, cu_seqlens, **options)

    # Set-up

    def setup(self, stage: str) -> None:
        data = self.trainer.datamodule
        self.check_data(data)
        if self.config.vocab_size is None:
            self._set_config(ModelConfig.from_dict(self.config.to_dict() | {"vocab_size": data.vocab_size}))

    def check_data(self, data: Any, made: bool = True) -> None:
        """ValueError where the model does not fit what a data module hands out: vocabulary, length, carried states.

        made: False where its token store may not be there yet: what is known without it.
        """
        if getattr(data, "carry_state", False):
            self._check_carry()
        asked = self.config.vocab_size
        known = getattr(data, "vocab_size" if made else "asked_vocab_size", None)
        if made and asked is None and known is None:
            raise ValueError("vocab_size is null and the data module does not tell it: set model.config.vocab_size")
        if asked is not None and known is not None and known > asked:
            raise ValueError(f"vocab_size {asked} is smaller than the data's {known}: leave it at null to take "
                             "the data's")
        longest = getattr(data, "longest_sequence", 0) if made and self.config.style == "paper" else 0
        if longest > self.config.max_positions:
            raise ValueError(
                f"max_positions {self.config.max_positions} is less than the data's longest sequence, {longest}: "
                f"set max_positions to {longest}, or use style: modern, which has no positions"
            )

    def configure_model(self) -> None:
        if self.transformer is None:
            self._build()

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = build_optimizer(self.transformer, self.optimizer_config)
        factor = schedule(self.optimizer_config, self.trainer.max_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        check_learning_rate(
            self.trainer.optimizers[0], self.optimizer_config, self.trainer.global_step, self.trainer.max_steps
        )

    # Training

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Loss of a micro-batch: sum of CE * world * accumulation / target_count.

        So the mean over ranks, divided by the accumulation, is the sum over the optimizer step / its valid targets.
        Keys: tokens, targets int64 [B, T]; target_count int64 []: valid targets of the whole optimizer step; packed
        documents: cu_seqlens int64 [N + 1]; carried states: carried bool [B], lanes int64 [B].
        """
        logits = self._forward_carried(batch) if "carried" in batch else self._logits(batch)
        nats, accumulation = token_losses(logits, batch["targets"]).sum(), self.trainer.accumulate_grad_batches
        # Counted here, as under DeepSpeed Lightning's step hooks come with every micro-batch.
        first, last = batch_idx % accumulation == 0, (batch_idx + 1) % accumulation == 0
        self._nats = nats.detach() if first or self._nats is None else self._nats + nats.detach()
        count = batch["target_count"].clamp(min=1)
        if last:
            total = self.trainer.strategy.reduce(self._nats.clone(), reduce_op="sum")
            self.log("train/loss", total / count, prog_bar=True, batch_size=1)
            self.log("train/lr", self.trainer.optimizers[0].param_groups[0]["lr"], batch_size=1)
            self.lanes.end_step()
        return nats * (self.trainer.world_size * accumulation) / count

    def _forward_carried(self, batch: dict[str, Tensor]) -> Tensor:
        # Row b's first document goes on from its lane's state where carried[b]; every other document begins.
        self._check_carry()
        # Indices on the host: the GPU is not waited for where the data module leaves lanes and cu_seqlens there.
        tokens, bounds, lanes = batch["tokens"], batch["cu_seqlens"].long().cpu(), batch["lanes"].tolist()
        carried = batch["carried"].to(tokens.device, non_blocking=True)
        rows, length = tokens.shape
        row_starts = torch.arange(rows) * length
        first, last = ((torch.searchsorted(bounds, places, right=True) - 1).to(tokens.device, non_blocking=True)
                       for places in (row_starts, row_starts + length - 1))
        states, known = self.lanes.get(lanes, tokens.device)
        if not all(known):  # the first step of a run alone: reading `carried` may synchronise
            missing = [lane for lane, has, wanted in zip(lanes, known, carried.tolist()) if wanted and not has]
            if missing:
                raise ValueError(
                    f"lanes {missing} continue a document whose state is unknown: resume a run that was trained with "
                    "carry_state from its own checkpoint, with the same global batch, or start a new run"
                )
        fresh = None
        if states is not None:
            row_of_document = (bounds[:-1] // length).clamp(max=rows - 1).to(tokens.device, non_blocking=True)
            states = [state.index_select(row_of_document) for state in states]
            fresh = torch.ones(bounds.numel() - 1, dtype=torch.bool, device=tokens.device)
            fresh = fresh.index_copy(0, first, ~carried)
        out = self.transformer(tokens, bounds, states=states, fresh=fresh, return_states=True)
        self.lanes.put(lanes, [state.index_select(last) for state in out.states])
        return out.logits

    # Validation

    def on_validation_epoch_start(self) -> None:
        loaders = self.trainer.val_dataloaders
        count = len(loaders) if isinstance(loaders, (list, tuple)) else 1
        names = list(getattr(self.trainer.datamodule, "val_names", None) or map(str, range(count)))
        if len(names) != count:
            raise ValueError(f"the data module names {len(names)} validation loaders ({names}) and gives {count}")
        self._metrics = {name: PredictionMetrics().to(self.device) for name in names}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        metrics = list(self._metrics.values())[dataloader_idx]
        metrics.update(self._logits(batch), batch["targets"], batch.get("target_bytes"))

    def on_validation_epoch_end(self) -> None:
        losses = []
        for name, metrics in self._metrics.items():
            values = metrics.compute()
            if "bits_per_byte" in values:
                values.pop("exact_match")  # of rows of text: never all right
            self.log_dict({f"val/{name}/{key}": value.float() for key, value in values.items()}, batch_size=1)
            losses += [values["loss"].float()] if values else []
        if losses:
            self.log("val/loss", torch.stack(losses).mean(), prog_bar=True, batch_size=1)

    # For callbacks

    @torch.no_grad()
    def probe(self, batch: dict[str, Tensor]) -> dict[str, Diagnostics]:
        """The operator's diagnostics per layer on a batch, in evaluation mode, training mode restored after.

        Empty for softmax attention.
        """
        training = self.training
        self.eval()
        try:
            tokens = batch["tokens"].to(self.device)
            return self.transformer(tokens, batch.get("cu_seqlens"), diagnostics=True).diagnostics
        finally:
            self.train(training)

    @torch.no_grad()
    def state_dtypes(self) -> dict[str, torch.dtype]:
        """Of what a layer carries on (S, A, ...), read from the states after two tokens. All ranks must call it."""
        training = self.training
        self.eval()
        try:
            tokens = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
            state = self.transformer(tokens, return_states=True).states[0]
            return {name: tensor.dtype for name, tensor in state.tensors().items() if tensor.is_floating_point()}
        finally:
            self.train(training)

    def memory_plan(self) -> MemoryPlan:
        """What a rank of the attached trainer needs, worked out before it is allocated, see `vla_lm.memory_plan`.

        Raises:
            ValueError: another precision than 32-true, bf16-mixed and bf16-true.
        """
        trainer, data, config = self.trainer, self.trainer.datamodule, self.config
        if config.vocab_size is None:
            config = replace(config, vocab_size=data.vocab_size)
        batch = data.batch_plan(trainer.world_size)
        return plan_memory(
            config, Sharding.of(trainer.strategy, trainer.precision, trainer.world_size), batch.micro_rows,
            data.row_tokens, batch.accumulation, getattr(data, "carry_state", False), trainer.strategy.root_device.type,
        )

    def flops_per_token(self, row_tokens: int) -> float:
        """Analytic FLOPs of forward and backward per token, see `vla_lm.flops`."""
        return training_flops_per_token(self.transformer, row_tokens)

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "state_dict" in checkpoint:
            checkpoint["state_dict"] = portable(checkpoint["state_dict"])
        if not hasattr(self.trainer.strategy, "layout"):  # under ZeRO each rank writes its own
            checkpoint["lanes"] = self.lanes.state_dict()
        checkpoint["accumulation"] = self.trainer.accumulate_grad_batches
        checkpoint["max_steps"] = self.trainer.max_steps
        checkpoint["layout"] = getattr(self.trainer.strategy, "layout", {"form": "file"})

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "neutral" in checkpoint and not hasattr(self.trainer.strategy, "layout"):  # ZeRO has its pieces already
            neutral = NeutralCheckpoint(Path(checkpoint["neutral"]))
            checkpoint["state_dict"] = {name: neutral.tensor("weights", name) for name in neutral.names("weights")}
            checkpoint["optimizer_states"] = [neutral.optimizer_state(self, self.trainer.max_steps)]
        if "state_dict" in checkpoint:
            checkpoint["state_dict"] = portable(checkpoint["state_dict"])
        lanes = checkpoint.get("lanes", {})
        self.lanes.load_state_dict(*(lanes if isinstance(lanes, list) else [lanes]))
        attached = self._trainer is not None
        if attached and "loops" in checkpoint and "accumulation" in checkpoint:
            recount(checkpoint, self.trainer.accumulate_grad_batches)

    # Private

    def _logits(self, batch: dict[str, Tensor]) -> Tensor:
        return self.transformer(batch["tokens"], batch.get("cu_seqlens")).logits

    def _check_carry(self) -> None:
        if self.config.mixer == "softmax":
            raise ValueError(
                "mixer 'softmax' has no state of fixed size to carry between rows: set data.carry_state: false, "
                "or choose a mixer with a memory, such as vla"
            )

    def _set_config(self, config: ModelConfig) -> None:
        self.config = config.resolved()
        self.save_hyperparameters({
            "config": self.config.to_dict(),
            "optimizer": self.optimizer_config.to_dict(),
            "compile": self.compile_network,
        })

    def _build(self) -> None:
        strategy = None if self._trainer is None else self._trainer.strategy
        with torch.device("cpu"):  # Lightning would build, and draw the weights, on the GPU: others from the same seed
            self.transformer = Transformer(self.config, getattr(strategy, "pieces", None))
        if self.compile_network:
            self.transformer.compile_blocks()


def recount(checkpoint: dict[str, Any], accumulation: int) -> None:
    """Make the checkpoint's loop counters those of a step's end amid training, at `accumulation` micro-batches a step.

    Lightning counts micro-batches, and would place the steps' ends wrongly when resumed with another accumulation
    (another number of ranks). And what was saved after the last step has an epoch's end in its counters, with which a
    longer run would log its steps one too late.
    """
    loops, step, before = checkpoint["loops"]["fit_loop"], checkpoint["global_step"], checkpoint["accumulation"]
    progress, now = loops["epoch_loop.batch_progress"], step * accumulation
    if started_on := progress["total"]["ready"] % before:
        raise ValueError(
            f"the checkpoint was saved after {started_on} of {before} micro-batches of an optimizer step: "
            f"resume it with accumulation {before}, not {accumulation}"
        )
    for counts in (progress["total"], progress["current"]):
        counts |= {"ready": now, "started": now, "processed": now, "completed": now - 1}
    progress["is_last_batch"] = False
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = step - 1
    for counts in loops["epoch_progress"].values():
        counts |= {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    checkpoint["accumulation"] = accumulation
