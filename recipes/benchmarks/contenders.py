"""Who is measured: VLA's backends, softmax attention, and flash-linear-attention's operators where they are installed.

Softmax attention is flash in half precision on CUDA. The peers get unit keys and their gates ready-made, VLA the raw
ones: its feature map, normalisations and read-out are inside what is timed. VLA's rows are given a u drawn
independently of k, the projection it comes from is not timed; `vla-key` and `mesa` take the unit keys instead. `mesa`
has neither decay nor strength, the MesaNet rows beside it are given g and beta, which their operator requires.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import vla
from recipes.benchmarks import peers
from recipes.benchmarks.measure import Shape


@dataclass(frozen=True)
class Contender:
    """A row. prepare: from the inputs to a call that returns the output and to the tensors whose gradient counts.

    ours: the options of `vla`, for VLA's own rows; with "keys" the unit keys are the directions.
    """

    name: str
    label: str
    prepare: Callable[[dict], tuple[Callable[[], Tensor], list[Tensor]]]
    ours: dict | None = None

    def refusal(self, name: str, shape: Shape, device: torch.device) -> str | None:
        """Why a pass ("forward" or "both") is not even tried."""
        if self.ours is None and self.name != "sdpa":
            if device.type != "cuda":
                return "runs on CUDA only"
            if find_spec("fla") is None:
                return "not installed: pip install flash-linear-attention"
        if name == "both" and self.name == "vla-recurrent":
            return "has no backward pass"
        # Some eight [D, D] float32 tensors a token stay alive for the backward pass.
        graph = 32 * shape.B * shape.T * shape.H * shape.D**2
        if name == "both" and self.name == "vla-loop" and graph > 40e9:
            return f"autograd would keep about {graph / 1e9:.0f} GB"
        return None


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> dict:
    """Random leaves q, k, v, u, unit [B, T, H, D]; beta in (0, 1), g < 0 [B, T, H] (float32)."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*sizes):
        return torch.randn(*sizes, generator=generator, device=device, dtype=dtype)

    x = {name: draw(shape.B, shape.T, shape.H, shape.D) for name in ("q", "k", "v", "u", "unit")}
    x["unit"] = F.normalize(x["unit"].float(), dim=-1).to(dtype)
    x["beta"] = draw(shape.B, shape.T, shape.H).float().sigmoid()
    x["g"] = F.logsigmoid(draw(shape.B, shape.T, shape.H).float())
    return {name: y.requires_grad_() for name, y in x.items()}


def vla_row(name: str, label: str, **ours) -> Contender:
    """A row of VLA's own, with the options of `vla`."""
    def prepare(x):
        inputs = [x[name] for name in ("qkv" if "keys" in ours else "qkvu")]
        options = {key: value for key, value in ours.items() if key != "keys"}
        return lambda: vla(*inputs, readout=x["readout"], **options).o, inputs
    return Contender(name, label, prepare, ours)


CONTENDERS = {row.name: row for row in (
    vla_row("vla", "VLA, u given (Triton)", backend="triton"),
    vla_row("vla-key", "VLA, u = unit key (Triton)", backend="triton", keys=True),
    vla_row("mesa", "exact MesaNet, ungated (Triton)", backend="triton", keys=True, write_rule="mesa"),
    vla_row("vla-recurrent", "VLA, fused recurrent (Triton)", backend="recurrent"),
    vla_row("vla-chunked", "VLA, chunked (PyTorch)", backend="chunked"),
    vla_row("vla-loop", "VLA, token loop in Python", backend="reference"),
    Contender("sdpa", "softmax attention (SDPA)", peers.sdpa),
    Contender("linear", "linear attention (fla)", peers.peer("linear_attn", "chunk_linear_attn", peers.linear)),
    Contender("deltanet", "DeltaNet (fla)", peers.peer("delta_rule", "chunk_delta_rule", peers.deltanet)),
    Contender("gated-deltanet", "gated DeltaNet (fla)",
              peers.peer("gated_delta_rule", "chunk_gated_delta_rule", peers.gated)),
    Contender("mesanet-15", "gated MesaNet, 15 iterations (fla)",
              peers.peer("mesa_net", "chunk_mesa_net", peers.mesa(15))),
    Contender("mesanet-30", "gated MesaNet, 30 iterations (fla)",
              peers.peer("mesa_net", "chunk_mesa_net", peers.mesa(30))),
    Contender("comba", "Comba (fla)", peers.peer("comba", "chunk_comba", peers.comba)),
    Contender("preconditioned", "preconditioned gated DeltaNet (fla)",
              peers.peer("precond_gated_delta_rule", "chunk_precond_gated_delta_rule", peers.preconditioned)),
)}


def pick(names: list[str]) -> list[Contender]:
    """The rows of these names. Raises ValueError."""
    for name in names:
        if name not in CONTENDERS:
            raise ValueError(f"no row is called {name!r}; choose from {', '.join(CONTENDERS)}")
    return [CONTENDERS[name] for name in names]
