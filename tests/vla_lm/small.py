"""Small models, batches and trainers for the tests of this folder."""

import torch
from lightning.pytorch import LightningDataModule, Trainer, seed_everything

from vla_lm.config import ModelConfig, OptimizerConfig
from vla_lm.module import LanguageModel

VOCABULARY = 13


def language_model(optimizer=None, seed=0, **fields) -> LanguageModel:
    seed_everything(seed, verbose=False)
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "n_heads": 2, "n_layers": 2, "max_positions": 32, "chunk_size": 8}
    optimizer = OptimizerConfig(**{"warmup_steps": 0, "learning_rate": 1e-2} | (optimizer or {}))
    model = LanguageModel(ModelConfig(**sizes | fields), optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and not parameter.any():  # a branch that starts from 0 would hide its own errors
                parameter.normal_(std=0.02)
    return model


def trainer(tmp_path, max_steps=4, accumulation=1, **options) -> Trainer:
    defaults = dict(
        max_steps=max_steps, accumulate_grad_batches=accumulation, accelerator="cpu", devices=1, logger=False,
        default_root_dir=tmp_path, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        use_distributed_sampler=False, log_every_n_steps=1, num_sanity_val_steps=0,
    )  # fmt: skip
    return Trainer(**defaults | options)


def batches(count, rows=2, length=12, seed=0, valid=0.7):
    """Random batches in which each target is valid with the given probability, target_count each batch's own."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        tokens = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
        targets = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
        targets[torch.rand(rows, length, generator=generator) > valid] = -100
        out.append({"tokens": tokens, "targets": targets, "target_count": (targets != -100).sum()})
    return out


def carried_batches(documents, rows, length, steps):
    """Each lane's long row of documents, cut into `steps` stretches: batches with carried, lanes and cu_seqlens.

    `documents`: one list of document lengths per lane, each summing to length * steps.
    """
    generator = torch.Generator().manual_seed(5)
    long = torch.randint(0, VOCABULARY, (rows, length * steps), generator=generator)
    out = []
    for step in range(steps):
        bounds, carried = [0], []
        for row, lengths in enumerate(documents):
            ends = torch.tensor(lengths).cumsum(0).tolist()
            carried.append(step > 0 and step * length not in ends)
            inside = [end - step * length for end in ends if step * length < end < (step + 1) * length]
            bounds += [row * length + end for end in [*inside, length]]
        tokens = long[:, step * length : (step + 1) * length]
        out.append({
            "tokens": tokens, "targets": tokens, "target_count": torch.tensor(rows * length),
            "cu_seqlens": torch.tensor(bounds), "carried": torch.tensor(carried), "lanes": torch.arange(rows),
        })  # fmt: skip
    return long, out


class Data(LightningDataModule):
    """Fixed batches; restarts at the step that a checkpoint restored, as the real data modules do."""

    def __init__(self, train, validation=(), names=None, carry_state=False):
        super().__init__()
        self.train, self.validation, self.carry_state = list(train), validation, carry_state
        if names:
            self.val_names = names

    def train_dataloader(self):
        return _Loader(self)

    def val_dataloader(self):
        return [torch.utils.data.DataLoader(list(part), batch_size=None) for part in self.validation]


class _Loader:
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data.train)

    def __iter__(self):
        trainer = self.data.trainer
        return iter(self.data.train[trainer.global_step * trainer.accumulate_grad_batches :])
