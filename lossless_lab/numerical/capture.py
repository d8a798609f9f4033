"""Reading the residual stream of running models, one or two in lockstep, and changing nothing."""

from __future__ import annotations

import inspect
import math
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Inputs = dict[str, torch.Tensor]


class HooksNeverFired(RuntimeError):
    """Nothing was captured: the model runs code that does not call its modules' hooks."""


def decoder_layers(network: nn.Module) -> nn.ModuleList:
    """The decoder layers: the outermost ModuleList as long as the config's num_hidden_layers.

    Raises
    ------
    ValueError
        When there is none; with the ModuleLists that there are.
    """
    lists = {name: m for name, m in network.named_modules() if isinstance(m, nn.ModuleList)}
    config = network.config
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    wanted = config.num_hidden_layers
    fitting = [name for name, m in lists.items() if len(m) == wanted]
    if not fitting:
        sizes = ", ".join(f"{name}: {len(m)}" for name, m in lists.items()) or "none"
        raise ValueError(
            f"{type(network).__name__} must hold a ModuleList of num_hidden_layers={wanted}; "
            f"it has {sizes}"
        )
    return lists[min(fitting, key=lambda name: name.count("."))]


@contextmanager
def capture(
    network: nn.Module, see: Callable[[int, torch.Tensor], None], *, name: str = "network"
) -> Iterator[None]:
    """Call `see(layer, stream)` before the first block (layer 0) and after each block.

    Only for passes of the calling thread, so that a model can be compared with itself.

    Raises
    ------
    HooksNeverFired
        On leaving, when a block has not called its hook; names the model as `name`.
    """
    layers = decoder_layers(network)
    owner = threading.get_ident()
    seen = []

    def before(_: nn.Module, args: tuple, kwargs: dict) -> None:
        if threading.get_ident() == owner:
            see(0, args[0] if args else kwargs["hidden_states"])

    def after(layer: int) -> Callable[..., None]:
        def hook(_: nn.Module, __: tuple, output: Any) -> None:
            if threading.get_ident() == owner:
                seen.append(layer)
                see(layer, output if isinstance(output, torch.Tensor) else output[0])

        return hook

    handles = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    handles += [block.register_forward_hook(after(i)) for i, block in enumerate(layers, 1)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if len(seen) < len(layers):
        raise HooksNeverFired(
            f"`{name}`: hooks never fired on {len(layers) - len(seen)} of {len(layers)} layers; "
            "compiled code runs without them, so nothing can be said about its layers. Compare the "
            "model before compiling, or one whose layers are compiled one by one"
        )


def lockstep(
    reference: nn.Module,
    candidate: nn.Module,
    inputs: Inputs,
    pairs: dict[int, int],
    compare: Callable[[int, torch.Tensor, torch.Tensor], None],
) -> None:
    """Both forwards in turn: the candidate, in a second thread, runs only while it is waited for.

    Parameters
    ----------
    pairs : reference layer -> candidate layer, both rising.
    compare : called with (reference layer, both streams), and last with the logits, as layer
        n_layers + 1. The tensors are the models' own: read, never written.
    """
    turn = threading.Semaphore(0)
    streams: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    end, failed = math.inf, -math.inf
    wanted, abandoned = set(pairs.values()), threading.Event()

    def wait() -> None:
        turn.acquire()
        if abandoned.is_set():
            raise InterruptedError

    def give(layer: int, stream: torch.Tensor) -> None:
        if layer in wanted:
            streams.put((layer, stream))
            wait()

    def run() -> None:
        try:
            wait()
            with capture(candidate, give, name="candidate"):
                logits = forward(candidate, inputs)
            streams.put((end, logits))
        except BaseException as error:
            streams.put((failed, error))

    def take(layer: float) -> torch.Tensor:
        turn.release()
        place, stream = streams.get()
        if place == failed:
            raise stream
        if place != layer:
            raise HooksNeverFired(f"`candidate`: layer {layer} expected, hooks gave {place}")
        return stream

    def see(layer: int, stream: torch.Tensor) -> None:
        if layer in pairs:
            compare(layer, stream, take(pairs[layer]))

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    try:
        with capture(reference, see, name="reference"):
            logits = forward(reference, inputs)
        compare(len(decoder_layers(reference)) + 1, logits, take(end))
    finally:
        abandoned.set()
        turn.release()
        worker.join()


def observer_effect(
    model: Any, input_ids: torch.Tensor, *, attention_mask: torch.Tensor | None = None
) -> float:
    """Largest |logit difference| between a pass with capture and one without; 0 is bitwise equal.

    Raises
    ------
    HooksNeverFired
        When capture sees nothing.
    """
    network = getattr(model, "network", model)
    inputs = model_inputs(input_ids, attention_mask)
    without = forward(network, inputs)
    with capture(network, lambda layer, stream: None):
        watched = forward(network, inputs)
    if torch.equal(without, watched):
        return 0.0
    return float((without.double() - watched.double()).abs().max())


def model_inputs(ids: torch.Tensor, mask: torch.Tensor | None) -> Inputs:
    """Ids, mask where there is one, and positions numbered from it.

    Examples
    --------
    >>> model_inputs([[0, 5, 6]], [[0, 1, 1]])["position_ids"].tolist()
    [[0, 0, 1]]
    """
    ids = torch.as_tensor(ids)
    if ids.ndim != 2 or ids.numel() == 0:
        raise ValueError(f"`input_ids` must be [batch_size, seq_len]; got {tuple(ids.shape)}")
    if mask is None:
        return {"input_ids": ids, "position_ids": torch.arange(ids.shape[1]).expand_as(ids)}
    mask = torch.as_tensor(mask)
    if mask.shape != ids.shape:
        raise ValueError(
            f"`attention_mask` must have the shape of `input_ids`, {tuple(ids.shape)}; "
            f"got {tuple(mask.shape)}"
        )
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def forward(network: nn.Module, inputs: Inputs) -> torch.Tensor:
    """Logits [batch_size, seq_len, vocab_size] of one uncached pass, on the network's device."""
    if network.training:
        raise ValueError(f"{type(network).__name__} must be in eval mode: call `.eval()` first")
    taken = inspect.signature(network.forward).parameters
    device = next(network.parameters()).device
    used = {k: v.to(device) for k, v in inputs.items() if k in taken or k != "position_ids"}
    with torch.no_grad():
        return network(**used, use_cache=False).logits
