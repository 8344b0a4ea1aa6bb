"""A trained model comes back from its files, or one clear message says why not."""

import json
from types import SimpleNamespace

import pytest
import torch
from small import Data, batches, language_model, trainer

from vla_lm.checkpoints import check_compatible, checkpoint_step, load_model, load_weights


def save(folder, step=2, mark=True, **fields):
    """A run's folder with one checkpoint, as recipes.pretrain leaves it."""
    model, fit = language_model(**fields), trainer(folder, step)
    fit.fit(model, datamodule=Data(batches(step)))
    path = folder / "checkpoints" / f"step={step:06d}.ckpt"
    fit.save_checkpoint(path)
    if mark:
        write_marker(path, step)
    return path, model


def write_marker(path, step):
    marker = {"step": step, "bytes": path.stat().st_size}
    path.with_name(path.name + ".complete").write_text(json.dumps(marker))


@pytest.mark.parametrize("style", ["paper", "modern"])
def test_round_trip_from_file_folder_and_link(tmp_path, style):
    path, model = save(tmp_path, style=style)
    path.with_name("last.ckpt").symlink_to(path.name)
    tokens = batches(1)[0]["tokens"]
    for source in (path, tmp_path, tmp_path / "checkpoints", path.with_name("last.ckpt")):
        again = load_model(source, device="auto" if source is path else "cpu")
        assert not again.training and again.config == model.config
        torch.testing.assert_close(again.cpu()(tokens).logits, model.eval()(tokens).logits, rtol=0, atol=0)
    assert checkpoint_step(tmp_path) == 2


def test_a_run_folder_gives_the_newest_complete_checkpoint(tmp_path):
    save(tmp_path, 3)
    save(tmp_path, 2)
    broken, _ = save(tmp_path, 4, mark=False)
    (tmp_path / "checkpoints" / "step=000005.ckpt.partial").write_bytes(b"")
    assert checkpoint_step(tmp_path) == 3
    with pytest.raises(ValueError, match="no marker step=000004.ckpt.complete"):
        load_model(broken)


def test_missing_damaged_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_model(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        load_model(tmp_path)
    path, _ = save(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f"has {len(whole) // 2} bytes, its marker says {len(whole)}"):
        load_model(path)
    with pytest.raises(FileNotFoundError, match=r"only half-written checkpoints \(1\)"):
        load_model(tmp_path)
    write_marker(path, 2)
    with pytest.raises(ValueError, match="no readable checkpoint"):
        load_model(path)
    torch.save({"state_dict": {}}, path)
    write_marker(path, 2)
    with pytest.raises(ValueError, match="no configuration of a language model"):
        load_model(path)
    path.with_name(path.name + ".complete").write_text("{")
    with pytest.raises(ValueError, match="unreadable marker"):
        load_model(path)


def test_another_architecture_is_named_by_its_fields(tmp_path):
    path, _ = save(tmp_path, mixer="vla", d_model=16)
    check_compatible(path, language_model(mixer="vla", d_model=16, chunk_size=4), max_steps=2)
    with pytest.raises(ValueError) as error:
        check_compatible(path, language_model(mixer="vla_key", d_model=32), max_steps=2)
    told = ("d_model is 16 there, 32 here", "mixer is 'vla' there, 'vla_key' here", "Set model.config.d_model to 16")
    assert all(part in str(error.value) for part in told)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"d_model": 32}, ["embedding.weight is [13, 16] there, [13, 32] here", "vocab_size and d_model"]),
        ({"mixer": "vla_key"}, ["to_penalty.weight is [16, 16] there, missing here", "mixer and u_source"]),
        ({"n_layers": 3}, ["layers.2.", "missing there", "n_layers and d_model"]),
        ({"d_ff": 64}, ["feed_forward", "d_ff and style"]),
        ({"max_positions": 8}, ["positions.weight is [32, 16] there, [8, 16] here", "max_positions"]),
        ({"conv_width": 4}, ["convolution.weight is missing there", "conv_width"]),
    ],
)
def test_weights_that_do_not_fit_name_the_first_differences(fields, told):
    weights = language_model().state_dict()
    with pytest.raises(ValueError) as error:
        load_weights(language_model(**fields), weights, "x.ckpt")
    assert all(part in str(error.value) for part in ["x.ckpt is of another architecture", *told]), str(error.value)


def test_names_left_by_torch_compile_are_accepted():
    model, other = language_model(seed=0), language_model(seed=1)
    weights = {f"transformer._orig_mod.{n.removeprefix('transformer.')}": v for n, v in other.state_dict().items()}
    load_weights(model, weights, "x.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def test_the_bfloat16_zero_1_folder_that_deepspeed_cannot_convert(tmp_path):
    # Its layout, for two ranks: each group of parameters one float32 vector, padded, cut in halves.
    model = language_model()
    groups = [list(model.named_parameters())[:5], list(model.named_parameters())[5:]]
    folder = tmp_path / "step=000007.ckpt"
    (folder / "checkpoint").mkdir(parents=True)
    hyper = {"config": model.config.to_dict(), "optimizer": model.optimizer_config.to_dict()}
    shapes = [{name: parameter.shape for name, parameter in group} for group in groups]
    content = {"hyper_parameters": hyper, "param_shapes": shapes, "global_step": 7, "max_steps": 1000}
    torch.save(content, folder / "checkpoint" / "mp_rank_00_model_states.pt")

    def places(group, rank):
        """name -> where its piece lies in the rank's half."""
        half, end, found = -(-sum(p.numel() for _, p in group) // 4) * 4 // 2 + 2, 0, {}
        for name, parameter in group:
            start, end = end, end + parameter.numel()
            first, last = max(start, rank * half), min(end, (rank + 1) * half)
            if first < last:
                found[name] = SimpleNamespace(start=first - rank * half, numel=last - first)
        return found

    halves = []
    for group in groups:
        flat = torch.cat([parameter.detach().flatten() for _, parameter in group])
        halves.append(torch.cat([flat, torch.zeros(-len(flat) % 4 + 4)]).chunk(2))
    for rank in range(2):
        states = {"single_partition_of_fp32_groups": [half[rank] for half in halves], "partition_count": [2, 2],
                  "base_optimizer_state": {"state": {}},
                  "param_slice_mappings": [places(group, rank) for group in groups]}
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": states}, folder / "checkpoint" / name)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    (tmp_path / "step=000007.ckpt.complete").write_text(json.dumps({"step": 7, "bytes": size}))
    with pytest.raises(ValueError, match="folder of pickles.*--trust-pickle"):
        load_model(tmp_path)
    again = load_model(tmp_path, trust_pickle=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
    check_compatible(folder, model, max_steps=1000, trust_pickle=True)
    file = folder / "checkpoint" / name
    (tmp_path / "step=000007.ckpt.complete").write_text(json.dumps({"step": 7, "bytes": size - file.stat().st_size}))
    file.unlink()
    with pytest.raises(ValueError, match="pieces of 1 ranks, 2 wrote it"):
        load_model(folder, trust_pickle=True)
