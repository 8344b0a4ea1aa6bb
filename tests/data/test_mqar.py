"""MQAR rows: exact format, one answer per sample whatever the batching, disjoint splits, clear errors."""

import numpy as np
import pytest
import torch

from data.mqar import MQARDataModule, MQARTask

PAPER = MQARTask("paper", 128, (8,))
MIXED = MQARTask("paper", 64, (2, 5, 9))
LONG = MQARTask("paper", 128, (8,), length=64)
PUBLIC = MQARTask("public", 64, (3, 6), length=48, filler="random")
BLANK = MQARTask("public", 8192, (16,), length=256)
ALL = [PAPER, MIXED, LONG, PUBLIC, BLANK]


def check_row(task, tokens, targets):
    """Decode one row by hand and compare it with the format's definition."""
    length = len(tokens)
    asked = np.flatnonzero(targets != -100)
    n = (
        next(n for n in task.n_pairs if task.format == "public" or tokens[2 * n] == 0)
        if len(task.n_pairs) > 1
        else task.n_pairs[0]
    )
    if task.format == "public":
        n = len(asked)
    assert n in task.n_pairs
    keys, values = tokens[0 : 2 * n : 2], tokens[1 : 2 * n : 2]
    assert len(set(keys)) == n
    answer = dict(zip(keys.tolist(), values.tolist()))
    assert [answer[k] for k in tokens[asked].tolist()] == targets[asked].tolist()
    if task.format == "paper":
        assert keys.min() >= 1 and values.min() >= 1 and max(keys.max(), values.max()) < task.vocab_size
        assert tokens[2 * n] == 0
        m = task.queries(n)
        assert asked.tolist() == list(range(2 * n + 1, 2 * n + 1 + m))
        assert (tokens[2 * n + 1 + m :] == 0).all()
    else:
        half = task.vocab_size // 2
        assert 1 <= keys.min() and keys.max() < half <= values.min() and values.max() < task.vocab_size
        assert len(set(values)) == n
        assert sorted(tokens[asked].tolist()) == sorted(keys.tolist()), "each key is asked once"
        assert ((asked - 2 * n) % 2 == 0).all() and asked.min() >= 2 * n
        filler = np.delete(tokens, np.r_[np.arange(2 * n), asked])
        assert filler.min() >= 0 and filler.max() < task.vocab_size
        if task.filler == "blank":
            assert (filler == 0).all()
    assert length == task.row_tokens


@pytest.mark.parametrize("task", ALL, ids=lambda t: f"{t.format}-{t.n_pairs}-{t.length}")
@pytest.mark.parametrize("split", ["train", "test"])
def test_format(task, split):
    tokens, targets = task.rows(3, split, 0, 200)
    assert tokens.dtype == targets.dtype == np.int64
    for row in zip(tokens, targets):
        check_row(task, *row)


@pytest.mark.parametrize("task", ALL, ids=lambda t: f"{t.format}-{t.n_pairs}-{t.length}")
def test_sample_is_a_pure_function_of_seed_split_index(task):
    tokens, targets = task.rows(5, "train", 1000, 64)
    for i in (0, 1, 31, 63):
        one = task.rows(5, "train", 1000 + i, 1)
        assert (one[0][0] == tokens[i]).all() and (one[1][0] == targets[i]).all()
    again = task.rows(5, "train", 990, 40)
    assert (again[0][10:] == tokens[:30]).all()
    assert (task.rows(6, "train", 1000, 64)[0] != tokens).any()
    assert (task.rows(5, "train", 2**40, 2)[0].shape) == (2, task.row_tokens)
    assert task.target_count(5, "train", 1000, 64) == (targets != -100).sum()


@pytest.mark.parametrize("task", ALL, ids=lambda t: f"{t.format}-{t.n_pairs}-{t.length}")
def test_splits_are_disjoint_by_their_first_pair(task):
    train, test = task.rows(0, "train", 0, 4000)[0], task.rows(0, "test", 0, 4000)[0]
    assert (task.split_of(train) == 0).all() and (task.split_of(test) == 1).all()
    first_pairs = [{tuple(pair) for pair in rows[:, :2].tolist()} for rows in (train, test)]
    assert not first_pairs[0] & first_pairs[1]


def test_every_small_vocabulary_keeps_the_splits():
    for vocab_size in range(9, 26):
        task = MQARTask("paper", vocab_size, (3,))
        for split, expected in (("train", 0), ("test", 1)):
            rows = task.rows(0, split, 0, 300)[0]
            assert (task.split_of(rows) == expected).all()
            assert rows.max() < vocab_size


def test_distribution():
    tokens, _ = PAPER.rows(0, "train", 0, 20000)
    for column in (0, 2, 14, 1, 3, 15):  # keys and values are uniform over the 127 ids
        counts = np.bincount(tokens[:, column], minlength=128)[1:]
        assert abs(counts.mean() - 20000 / 127) < 1e-9 and (
            (counts - counts.mean()) ** 2 / counts.mean()
        ).sum() < 127 + 6 * np.sqrt(2 * 127)
    position = (tokens[:, 17:, None] == tokens[:, None, 0:16:2]).argmax(-1)  # which pair each query asks for
    counts = np.bincount(position.ravel(), minlength=8)
    assert np.abs(counts / counts.mean() - 1).max() < 0.03
    assert len(set(map(bytes, tokens))) == len(tokens)
    pairs = MIXED.pairs_of(0, "train", 0, 30000)
    assert np.abs(np.bincount(pairs)[[2, 5, 9]] / 10000 - 1).max() < 0.05


def test_public_queries_follow_the_power_law():
    _, targets = MQARTask("public", 64, (1,), length=66).rows(0, "train", 0, 40000)
    slots = (np.argmax(targets != -100, axis=1) - 2) // 2
    expected = np.arange(1, 33) ** -0.99
    expected *= len(slots) / expected.sum()
    counts = np.bincount(slots, minlength=32)
    assert ((counts - expected) ** 2 / expected).sum() < 31 + 6 * np.sqrt(62)


def test_global_generators_are_untouched():
    np.random.seed(1), torch.manual_seed(1)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    module = MQARDataModule(n_pairs=[2, 4])
    for loader in module.val_dataloader():
        next(iter(loader))
    module.train_set(module.batch_plan(1)).__getitems__([0, 1, 2])
    assert (np.random.get_state()[1] == before[0]).all() and torch.equal(torch.get_rng_state(), before[1])


def test_validation_grid():
    module = MQARDataModule(n_pairs=4, val_n_pairs=[4, 8], val_lengths=[32, 64], val_rows=10, val_batch_rows=4)
    assert module.val_names == ["pairs4_len32", "pairs4_len64", "pairs8_len32", "pairs8_len64"]
    for name, loader in zip(module.val_names, module.val_dataloader(), strict=True):
        batches = list(loader)
        assert [len(b["tokens"]) for b in batches] == [4, 4, 2]
        assert batches[0]["tokens"].shape[1] == int(name.split("len")[1])
        assert all(int(b["target_count"]) == int((b["targets"] != -100).sum()) for b in batches)
    assert MQARDataModule(n_pairs=8).val_names == ["pairs8_len25"]
    assert MQARDataModule(n_pairs=[4, 24]).val_names == ["pairs4_len13", "pairs24_len73"]


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(n_pairs=200), "n_pairs 200 does not fit vocab_size 128.*at most 127 pairs, or vocab_size >= 201"),
        (dict(n_pairs=8, length=17), "n_pairs 8 does not fit length 17.*18 tokens"),
        (dict(n_pairs=8, length=20, n_queries=8), "2 x n_pairs .* 8 queries = 25 tokens"),
        (dict(n_pairs=0), "at least one number of pairs >= 1"),
        (dict(n_pairs=[]), "at least one number of pairs"),
        (dict(format="other"), "unknown MQAR format 'other'"),
        (dict(vocab_size=8, n_pairs=2), "vocab_size 8 is too small.*at least 9"),
        (dict(format="public", n_pairs=64), "n_pairs 64 does not fit vocab_size 128.*63 keys.*vocab_size >= 130"),
        (dict(format="public", n_pairs=8, length=31), "at least 4 x n_pairs = 32"),
        (dict(format="public", n_queries=3), "leave it null"),
        (dict(val_lengths=[12]), "n_pairs 8 does not fit length 12"),
        (dict(power=0.0), "power must be positive"),
        (dict(n_queries=0), "n_queries must be at least 1"),
        (dict(seed=-1), "data seed must be in"),
        (dict(val_rows=0), "val_rows must be at least 1"),
        (dict(num_workers=-1), "num_workers must be 0 or more"),
    ],
)
def test_bad_settings_name_the_value_and_the_mend(settings, message):
    with pytest.raises(ValueError, match=message):
        MQARDataModule(**settings)
