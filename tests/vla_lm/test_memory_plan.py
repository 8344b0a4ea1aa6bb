"""The planned activations beside what autograd keeps; plans of large models. Weights: tests/distributed."""

import pytest
import torch

from tests.vla_lm.small import batches, language_model
from vla_lm.config import ModelConfig
from vla_lm.lanes import LaneStates
from vla_lm.memory_plan import MemoryPlan, Part, Sharding, operator_activations, plan_memory, state_bytes
from vla_lm.metrics import token_losses
from vla_lm.mixers import MIXERS

SIZES = dict(vocab_size=256, d_model=64, n_heads=4, n_layers=4, max_positions=128, chunk_size=32)
VARIANTS = {
    "paper vla": dict(style="paper"),
    "modern vla": dict(style="modern"),
    "modern vla with a gate": dict(style="modern", output_gate=True),
    "vla_key": dict(style="modern", mixer="vla_key"),
    "rls": dict(style="paper", mixer="rls"),
    "deltanet": dict(style="modern", mixer="deltanet"),
    "gated_deltanet": dict(style="modern", mixer="gated_deltanet"),
    "paper deltanet": dict(style="paper", mixer="deltanet"),
    "linear": dict(style="paper", mixer="linear"),
    "mesa": dict(style="modern", mixer="mesa"),
    "softmax": dict(style="modern", mixer="softmax"),
}


def kept(model, rows, tokens, precision):
    """Bytes that autograd keeps of a forward pass and its loss, the parameters aside."""
    storages = {}

    def pack(tensor):
        scores = tensor.shape[-2:] == (tokens, tokens)  # softmax on a CPU keeps them, flash does not
        if not scores:
            storages[tensor.untyped_storage().data_ptr()] = (tensor, tensor.untyped_storage().nbytes())
        return tensor

    batch, = batches(1, rows, tokens)
    autocast = torch.autocast("cpu", torch.bfloat16, precision == "bf16-mixed")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), autocast:
        loss = token_losses(model(batch["tokens"]).logits, batch["targets"]).sum()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert loss.requires_grad
    return sum(size for place, (_, size) in storages.items() if place not in weights)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_activations_are_within_a_quarter(variant, precision, checkpointing):
    model = language_model(**SIZES | VARIANTS[variant], activation_checkpointing=checkpointing)
    if precision == "bf16-true":
        model = model.bfloat16()
    plan = plan_memory(model.config, Sharding(precision=precision), rows=2, row_tokens=96, device="cpu")
    found = kept(model, 2, 96, precision)
    planned = plan.bytes("activations") + plan.bytes("logits") + plan.bytes("bfloat16 copies")
    assert 0.8 < planned / found < 1.25, (planned, found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mixer", ["vla", "vla_key", "rls", "mesa", "deltanet", "linear"])
def test_what_the_triton_backend_keeps(mixer, dtype, monkeypatch):
    """By the shapes that its registered operator declares."""
    triton_backend = pytest.importorskip("kernels.triton_backend")
    config = ModelConfig(vocab_size=8, d_model=256, n_heads=4, mixer=mixer, style="modern").resolved()
    heads, size, tokens, row = 4, 64, 512, MIXERS[mixer]
    like = torch.empty(tokens, heads, size, dtype=dtype, device="meta")
    strength = torch.empty(tokens, heads, device="meta") if config.beta != "none" else None
    M0 = torch.empty(heads, dtype=torch.float64, device="meta") if row.penalised else None
    u = like if config.u_source == "projection" else None
    precision = "bf16" if dtype == torch.bfloat16 else "tf32"
    out = triton_backend.forward_op(like, like, like, u, strength, None, M0, None, None, 1, None, row.write_rule,
                                    "unit", config.feature_map, config.readout == "normalized", 1.0, precision,
                                    small=False, keep=True)
    kept = [like, like, like, out[0], *out[4:], *(x for x in (u, strength) if x is not None)]
    found = sum(tensor.numel() * tensor.itemsize for tensor in kept) / tokens
    assert operator_activations(config, dtype.itemsize, True) == pytest.approx(found, rel=0.1)


def test_states_are_counted_to_the_byte():
    for fields in (dict(style="modern"), dict(style="paper"), dict(style="modern", mixer="deltanet", conv_width=3)):
        model = language_model(**SIZES | fields)
        lanes, batch = LaneStates(), batches(1, 3, 20)[0]
        lanes.put([0, 1, 2], model(batch["tokens"], return_states=True).states)
        layers = lanes.state_dict()["layers"]
        found = sum(tensor.numel() * tensor.itemsize for layer in layers for tensor in layer.values())
        assert found == 3 * len(layers) * state_bytes(model.config, "32-true")
        plan = plan_memory(model.config, Sharding(), rows=1, row_tokens=20, accumulation=3, carry_state=True)
        assert plan.bytes("carried states") == 3 * 4 * state_bytes(model.config, "bf16-mixed") <= found


LARGE = dict(style="modern", vocab_size=32768, d_model=4096, n_layers=32, n_heads=64)


def test_a_large_model_on_many_ranks():
    """By hand: 7B parameters, ZeRO-3 on 64 ranks; 20 bytes each for weight, master, gradient and two states."""
    plan = plan_memory(ModelConfig(**LARGE, activation_checkpointing=True), Sharding(3, 64), rows=1, row_tokens=8192)
    count = plan.bytes("optimizer states") / 8 * 64
    assert 6.5e9 < count < 7.5e9
    for name, each in (("parameters", 4), ("masters", 4), ("gradients", 4)):
        assert plan.bytes(name) == pytest.approx(each * count / 64, rel=1e-6), name
    assert plan.device_bytes < 80e9
    sharding = Sharding(3, 64, "bf16-true", offload_optimizer=True)
    lean = plan_memory(ModelConfig(**LARGE), sharding, rows=1, row_tokens=8192)
    assert lean.bytes("parameters") == plan.bytes("parameters") / 2 and lean.bytes("masters") == plan.bytes("masters")
    assert lean.host_bytes == pytest.approx(20 * count / 64, rel=1e-6) and plan.host_bytes == 0
    assert plan.bytes("block's gradients") == 0, "218M parameters: more than is gathered ahead"
    narrow = ModelConfig(**LARGE | {"d_model": 1024, "n_heads": 16})
    small = plan_memory(narrow, Sharding(3, 64), rows=1, row_tokens=128)
    assert 1 < small.bytes("block's gradients") / (4 * 13 * 1024**2) < 1.02, "5 d^2 of the mixer, 8 d^2 behind it"
    # As measured with DeepSpeed's counters: 592,576 elements at most with 584,000 of either and blocks of 58,500.
    assert plan.bytes("gathered") == 4 * (1_000_000_000 + 218_689_536), "a billion and a layer: DeepSpeed's default"
    assert small.bytes("gathered") == pytest.approx(64 * small.bytes("masters") - small.bytes("small parameters"), 1e-6)
    # What each row adds is the same, and the model's share shrinks with the ranks.
    alone = plan_memory(ModelConfig(**LARGE), Sharding(3, 1), rows=2, row_tokens=8192)
    assert alone.bytes("logits") == 2 * 8192 * 32768 * 4 and alone.bytes("masters") == pytest.approx(4 * count)


def test_copies_of_blocks_that_run_again_last_until_the_forward_pass_ends():
    """Autocast frees its copies of weights there, checkpointed or not: more than the backward pass with few tokens."""
    def plan(tokens, again):
        config = ModelConfig(**LARGE, activation_checkpointing=again)
        return plan_memory(config, Sharding(2, 64, "bf16-mixed"), 1, tokens)

    def most(plan):
        return plan.bytes("bfloat16 copies") + plan.bytes("backward pass")

    copies = plan(128, False).bytes("bfloat16 copies")
    assert copies > 12e9 and most(plan(128, True)) == copies
    assert plan(65536, True).bytes("bfloat16 copies") == 2 * 32768 * LARGE["d_model"]  # the output projection's


def test_the_mend_fits_the_largest_part():
    config = ModelConfig(**LARGE)
    for stage, expected in enumerate(["use ZeRO (", "a higher ZeRO stage", "a higher ZeRO stage",
                                      "use more ranks, or"]):
        mend = plan_memory(config, Sharding(stage, 2), rows=1, row_tokens=128).mend()
        assert expected in mend and ("more ranks" in mend) == (stage > 0), mend
    many = plan_memory(config, Sharding(3, 64), rows=8, row_tokens=8192)
    assert many.largest.name == "activations" and "activation_checkpointing" in many.mend()
    for name in ("logits", "backward pass", "bfloat16 copies"):
        assert "micro_batch_rows" in MemoryPlan((Part(name, 5, "float32", ""),
                                                 Part("masters", 4, "float32", ""))).mend()
    assert "reduce_bucket_size" in MemoryPlan((Part("buckets", 5, "float32", ""),)).mend()


def test_it_is_told_as_a_table():
    plan = MemoryPlan((Part("parameters", 1_500_000_000, "float32", "375,000,000 whole"),
                       Part("masters", 2_000_000, "float32", "1/2 of them", True)))  # fmt: skip
    lines = str(plan).splitlines()
    assert lines[0].split() == ["parameters", "1.50", "GB", "float32", "375,000,000", "whole"]
    assert "2.00 MB" in lines[1] and "on the host: 1/2 of them" in lines[1]
    assert lines[2].split()[:4] == ["in", "all", "1.50", "GB"] and "2.00 MB of the host's" in lines[2]


def test_what_it_does_not_know_is_refused():
    with pytest.raises(ValueError, match="stage 4"):
        plan_memory(ModelConfig(vocab_size=8), Sharding(4), 1, 8)
    with pytest.raises(ValueError, match="16-mixed"):
        plan_memory(ModelConfig(vocab_size=8), Sharding(precision="16-mixed"), 1, 8)
