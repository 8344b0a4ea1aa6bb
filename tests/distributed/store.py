"""A token store of a dozen short documents, for the tests of several processes."""

from pathlib import Path

import torch

from data.corpus import Corpus
from data.token_store import StoreRequest, prepare_store


def write_store(folder: Path) -> Path:
    texts, store = folder / "texts", folder / "store"
    texts.mkdir()
    words = "the state of the union is a message on law, trade and the rivers of this land".split()
    for index in range(12):
        picks = torch.randint(len(words), (40 + 25 * index,), generator=torch.Generator().manual_seed(index))
        (texts / f"{index}.txt").write_text(" ".join(words[pick] for pick in picks))
    prepare_store(store, StoreRequest(Corpus((str(texts),)), 300, None, 0.2), 1)
    return store
