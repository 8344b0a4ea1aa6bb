"""Rows reconstruct the documents exactly: every target once per epoch, in both layouts, by arithmetic alone."""

import numpy as np
import pytest

from data.packing import IGNORE, DocumentStream, RowLayout


def make(lengths, seed=3):
    """Documents with tokens that name their document and place: 1000 * document + place."""
    tokens = np.concatenate([1000 * d + np.arange(n) for d, n in enumerate(lengths)])
    ends = np.cumsum(lengths)
    return DocumentStream(tokens, np.stack([ends - lengths, ends], axis=1), seed)


LENGTHS = np.array([2, 17, 3, 40, 5, 2, 9, 64, 8, 11])


def naive(stream, count):
    """Tokens, targets and start flags of the stream's first `count` positions, one document after the other."""
    tokens, targets, starts, epoch = [], [], [], 0
    while len(tokens) < count:
        for d in stream.order(epoch)[0]:
            text = stream.tokens[slice(*stream.spans[d])].tolist()
            tokens += text
            targets += text[1:] + [IGNORE]
            starts += [True] + [False] * (len(text) - 1)
        epoch += 1
    return np.array(tokens[:count]), np.array(targets[:count]), np.array(starts[:count])


@pytest.mark.parametrize("row_tokens", [1, 2, 7, 16, 161, 500])
def test_stretches_match_the_naive_stream(row_tokens):
    stream = make(LENGTHS)
    tokens, targets, starts = naive(stream, 8 * stream.epoch_tokens)
    for first in range(0, 4 * stream.epoch_tokens, max(row_tokens, 3)):
        piece = stream.read(first, row_tokens)
        here = slice(first, first + row_tokens)
        assert (piece.tokens == tokens[here]).all() and (piece.targets == targets[here]).all()
        assert piece.starts.tolist() == np.flatnonzero(starts[here]).tolist()
        assert stream.target_count(first, row_tokens) == (targets[here] != IGNORE).sum()
        assert stream.starts_document(first) == starts[first]


def test_every_epoch_is_another_permutation_of_all_documents():
    stream, same, other = make(LENGTHS), make(LENGTHS), make(LENGTHS, seed=4)
    orders = [stream.order(e)[0].tolist() for e in range(6)]
    assert all(sorted(o) == list(range(10)) for o in orders)
    assert len({tuple(o) for o in orders}) == 6
    assert [same.order(e)[0].tolist() for e in (5, 0, 3)] == [orders[5], orders[0], orders[3]]
    assert other.order(0)[0].tolist() != orders[0]
    assert make(LENGTHS, seed=None).order(0)[0].tolist() == list(range(10))


def test_order_is_fixed_for_ever():
    assert make(LENGTHS, seed=0).order(0)[0].tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert make(LENGTHS, seed=1).order(2)[0].tolist() == [4, 2, 0, 6, 1, 5, 9, 8, 7, 3]


@pytest.mark.parametrize("row_tokens, rows_per_step", [(7, 1), (7, 4), (16, 3), (64, 5), (200, 2)])
@pytest.mark.parametrize("carried", [False, True])
def test_every_position_of_the_stream_is_in_exactly_one_row(row_tokens, rows_per_step, carried):
    stream = make(LENGTHS)
    layout = RowLayout.carried(row_tokens, rows_per_step, stream.epoch_tokens) if carried else RowLayout(row_tokens)
    steps = 3 * layout.lane_rows
    firsts = layout.first_token(np.arange(steps * rows_per_step))
    assert sorted(firsts.tolist()) == list(range(0, steps * rows_per_step * row_tokens, row_tokens))
    tokens, targets, _ = naive(stream, steps * rows_per_step * row_tokens)
    for step in range(steps):
        rows = firsts[step * rows_per_step : (step + 1) * rows_per_step]
        valid = sum((targets[f : f + row_tokens] != IGNORE).sum() for f in rows)
        assert stream.target_count(rows, row_tokens) == valid


def test_every_target_once_per_epoch():
    stream, length = make(LENGTHS), 23
    rows = -(-stream.epoch_tokens // length)
    targets = np.concatenate([stream.read(i * length, length).targets for i in range(rows)])[: stream.epoch_tokens]
    expected = np.concatenate([1000 * d + np.arange(1, n) for d, n in enumerate(LENGTHS)])
    assert sorted(targets[targets != IGNORE].tolist()) == expected.tolist()


def test_lanes_continue():
    stream, length, lanes = make(LENGTHS), 8, 3
    layout = RowLayout.carried(length, lanes, stream.epoch_tokens)
    assert layout.lane_rows == 7  # 161 tokens in 3 lanes of rows of 8
    for step in range(4 * layout.lane_rows):
        for lane in range(lanes):
            first = int(layout.first_token(step * lanes + lane))
            before = int(layout.first_token((step - 1) * lanes + lane)) if step else None
            assert layout.continues(step * lanes + lane) == (step % layout.lane_rows != 0)
            if layout.continues(step * lanes + lane):
                assert first == before + length
    assert not RowLayout(8).continues(5)


def test_large_positions():
    stream = make(LENGTHS)
    far = 10**9 * stream.epoch_tokens
    piece = stream.read(far, stream.epoch_tokens)
    assert piece.starts[0] == 0 and sorted(piece.tokens.tolist()) == sorted(stream.tokens.tolist())
    assert stream.target_count(far, stream.epoch_tokens) == stream.epoch_tokens - len(LENGTHS)
