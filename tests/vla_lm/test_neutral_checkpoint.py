"""A neutral folder that other software wrote, or that a person edited: one message before the run starts."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import language_model

from vla_lm.checkpoint_files import publish
from vla_lm.checkpoints import check_compatible, checkpoint_step, load_model

FIRST = "transformer.embedding.weight"


@pytest.fixture
def folder(tmp_path):
    """Weights and moments, without a marker."""
    model = language_model()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for kind in ("weights", "exp_avg", "exp_avg_sq"):
        save_file(weights, tmp_path / f"{kind}.safetensors")
    hyper = {"config": model.config.to_dict(), "optimizer": model.optimizer_config.to_dict()}
    (tmp_path / "state.json").write_text(json.dumps({"format": 1, "global_step": 0, "hyper_parameters": hyper}))
    return tmp_path


def check(folder):
    """As recipes.pretrain does."""
    checkpoint_step(folder)
    check_compatible(folder, language_model(), max_steps=10)


def edit(folder, **fields):
    state = json.loads((folder / "state.json").read_text()) | fields
    state = {key: value for key, value in state.items() if value is not ...}
    (folder / "state.json").write_text(json.dumps(state))


def tensors(folder, kind, **changes):
    """Changes tensors of a kind; ... takes one away. FIRST is `first`."""
    file = folder / f"{kind}.safetensors"
    found = load_file(file) | {FIRST if name == "first" else name: value for name, value in changes.items()}
    save_file({name: value for name, value in found.items() if value is not ...}, file)


def index(folder, text):
    (folder / "weights.safetensors.index.json").write_text(text)


@pytest.mark.parametrize(("spoil", "told"), [
    (lambda f: edit(f, global_step=...), "state.json cannot be used .*global_step.*: it must have format, global_step"),
    (lambda f: edit(f, global_step="x"), "state.json has global_step 'x': it must be a whole number"),
    (lambda f: edit(f, global_step=True), "state.json has global_step True"),
    (lambda f: edit(f, hyper_parameters={"config": 3, "optimizer": {}}), "need config and optimizer, an object each"),
    (lambda f: index(f, "{"), "weights.safetensors.index.json cannot be used .*: it must be JSON with weight_map"),
    (lambda f: index(f, "{}"), "weights.safetensors.index.json cannot be used .*weight_map"),
    (lambda f: index(f, '{"weight_map": [1]}'), "weights.safetensors.index.json cannot be used"),
    (lambda f: index(f, '{"weight_map": {"a": "b.safetensors"}}'), "says that a is in b.safetensors, which is missing"),
    (lambda f: index(f, '{"weight_map": {"a": "exp_avg.safetensors"}}'),
     "says that a is in exp_avg.saf.*, which lacks it"),
    (lambda f: tensors(f, "weights", first=torch.zeros(13, 16, dtype=torch.int32)), f"has {FIRST} in I32: .* F32, F64"),
    (lambda f: (f / "exp_avg_sq.safetensors").unlink(), "has exp_avg of .* and no exp_avg_sq of it: AdamW needs both"),
    (lambda f: tensors(f, "exp_avg", first=...), f"has exp_avg_sq of {FIRST} and no exp_avg of it"),
    (lambda f: [tensors(f, kind, first=...) for kind in ("exp_avg", "exp_avg_sq")],
     f"has no exp_avg of {FIRST}: AdamW"),
    (lambda f: tensors(f, "exp_avg", first=torch.zeros(3)),
     r"exp_avg of .* of shape \[3\], its weights have \[13, 16\]"),
    (lambda f: [tensors(f, kind, first=torch.zeros(3)) for kind in ("weights", "exp_avg", "exp_avg_sq")],
     rf"weights of {FIRST} of shape \[3\], the architecture .* has \[13, 16\]: make vocab_size and d_model there"),
    (lambda f: tensors(f, "weights", extra=torch.zeros(3)),
     r"weights of extra of shape \[3\], the architecture .* has none"),
    (lambda f: [tensors(f, kind, first=...) for kind in ("weights", "exp_avg", "exp_avg_sq")],
     f"has weights of {FIRST} of shape none, the architecture"),
])  # fmt: skip
def test_what_is_wrong_with_it_is_said_before_the_run(folder, spoil, told):
    check(folder)
    spoil(folder)
    with pytest.raises(ValueError, match=told) as error:
        check(folder)
    assert str(folder) in str(error.value)


def test_half_precision_weights_of_other_software_are_taken(folder):
    tensors(folder, "weights", first=torch.ones(13, 16, dtype=torch.bfloat16))
    check(folder)
    assert load_model(folder).state_dict()[FIRST].dtype == torch.float32


def test_damage_at_equal_size_is_seen_by_load_model(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "step=000001.neutral"
    publish(folder, out, {"step": 1})
    load_model(out)
    content = bytearray((out / "weights.safetensors").read_bytes())
    content[-1] ^= 255
    (out / "weights.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="is damaged: the bytes of weights.safetensors"):
        load_model(out)
