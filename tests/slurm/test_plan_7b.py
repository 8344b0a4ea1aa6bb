"""The memory table of slurm/plan-7b.md says what the plan says today."""

import re
from pathlib import Path

import pytest

from vla_lm.config import ModelConfig
from vla_lm.memory_plan import Sharding, plan_memory

PAGE = (Path(__file__).parents[2] / "slurm/plan-7b.md").read_text()
MODEL = {"style": "modern", "vocab_size": 32768, "d_model": 4096, "n_layers": 32, "n_heads": 64}
ROWS = {
    "parameters, 1/64": ["parameters"],
    "layers gathered at a time (DeepSpeed's default: a billion elements, and a layer)": ["gathered"],
    "masters, gradients, update, 1/64, float32": ["masters", "gradients", "update"],
    "AdamW's two states, 1/64, float32": ["optimizer states"],
    "buckets, float32": ["buckets"],
    "what enters 32 blocks, activation checkpointing": ["activations"],
    "log-probabilities and the backward pass at its fullest": ["logits", "backward pass"],
    "carried states of 4 lanes": ["carried states"],
}


def plan(precision: str, rows: int = 1, accumulation: int = 4, checkpointing: bool = True):
    model = ModelConfig(**MODEL, activation_checkpointing=checkpointing)
    return plan_memory(model, Sharding(3, 64, precision), rows, 8192, accumulation, carry_state=True)


def gigabytes(count: int, digits: int = 2) -> str:
    return f"{count / 1e9:.{digits}f} GB"


@pytest.mark.parametrize(("column", "precision"), [(0, "bf16-true"), (1, "bf16-mixed")])
def test_the_table_is_the_plan(column, precision):
    section = PAGE.split("## Memory of a rank")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| \**([\d.]+ GB)\** \| \**([\d.]+ GB)\** \|$", section, re.MULTILINE)
    found, planned = {name: cells[column] for name, *cells in rows}, plan(precision)
    expected = {name: gigabytes(sum(map(planned.bytes, parts))) for name, parts in ROWS.items()}
    assert found == expected | {"**in all**": gigabytes(planned.device_bytes, 1)}
    assert ({part.name for part in planned.parts} - {name for parts in ROWS.values() for name in parts}
            == {"small parameters"})


def test_the_numbers_beside_it():
    without = [gigabytes(plan(precision, checkpointing=False).device_bytes, 0)
               for precision in ("bf16-true", "bf16-mixed")]
    assert f"Without activation checkpointing: {without[0]} and {without[1]}" in PAGE
    carried = plan("bf16-true").bytes("carried states")
    assert f"its own 4 of 256 | {gigabytes(64 * carried, 1)} | {gigabytes(carried)} |" in PAGE
    assert f"{gigabytes(plan('bf16-true', rows=4, accumulation=1).device_bytes, 1)} of memory a rank" in PAGE
