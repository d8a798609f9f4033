"""States of constant size: what linear attention, state-space and short-convolution layers keep."""

from dataclasses import dataclass
from math import prod

from lossless_lab.kv_cache.checks import require
from lossless_lab.kv_cache.facts import FACTS
from lossless_lab.kv_cache.sizes import CannotEstimate, needed


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One state tensor of one request: a convolution's window, or a recurrent matrix."""

    name: str  # conv | recurrent
    shape: tuple[int, ...]  # conv: channels, kernel; recurrent: heads (or channels), rest
    n_groups: int = 0  # of Mamba-2: groups whose channels are replicated when split too finely
    group_channels: int = 0
    dtype: str | None = None  # fixed by config or family; "model": the weights'; "unstated"

    def elements(self, *, columns: int = 0, tensor_parallel: int = 1) -> int:
        """Elements on one GPU; `columns` is what an engine keeps of a convolution's kernel.

        Examples
        --------
        >>> State(name="conv", shape=(8192, 4)).elements(columns=3)   # 8192 x 3
        24576
        """
        size = self.shape[0]
        if self.n_groups % tensor_parallel:
            size += (tensor_parallel - self.n_groups) * self.group_channels
        said = f"does not divide the {size} channels or heads of the {self.name} state"
        require(size % tensor_parallel == 0, f"`tensor_parallel` {tensor_parallel} {said}")
        rest = self.shape[1:] if self.name == "recurrent" else (columns,)
        return size // tensor_parallel * prod(rest)


def _conv(channels, kernel, **groups):
    return State(name="conv", shape=(channels, kernel), **groups)


def _recurrent(*shape, dtype=None):
    return State(name="recurrent", shape=shape, dtype=dtype)


def _mamba1(c):
    """Selective state space: d_inner channels with d_state each."""
    expand = needed(c, "mamba_expand", "expand")
    inner = int(expand * c.hidden_size) if hasattr(c, "mamba_expand") else c.intermediate_size
    kernel = needed(c, "mamba_d_conv", "conv_kernel")
    return _conv(inner, kernel), _recurrent(inner, needed(c, "mamba_d_state", "state_size"))


def _mamba2(c):
    """State-space duality: heads of head_dim x d_state; B and C of each group are convolved too."""
    heads = needed(c, "mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
    width = needed(c, "mamba_d_head", "mamba_headdim", "mamba_head_dim", "head_dim")
    state = needed(c, "mamba_d_state", "ssm_state_size", "state_size")
    groups = needed(c, "mamba_n_groups", "mamba_ngroups", "n_groups")
    channels = heads * width + 2 * groups * state
    kernel = needed(c, "mamba_d_conv", "conv_kernel")
    conv = _conv(channels, kernel, n_groups=groups, group_channels=2 * state)
    return conv, _recurrent(heads, width, state, dtype=getattr(c, "mamba_ssm_cache_dtype", None))


def _gated_delta_net(c):
    """Gated delta net: one key x value matrix per value head; q, k and v are convolved."""
    n_keys, n_values = c.linear_num_key_heads, c.linear_num_value_heads
    key, value = c.linear_key_head_dim, c.linear_value_head_dim
    conv = _conv(2 * n_keys * key + n_values * value, c.linear_conv_kernel_dim)
    return conv, _recurrent(n_values, key, value, dtype=getattr(c, "mamba_ssm_dtype", None))


def _kimi_delta(c):
    """Kimi delta attention: square matrices per head; q, k and v are convolved."""
    heads, width = c.linear_num_heads, c.linear_head_dim
    conv = _conv(3 * heads * width, c.linear_conv_kernel_dim)
    return conv, _recurrent(heads, width, width, dtype="float32")


def _short_conv(c):
    """A gated short convolution over the residual stream, no recurrent state."""
    return (_conv(c.hidden_size, c.conv_L_cache),)


def _lightning(c):
    """Lightning attention: one head_dim x head_dim matrix per head, no convolution."""
    width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return (_recurrent(c.num_attention_heads, width, width, dtype="model"),)


def _rg_lru(c):
    """Griffin's real-gated linear recurrent unit: one vector and a short convolution."""
    return _conv(c.lru_width, c.conv1d_width), _recurrent(c.lru_width)


def _rwkv(c):
    """RWKV: the last inputs of both mixers; numerator, denominator and maximum, or since version 5
    one matrix per head."""
    mixed = _recurrent(c.attention_hidden_size, getattr(c, "head_size", 3), dtype="float32")
    return _recurrent(c.hidden_size, 2, dtype="model"), mixed


def states(config) -> tuple[State, ...]:
    """The state tensors of one such layer, for one request."""
    family = (rule for rule, names in FACTS["state_families"].items() if config.model_type in names)
    rule = next(family, None)
    said = f"the layer states of model_type {config.model_type!r} are unknown"
    require(rule is not None, said, CannotEstimate)
    return globals()[f"_{rule}"](config)
