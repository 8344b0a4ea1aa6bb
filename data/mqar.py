"""Multi-query associative recall: key-value pairs, then keys whose values are to be recalled.

Two formats. Token 0 is special in both, and the loss is on the query positions only, the value predicted at the query's
own position.

`paper`   k1 v1 … kn vn SEP q1 … qm (0 …)
          keys distinct; keys and values from the same ids 1 … vocab-1, values with replacement; queries drawn with
          replacement from the row's keys; SEP is 0, and 0 fills what is left at the end of the row.
`public`  k1 v1 … kn vn, then slots of two tokens
          the public MQAR benchmark (Arora et al. 2023, arXiv:2312.04927): keys distinct from 1 … vocab/2-1, values
          distinct from vocab/2 … vocab-1; each key is asked once, at the first token of a slot; slot i (from 1) is
          drawn without replacement with weight i^(power-1); every other token is filler, 0 or a random id.

Samples come from a counter-based generator (Philox): sample `i` of (seed, split) starts at a fixed counter, so it is
the same whatever the batch size, worker or rank, and a contiguous range of samples is one vectorised call.

A row belongs to the test split when (index of k1 + index of v1) is a multiple of 8, and to the training split when it
is not (indices count from 0 in the key and value alphabets): the two splits share no row, by construction.
"""

from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from data.sampler import BatchPlan, SampledDataModule

IGNORE = -100
_HELD_OUT = 8  # one first pair in eight is kept for the test split
_SPLITS = {"train": 0, "test": 1}


@dataclass(frozen=True)
class MQARTask:
    """One distribution of MQAR rows; ValueError where a setting does not fit.

    n_pairs: numbers of pairs a row may have, one chosen uniformly per row.
    length: tokens per row T; None: 3n+1 (`paper`) or 8n (`public`) for the largest n.
    n_queries (`paper`): queries per row; None: n where `length` is None, else the rest of the row.
    """

    format: str
    vocab_size: int
    n_pairs: tuple[int, ...]
    length: int | None = None
    n_queries: int | None = None
    power: float = 0.01
    filler: str = "blank"

    def __post_init__(self) -> None:
        if self.format not in ("paper", "public"):
            raise ValueError(f"unknown MQAR format {self.format!r}: use 'paper' or 'public'")
        if self.filler not in ("blank", "random"):
            raise ValueError(f"unknown filler {self.filler!r}: use 'blank' or 'random'")
        if not self.n_pairs or min(self.n_pairs) < 1:
            raise ValueError(f"n_pairs must name at least one number of pairs >= 1, got {list(self.n_pairs)}")
        if self.n_queries is not None and self.n_queries < 1:
            raise ValueError(f"n_queries must be at least 1, or null, got {self.n_queries}")
        if not 0 < self.power < float("inf"):
            raise ValueError(f"power must be positive (0.01 is the benchmark's, 1 uniform), got {self.power}")
        if self.n_values < _HELD_OUT:
            least = 9 if self.format == "paper" else 16
            raise ValueError(
                f"vocab_size {self.vocab_size} is too small for the {self.format} format: at least {least} ids are "
                "needed"
            )
        largest = max(self.n_pairs)
        if largest > self.n_keys:
            raise ValueError(
                f"n_pairs {largest} does not fit vocab_size {self.vocab_size}: the {self.format} format has "
                f"{self.n_keys} keys there; "
                f"use at most {self.n_keys} pairs, or vocab_size >= "
                f"{largest + 1 if self.format == 'paper' else 2 * largest + 2}"
            )
        if self.format == "public":
            if self.n_queries is not None:
                raise ValueError(
                    f"n_queries {self.n_queries} has no meaning in the public format, which asks each key once: "
                    "leave it null"
                )
            if self.row_tokens < 4 * largest:
                raise ValueError(
                    f"n_pairs {largest} does not fit length {self.row_tokens}: the public format needs at least 4 x "
                    f"n_pairs = {4 * largest} tokens"
                )
        elif self.row_tokens < 2 * largest + 1 + (self.n_queries or 1):
            raise ValueError(
                f"n_pairs {largest} does not fit length {self.row_tokens}: 2 x n_pairs + separator + "
                f"{self.n_queries or 1} queries "
                f"= {2 * largest + 1 + (self.n_queries or 1)} tokens; use a longer row or fewer pairs"
            )

    @property
    def n_keys(self) -> int:
        return self.vocab_size - 1 if self.format == "paper" else self.vocab_size // 2 - 1

    @property
    def n_values(self) -> int:
        return self.vocab_size - 1 if self.format == "paper" else self.vocab_size - self.vocab_size // 2

    @property
    def first_value(self) -> int:
        return 1 if self.format == "paper" else self.vocab_size // 2

    @property
    def row_tokens(self) -> int:
        if self.length is not None:
            return self.length
        largest = max(self.n_pairs)
        if self.format == "public":
            return 8 * largest
        return 2 * largest + 1 + (self.n_queries or largest)

    def queries(self, pairs: int) -> int:
        """Queries, hence targets, of a row with this many pairs."""
        if self.format == "public":
            return pairs
        if self.n_queries is not None:
            return self.n_queries
        return pairs if self.length is None else self.row_tokens - 2 * pairs - 1

    @property
    def _words(self) -> int:
        # Random words of one sample, the same for every row, in whole Philox blocks of four.
        largest, smallest = max(self.n_pairs), min(self.n_pairs)
        if self.format == "paper":
            words = 2 * largest + max(self.queries(n) for n in self.n_pairs)
        else:
            rest = self.row_tokens - 2 * smallest
            words = 2 * largest + rest // 2 + (rest if self.filler == "random" else 0)
        return -(-words // 4) * 4

    def pairs_of(self, seed: int, split: str, first: int, count: int) -> np.ndarray:
        """Number of pairs of samples first … first+count-1, int64 [count]."""
        choices = np.asarray(self.n_pairs, dtype=np.int64)
        if len(choices) == 1:
            return np.full(count, choices[0])
        # One Philox block a sample, of which one word is used, so that any range can be entered directly.
        draws = _uniform(seed, 2 * _SPLITS[split] + 1, first, count, 4)[:, 0]
        return choices[(draws * len(choices)).astype(np.int64)]

    def target_count(self, seed: int, split: str, first: int, count: int) -> int:
        """Valid targets of a contiguous range of samples, without making the rows."""
        pairs, counts = np.unique(self.pairs_of(seed, split, first, count), return_counts=True)
        return int(sum(self.queries(int(n)) * int(c) for n, c in zip(pairs, counts)))

    def rows(self, seed: int, split: str, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets of samples first … first+count-1, int64 [count, T] each; target -100: none."""
        pairs = self.pairs_of(seed, split, first, count)
        draws = _uniform(seed, 2 * _SPLITS[split], first, count, self._words)
        tokens = np.zeros((count, self.row_tokens), dtype=np.int64)
        targets = np.full((count, self.row_tokens), IGNORE, dtype=np.int64)
        for n in np.unique(pairs).tolist():
            here = np.flatnonzero(pairs == n)
            tokens[here], targets[here] = self._fill(draws[here], n, split)
        return tokens, targets

    def _fill(self, draws: np.ndarray, n: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        count, length = len(draws), self.row_tokens
        tokens = np.zeros((count, length), dtype=np.int64)
        targets = np.full((count, length), IGNORE, dtype=np.int64)
        row = np.arange(count)[:, None]
        largest = max(self.n_pairs)
        keys = _distinct(self.n_keys, draws[:, :n])
        value_draws = draws[:, largest : largest + n]
        first_value = _first_value(keys[:, 0], self.n_values, value_draws[:, 0], split)
        if self.format == "paper":
            values = (value_draws * self.n_values).astype(np.int64)
            values[:, 0] = first_value
        else:
            values = _distinct(self.n_values, value_draws, first_value)
        keys, values = keys + 1, values + self.first_value
        rest = draws[:, 2 * largest :]
        if self.format == "paper":
            m = self.queries(n)
            asked = (rest[:, :m] * n).astype(np.int64)
            where = np.broadcast_to(2 * n + 1 + np.arange(m), (count, m))
        else:
            slots = (length - 2 * n) // 2
            # The order of exponential clocks with rates p is a weighted draw without replacement.
            clocks = -np.log1p(-rest[:, :slots]) / np.arange(1, slots + 1) ** (self.power - 1.0)
            where = 2 * n + 2 * np.argsort(clocks, axis=1, kind="stable")[:, :n]
            asked = np.broadcast_to(np.arange(n), (count, n))
            if self.filler == "random":
                fill = rest[:, (length - 2 * min(self.n_pairs)) // 2 :][:, : length - 2 * n]
                tokens[:, 2 * n :] = (fill * self.vocab_size).astype(np.int64)
        tokens[:, 0 : 2 * n : 2], tokens[:, 1 : 2 * n : 2] = keys, values
        tokens[row, where], targets[row, where] = keys[row, asked], values[row, asked]
        return tokens, targets

    def split_of(self, tokens: np.ndarray) -> np.ndarray:
        """The split each row [N, T] belongs to, from its first pair: 1 test, 0 training."""
        return ((tokens[:, 0] - 1 + tokens[:, 1] - self.first_value) % _HELD_OUT == 0).astype(np.int64)


def _uniform(seed: int, stream: int, first: int, count: int, words: int) -> np.ndarray:
    # float64 [count, words] in [0, 1); numpy's Philox makes four words a counter value.
    start = first * (words // 4)
    bits = np.random.Philox(
        key=np.array([seed, stream], dtype=np.uint64), counter=np.array([start, 0, 0, 0], dtype=np.uint64)
    )
    return (bits.random_raw(count * words) >> np.uint64(11)).reshape(count, words) * 2.0**-53


def _distinct(alphabet: int, draws: np.ndarray, first: np.ndarray | None = None) -> np.ndarray:
    # The head of a Fisher-Yates shuffle of range(alphabet), one column at a time over all rows; `first` fixes column 0.
    count, n = draws.shape
    pool = np.tile(np.arange(alphabet), (count, 1))
    row = np.arange(count)
    for j in range(n):
        pick = first if j == 0 and first is not None else j + (draws[:, j] * (alphabet - j)).astype(np.int64)
        chosen = pool[row, pick]
        pool[row, pick] = pool[:, j]
        pool[:, j] = chosen
    return pool[:, :n]


def _first_value(first_key: np.ndarray, n_values: int, draws: np.ndarray, split: str) -> np.ndarray:
    # Uniform over the values that put the row in its split: those = residue (mod 8) for test, the others for training.
    residue = -first_key % _HELD_OUT
    held_out = (n_values - residue + _HELD_OUT - 1) // _HELD_OUT
    if split == "test":
        return residue + _HELD_OUT * (draws * held_out).astype(np.int64)
    index = (draws * (n_values - held_out)).astype(np.int64)
    after = index - residue
    return np.where(after < 0, index, residue + 1 + after + after // (_HELD_OUT - 1))


class MQARRows(Dataset):
    """Map-style view of one task, seed and split; `__getitems__` makes a whole batch for contiguous indices at once."""

    def __init__(self, task: MQARTask, seed: int, split: str, rows: int, rows_per_step: int | None = None) -> None:
        self.task, self.seed, self.split, self.rows, self.rows_per_step = task, seed, split, rows, rows_per_step
        self._counted = (-1, 0)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        cuts = [0, *(j for j in range(1, len(indices)) if indices[j] != indices[j - 1] + 1), len(indices)]
        parts = [self.task.rows(self.seed, self.split, indices[a], b - a) for a, b in zip(cuts, cuts[1:])]
        tokens, targets = (torch.from_numpy(np.concatenate(p) if len(p) > 1 else p[0]) for p in zip(*parts))
        return {
            "tokens": tokens,
            "targets": targets,
            "target_count": torch.tensor(self._target_count(indices[0], targets)),
        }

    def _target_count(self, index: int, targets: torch.Tensor) -> int:
        if self.rows_per_step is None:
            return int((targets != IGNORE).sum())
        step = index // self.rows_per_step
        if self._counted[0] != step:
            count = self.task.target_count(self.seed, self.split, step * self.rows_per_step, self.rows_per_step)
            self._counted = (step, count)
        return self._counted[1]


class MQARDataModule(SampledDataModule):
    """Multi-query associative recall, made on the fly; validation has one loader per (pairs, length).

    Args:
        format: `paper` (k1 v1 … SEP q1 …) or `public` (the public MQAR benchmark); see data/mqar.py.
        vocab_size: Token ids, the special token 0 included.
        n_pairs: Key-value pairs per training row; several numbers: one is chosen per row.
        length: Tokens per training row; null: 3n+1 (`paper`) or 8n (`public`) for the largest n.
        n_queries: Queries per row (`paper` only); null: n without a length, else the rest of the row.
        power: Exponent of the power law of query positions (`public` only); 1 is uniform.
        filler: Non-query tokens (`public` only): `blank` (token 0) or `random`.
        global_batch_tokens: Tokens of one optimizer step over all ranks; a multiple of the row length. Null: 64 rows.
        micro_batch_rows: Rows per rank and micro-batch; null: the rank's whole share at once.
        val_n_pairs: Pairs of the validation grid; null: the training pairs.
        val_lengths: Row lengths of the validation grid; null: the training setting for each number of pairs.
        val_rows: Rows per validation loader, over all ranks.
        val_batch_rows: Rows per validation batch.
        num_workers: Loader processes; rows are made fast enough for 0.
        seed: Seed of the data alone, apart from the model's.
    """

    def __init__(
        self,
        format: Literal["paper", "public"] = "paper",
        vocab_size: int = 128,
        n_pairs: int | list[int] = 8,
        length: int | None = None,
        n_queries: int | None = None,
        power: float = 0.01,
        filler: Literal["blank", "random"] = "blank",
        global_batch_tokens: int | None = None,
        micro_batch_rows: int | None = None,
        val_n_pairs: list[int] | None = None,
        val_lengths: list[int] | None = None,
        val_rows: int = 512,
        val_batch_rows: int = 64,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        pairs = (n_pairs,) if isinstance(n_pairs, int) else tuple(n_pairs)
        self.task = MQARTask(format, vocab_size, pairs, length, n_queries, power, filler)
        tokens = 64 * self.task.row_tokens if global_batch_tokens is None else global_batch_tokens
        super().__init__(tokens, micro_batch_rows, val_batch_rows, num_workers, seed)
        if val_rows < 1:
            raise ValueError(f"val_rows must be at least 1, got {val_rows}")
        self.vocab_size, self.row_tokens, self.val_rows = vocab_size, self.task.row_tokens, val_rows
        self.fingerprint = "mqar " + ", ".join(f"{k} {v}" for k, v in asdict(self.task).items())
        grid = [(n, t) for n in (val_n_pairs or dict.fromkeys(pairs)) for t in (val_lengths or [length])]
        self.val_tasks = [MQARTask(format, vocab_size, (n,), t, n_queries, power, filler) for n, t in grid]
        self.longest_sequence = max(task.row_tokens for task in (self.task, *self.val_tasks))
        self.val_names = [f"pairs{task.n_pairs[0]}_len{task.row_tokens}" for task in self.val_tasks]

    def train_set(self, plan: BatchPlan) -> Dataset:
        steps = self.trainer.max_steps if self.trainer is not None else 1
        return MQARRows(self.task, self.seed, "train", steps * plan.rows_per_step, plan.rows_per_step)

    def val_sets(self) -> list[Dataset]:
        return [MQARRows(task, self.seed, "test", self.val_rows) for task in self.val_tasks]
