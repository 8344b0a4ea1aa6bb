"""Documents packed into rows: an endless stream of whole epochs, addressed by arithmetic.

The stream of epoch `e` is the documents (each BOS t1 … tn EOS) in a permutation seeded by (seed, e), concatenated;
epochs follow each other without a gap. Row `i` is stream[i*T : (i+1)*T], so every token is in exactly one row, whatever
the ranks. The target of a position is the next token of its own document; the EOS position has none. Nothing is stored
but prefix sums: a row, its document boundaries and a step's number of targets follow from the row's index alone.

With lanes (state carried over), blocks of K*R*T stream tokens, about an epoch each, are cut into R contiguous lanes of
K rows: step `s` reads row `s mod K` of every lane of block `s // K`, so a lane's rows follow each other from step to
step. A lane starts each block fresh. A block need not end where an epoch does, so nothing is dropped, padded or read
twice.
"""

from dataclasses import dataclass

import numpy as np

IGNORE = -100


@dataclass
class Piece:
    """A stretch of the stream: tokens, targets (int64 [count]) and where documents start in it (int64)."""

    tokens: np.ndarray
    targets: np.ndarray
    starts: np.ndarray


class DocumentStream:
    """Documents of a token array, laid end to end, epoch after epoch.

    tokens: all tokens (memory-mapped). spans: int64 [D, 2], first and last+1 token of each document.
    seed: of the permutations; None keeps the order and has one epoch only.
    """

    def __init__(self, tokens: np.ndarray, spans: np.ndarray, seed: int | None) -> None:
        self.tokens, self.spans, self.seed = tokens, spans, seed
        self.lengths = spans[:, 1] - spans[:, 0]
        self.epoch_tokens = int(self.lengths.sum())
        self._orders: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's documents, and the stream offset (within the epoch) after each; int64 [D] each."""
        if epoch not in self._orders:
            count = len(self.lengths)
            if self.seed is None:
                documents = np.arange(count)
            else:
                # Raw Philox words are fixed for ever; numpy's own shuffle may change between versions.
                words = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64)).random_raw(count)
                documents = np.argsort(words, kind="stable")
            while len(self._orders) > 2:
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch] = documents, np.cumsum(self.lengths[documents])
        return self._orders[epoch]

    def ends_before(self, positions: np.ndarray) -> np.ndarray:
        """Number of documents that end before each stream position, int64, same shape."""
        epochs, offsets = np.divmod(positions, self.epoch_tokens)
        ends = epochs * len(self.lengths)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            ends[here] += np.searchsorted(self.order(epoch)[1], offsets[here], side="right")
        return ends

    def target_count(self, first: np.ndarray, count: int) -> int:
        """Valid targets of the stretches [first, first+count): every position but the documents' last ones."""
        first = np.atleast_1d(np.asarray(first, dtype=np.int64))
        return int(count * len(first) - (self.ends_before(first + count) - self.ends_before(first)).sum())

    def starts_document(self, position: int) -> bool:
        offset = position % self.epoch_tokens
        ends = self.order(position // self.epoch_tokens)[1]
        return offset == 0 or bool(ends[np.searchsorted(ends, offset)] == offset)

    def read(self, first: int, count: int) -> Piece:
        """The stretch [first, first+count) and its targets.

        One token beyond the stretch is read where its last position has a target.
        """
        tokens = np.empty(count, dtype=np.int64)
        targets = np.empty(count, dtype=np.int64)
        starts, done = [], 0
        while done < count:
            epoch, offset = divmod(first + done, self.epoch_tokens)
            documents, ends = self.order(epoch)
            i = int(np.searchsorted(ends, offset, side="right"))
            while done < count and i < len(ends):
                begin, end = self.spans[documents[i]]
                inside = offset - (int(ends[i]) - (end - begin))  # tokens of the document that lie before this stretch
                take = int(min(count - done, end - begin - inside))
                text = self.tokens[begin + inside : min(begin + inside + take + 1, end)]
                tokens[done : done + take] = text[:take]
                targets[done : done + len(text) - 1] = text[1:]
                targets[done + len(text) - 1 : done + take] = IGNORE
                if inside == 0:
                    starts.append(done)
                done, offset, i = done + take, offset + take, i + 1
        return Piece(tokens, targets, np.array(starts, dtype=np.int64))


@dataclass(frozen=True)
class RowLayout:
    """Which stretch of the stream a global sample index stands for.

    row_tokens: T.
    lanes: rows per step R for carried state; None: rows in stream order.
    lane_rows: K, rows of a lane in a block.
    """

    row_tokens: int
    lanes: int | None = None
    lane_rows: int = 1

    @classmethod
    def carried(cls, row_tokens: int, rows_per_step: int, epoch_tokens: int) -> "RowLayout":
        return cls(row_tokens, rows_per_step, max(1, -(-epoch_tokens // (rows_per_step * row_tokens))))

    def first_token(self, index: np.ndarray) -> np.ndarray:
        """Stream position of the first token of each row."""
        index = np.asarray(index, dtype=np.int64)
        if self.lanes is None:
            return index * self.row_tokens
        step, lane = np.divmod(index, self.lanes)
        block, row = np.divmod(step, self.lane_rows)
        return ((block * self.lanes + lane) * self.lane_rows + row) * self.row_tokens

    def continues(self, index: int) -> bool:
        """Whether the row follows its lane's previous row in the stream."""
        return self.lanes is not None and (index // self.lanes) % self.lane_rows != 0
