"""A language model of a few hundred parameters and its data, for the callbacks alone."""

from types import SimpleNamespace

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

VOCAB, ROW = 11, 6


class TinyModel(pl.LightningModule):
    """Embedding, two linear layers, norm, head. ``poison``: (step, "loss" | "gradient") made NaN in that step."""

    def __init__(self, poison: tuple[int, str] | None = None, stateless: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCAB)
        self.poison, self.stateless = poison, stateless

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + F.dropout(torch.tanh(layer(x)), 0.1, self.training)
        return self.head(self.norm(x))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch["tokens"]).flatten(0, 1), batch["targets"].flatten(), reduction="sum")
        loss = loss * self.trainer.world_size * self.trainer.accumulate_grad_batches / batch["target_count"]
        if self.poison == (self.trainer.global_step, "loss"):
            loss = loss * float("nan")
        if self.poison == (self.trainer.global_step, "gradient"):
            self.layers[0].weight.register_hook(lambda grad: grad * float("nan"))
        self.log("train/loss", loss, batch_size=len(batch["tokens"]))
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.val_losses.append(F.cross_entropy(self(batch["tokens"]).flatten(0, 1), batch["targets"].flatten()))

    def on_validation_epoch_start(self):
        self.val_losses = []

    def on_validation_epoch_end(self):
        self.log("val/loss", torch.stack(self.val_losses).mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def flops_per_token(self, row_tokens):
        return 1000.0 * row_tokens

    @torch.no_grad()
    def probe(self, batch):
        if self.stateless:
            return {}
        was, _ = self.training, self.eval()
        x = self(batch["tokens"])
        self.train(was)
        rows, length = batch["tokens"].shape
        if "cu_seqlens" in batch:
            rows, length, x = 1, rows * length, x.reshape(1, -1, VOCAB)
        ends = torch.arange(1, length, 2, device=x.device)
        norms = x[:, ends, :2].abs() + ends[:, None]  # [B, NC, H], grows along the row
        per_token = x[:, :, :2].abs()
        return {
            f"layers.{i}": SimpleNamespace(chunk_ends=ends, state_norm=norms * (i + 1), jacobian_norm=per_token,
                                           penalty_norm=norms * 2 if i == 0 else None)  # fmt: skip
            for i in range(2)
        }


class Rows(Dataset):
    def __init__(self, rows: int, length: int, step_rows: int) -> None:
        self.rows, self.step_rows = rows, step_rows
        generator = torch.Generator().manual_seed(rows + length)
        self.tokens = torch.randint(VOCAB, (rows, length), generator=generator)
        self.targets = torch.where(torch.rand(rows, length, generator=generator) < 0.6, self.tokens.roll(1, 1), -100)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index):
        step = index // self.step_rows * self.step_rows
        count = (self.targets[step : step + self.step_rows] >= 0).sum()
        return {"tokens": self.tokens[index], "targets": self.targets[index], "target_count": count}


def collate(rows):
    batch = {name: torch.stack([row[name] for row in rows]) for name in ("tokens", "targets")}
    return batch | {"target_count": rows[0]["target_count"]}


class TinyData(pl.LightningDataModule):
    """``micro`` rows a micro-batch, ``step_rows`` rows an optimizer step; loaders draw from the global generator."""

    def __init__(self, steps: int = 20, step_rows: int = 4, micro: int = 4) -> None:
        super().__init__()
        self.steps, self.step_rows, self.micro = steps, step_rows, micro

    def train_dataloader(self):
        return DataLoader(Rows(self.steps * self.step_rows, ROW, self.step_rows), self.micro, collate_fn=collate)

    def val_dataloader(self):
        return [DataLoader(Rows(4, length, 4), 4, collate_fn=collate) for length in (ROW, 2 * ROW)]


def trainer(folder, steps: int = 6, callbacks=(), logger=False, **kwargs) -> pl.Trainer:
    settings = dict(default_root_dir=folder, max_steps=steps, accelerator="cpu", devices=1, log_every_n_steps=1,
                    num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False,
                    enable_checkpointing=any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks))  # fmt: skip
    return pl.Trainer(callbacks=list(callbacks), logger=logger, **(settings | kwargs))
