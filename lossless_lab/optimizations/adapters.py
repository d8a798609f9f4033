"""Low-rank adapters beside linear layers, and the optimisation of merging them into the weights."""

from collections.abc import Sequence

import torch
from torch import nn

from lossless_lab.number_formats import Format, GgufFormat, number_format, round_to
from lossless_lab.optimizations.entry import VACUOUS, WARNING, Optimization, copied
from lossless_lab.optimizations.witness import Observation


class LoraLinear(nn.Module):
    """base(x) + (alpha / r) · B A x (arXiv 2106.09685); merged as peft's layers are."""

    def __init__(self, base: nn.Linear, *, r: int, alpha: float, std: float, seed: int) -> None:
        super().__init__()
        if r < 1:
            raise ValueError(f"`r` must be at least 1; got {r}")
        rng = torch.Generator().manual_seed(seed)
        self.base_layer, self.scaling = base, alpha / r
        down = torch.randn(r, base.in_features, generator=rng) * base.in_features**-0.5
        up = torch.randn(base.out_features, r, generator=rng) * std
        self.lora_A, self.lora_B = (nn.Parameter(w.to(base.weight)) for w in (down, up))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The base's output and the adapter's, added in the network's dtype."""
        return self.base_layer(x) + (x @ self.lora_A.T) @ self.lora_B.T * self.scaling

    @torch.no_grad()
    def merge(self) -> None:
        """W + (alpha / r) · B A, in float32 at least, rounded once to the weights' dtype."""
        weight = self.base_layer.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        weight.copy_(weight.to(wide) + self.scaling * self.lora_B.to(wide) @ self.lora_A.to(wide))


def with_adapters(
    network: nn.Module,
    *,
    r: int = 8,
    alpha: float = 32.0,
    modules: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
    std: float = 0.02,
    seed: int = 0,
) -> nn.Module:
    """A copy whose linear layers of those names carry random adapters; `std` is that of B."""
    changed = copied(getattr(network, "network", network))
    for i, (name, module) in enumerate(list(changed.named_modules())):
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in modules:
            adapter = LoraLinear(module, r=r, alpha=alpha, std=std, seed=seed + i)
            changed.set_submodule(name, adapter)
    if not _adapters(changed):
        raise ValueError(f"`network` has no linear layer named {', '.join(modules)}")
    return changed


def merged(fmt: str | Format | GgufFormat | None = None) -> Optimization:
    """Adapters added to the weights that they stand beside, and gone; claims level 1b.

    The algebra is exact, but merged weights are rounded to their dtype, and those of a quantised
    base to its format again.

    Parameters
    ----------
    fmt : format of the base's weights, which the merged ones are rounded to; None for none. The
        claim is then level 3.
    """
    fmt = None if fmt is None else number_format(fmt)

    def transform(network: nn.Module) -> tuple[nn.Module, dict]:
        changed = copied(network)
        found = _adapters(changed)
        if not found:
            raise ValueError("`network` has no adapter to merge")
        changed.adapters_idle, zeros, total = True, 0, 0
        for name, module in found.items():
            base = module.base_layer
            for other, m in changed.named_modules():
                if m not in (base, module) and getattr(m, "weight", None) is base.weight:
                    rule = f"weights of its own by each adapter; `{name}` has those of `{other}`"
                    raise ValueError(f"`network` must have {rule}, and merging would change both")
            before, adds = base.weight.detach().clone(), _adds(module)
            module.merge()
            if fmt is not None:
                with torch.no_grad():
                    base.weight.copy_(round_to(base.weight, fmt.fitted(base.weight.shape[1])))
            changed.adapters_idle &= not adds and torch.equal(before, base.weight)
            zeros += int((base.weight[before == 0] != 0).sum())
            total += before.numel()
            changed.set_submodule(name, base)
        changed.adapters_merged, changed.zeros_filled = len(found), zeros / total
        return changed, {}

    def witness(seen: Observation) -> str:
        n = getattr(seen.network, "adapters_merged", 0)
        if not n or _adapters(seen.network):
            return ""
        if seen.network.adapters_idle:
            return f"{VACUOUS}the {n} adapters added nothing; no weight was changed"
        said, filled = f"{n} adapters merged, none left", getattr(seen.network, "zeros_filled", 0)
        lost = f"; {WARNING}the base's zeros: {filled:.0%} of the weights, which merging filled"
        return said + lost * (filled > 0.01)

    return Optimization(
        name="merge-adapters" if fmt is None else f"merge-adapters-{fmt.name}",
        level="1b" if fmt is None else "3",
        transform=transform,
        witness=witness,
        needs="adapters in the network (LoraLinear, or peft's layers)",
    )


def _adapters(network: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in network.named_modules()
        if hasattr(module, "merge") and hasattr(module, "base_layer")
    }


@torch.no_grad()
def _adds(module: nn.Module) -> bool:
    """Whether an adapter's layer gives anything else than the layer that it stands beside."""
    weight = module.base_layer.weight
    x = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    return not torch.equal(module(x), module.base_layer(x))


ENTRIES = (merged(),)
