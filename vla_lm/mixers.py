"""Sequence mixers by name. A variant is a row of this table, never a copy of the code."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mixer:
    """Settings of the operator that one mixer name stands for (kernels/README.md has the table of write rules).

    Values that a configuration leaves at null come from here; `beta`, `readout` and `feature_map` of None follow the
    style (see `STYLE_DEFAULTS`).
    """

    summary: str
    """One line for the README and for error messages."""
    write_rule: str | None
    """Write rule of `kernels.vla`: unit, gain, fixed, linear, mesa. None: softmax attention, which has no memory."""
    erase_key: str = "unit"
    """"unit": the erase key is the unit key. "raw": the un-normalised features (VLA v2)."""
    u_source: str = "none"
    """Where the penalty direction u comes from: "projection" W_u k, "key" the unit key itself, "none" no penalty."""
    beta: str | None = None
    """Write strength: "none" 1, "unit" a learned value in (0, 1), "double" a learned value in (0, 2)."""
    decay: bool = False
    """Learned decay g of the memory."""
    readout: str | None = None
    """"normalized" or "headwise"."""
    feature_map: str | None = None
    """"elu1", "silu" or "identity"."""
    knobs: frozenset[str] = frozenset({"beta", "decay"})
    """What a configuration may turn on beside the row: the others would have no effect and are refused."""

    @property
    def penalised(self) -> bool:
        """Whether the rule keeps the penalty matrix A."""
        return self.write_rule in ("unit", "gain", "mesa")


MIXERS: dict[str, Mixer] = {
    "vla": Mixer("Variational Linear Attention, u = W_u k, unit write (the paper)", "unit", u_source="projection"),
    "vla_key": Mixer("as vla with u = the unit key: no extra projection", "unit", u_source="key"),
    "rls": Mixer("recursive least squares: gain write, u = the unit key", "gain", u_source="key", beta="none"),
    "vla_v2": Mixer(
        "the paper's earlier, unstable form: gain write, un-normalised erase key",
        "gain", erase_key="raw", u_source="projection", beta="none",
    ),
    "fixed": Mixer("delta rule with write strength 1 (the paper's fixed A)", "fixed", beta="none"),
    "deltanet": Mixer("DeltaNet: delta rule with a learned write strength", "fixed"),
    "gated_deltanet": Mixer("DeltaNet with a learned decay", "fixed", decay=True, readout="headwise"),
    "linear": Mixer("linear attention", "linear", beta="none", knobs=frozenset({"decay"})),
    "mesa": Mixer(
        "exact Mesa read-out of the least-squares memory",
        "mesa", u_source="key", beta="none", readout="headwise", knobs=frozenset(),
    ),
    "softmax": Mixer(
        "softmax attention (PyTorch SDPA)", None, beta="none", readout="none", feature_map="identity", knobs=frozenset()
    ),
}

STYLE_DEFAULTS: dict[str, dict[str, object]] = {
    "paper": {"feature_map": "elu1", "readout": "normalized", "conv_width": 0, "d_ff_ratio": 2.0},
    # The convolution's SiLU is the feature map, as in DeltaNet.
    "modern": {"feature_map": "identity", "readout": "headwise", "conv_width": 4, "d_ff_ratio": 8 / 3},
}


def default_beta(mixer: str, style: str) -> str:
    """Write strength when the configuration leaves it open: the row's own, else the style's.

    Paper: 1 for VLA, learned in (0, 1) for the DeltaNets. Modern: learned in (0, 2) for all.
    """
    row = MIXERS[mixer]
    if row.beta is not None:
        return row.beta
    if style == "modern":
        return "double"
    return "unit" if row.write_rule == "fixed" else "none"
