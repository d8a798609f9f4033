"""Reading the streams of running models, one or two in lockstep, and changing nothing."""

import inspect
import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from .nonfinite import same_bits
from .parts import Place, decoder_layers, parts_of

Inputs = dict[str, torch.Tensor]


class HooksNeverFired(RuntimeError):
    """Nothing was captured: the model runs code that does not call its modules' hooks."""


@contextmanager
def capture(
    network: nn.Module,
    see: Callable[[Place, torch.Tensor], None],
    *,
    name: str = "network",
    parts: Mapping[Place, nn.Module] | None = None,
) -> Iterator[None]:
    """Call `see(place, tensor)` before the first block (place 0) and after block i (place i).

    Only for passes of the calling thread, so that a model can be compared with itself.

    Parameters
    ----------
    parts : place -> module whose output is wanted as well, as from `parts_of`.

    Raises
    ------
    HooksNeverFired
        On leaving, when a block has not called its hook; names the model as `name`.
    """
    layers = decoder_layers(network)
    owner = threading.get_ident()
    seen = set()

    def before(_: nn.Module, args: tuple, kwargs: dict) -> None:
        if threading.get_ident() == owner:
            see(0, args[0] if args else kwargs["hidden_states"])

    def after(place: Place) -> Callable[..., None]:
        def hook(_: nn.Module, __: tuple, output: Any) -> None:
            if threading.get_ident() == owner:
                seen.add(place)
                see(place, output if isinstance(output, torch.Tensor) else output[0])

        return hook

    with ExitStack() as hooks:
        hooks.enter_context(layers[0].register_forward_pre_hook(before, with_kwargs=True))
        for place, module in [*(parts or {}).items(), *enumerate(layers, 1)]:
            hooks.enter_context(module.register_forward_hook(after(place)))
        yield
    missing = set(range(1, len(layers) + 1)) - seen
    if missing:
        raise HooksNeverFired(
            f"`{name}`: hooks never fired on {len(missing)} of {len(layers)} layers; "
            "compiled code runs without them, so nothing can be said about its layers. Compare the "
            "model before compiling, or one whose layers are compiled one by one"
        )


def lockstep(
    reference: nn.Module,
    candidate: nn.Module,
    inputs: Inputs,
    pairs: Mapping[Place, Place],
    compare: Callable[[Place, torch.Tensor, torch.Tensor], None],
) -> None:
    """Both forwards in turn: the candidate, in a second thread, runs only while it is waited for.

    Parameters
    ----------
    pairs : place in the reference -> place in the candidate, layers rising. A part (a place that
        is no number) which only one side runs is passed over.
    compare : called with (place in the reference, both tensors), and last with the logits, as
        layer n_layers + 1. The tensors are the models' own: read, never written.
    """
    turn = threading.Semaphore(0)
    streams: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    end, failed = math.inf, -math.inf
    wanted, abandoned = set(pairs.values()), threading.Event()
    held: list[tuple[Any, Any]] = []  # what the candidate gave and nobody took yet, at most one

    def wait() -> None:
        turn.acquire()
        if abandoned.is_set():
            raise InterruptedError

    def give(place: Place, stream: torch.Tensor) -> None:
        if place in wanted:
            streams.put((place, stream))
            wait()

    def parts(network: nn.Module, places: set[Place]) -> dict[Place, nn.Module]:
        found = parts_of(network) if any(isinstance(place, tuple) for place in places) else {}
        return {place: module for place, module in found.items() if place in places}

    device = next(candidate.parameters()).device.type
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    def run() -> None:
        try:
            wait()
            seen = capture(candidate, give, name="candidate", parts=parts(candidate, wanted))
            with torch.autocast(device, dtype=dtype, enabled=enabled), seen:  # as the caller's
                logits = forward(candidate, inputs)
            streams.put((end, logits))
        except BaseException as error:
            streams.put((failed, error))

    def take(place: Place | float) -> torch.Tensor | None:
        while True:
            if not held:
                turn.release()
                held.append(streams.get())
            got, stream = held[0]
            if got == failed:
                raise stream
            if got == place:
                return held.pop()[1]
            if isinstance(place, tuple):
                return None  # the candidate is past it, or never runs it
            held.pop()
            if not isinstance(got, tuple):
                raise HooksNeverFired(f"`candidate`: layer {place} expected, hooks gave {got}")

    def see(place: Place, stream: torch.Tensor) -> None:
        if place in pairs and (other := take(pairs[place])) is not None:
            compare(place, stream, other)

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    try:
        with capture(reference, see, name="reference", parts=parts(reference, set(pairs))):
            logits = forward(reference, inputs)
        compare(len(decoder_layers(reference)) + 1, logits, take(end))
    finally:
        abandoned.set()
        turn.release()
        worker.join()


def observer_effect(
    model: Any,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    modules: bool = False,
) -> float:
    """Largest |logit difference| between a pass with capture and one without; 0 is bitwise equal.

    Parameters
    ----------
    modules : capture the parts of each layer as well.

    Raises
    ------
    HooksNeverFired
        When capture sees nothing.
    """
    network = getattr(model, "network", model)
    inputs = model_inputs(input_ids, attention_mask)
    without = forward(network, inputs)
    parts = parts_of(network) if modules else None
    with capture(network, lambda place, stream: None, parts=parts):
        watched = forward(network, inputs)
    if same_bits(without, watched):
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
    if ids.ndim != 2 or ids.numel() == 0 or ids.is_floating_point():
        raise ValueError(
            "`input_ids`, whole numbers, must be [batch_size, seq_len]; got "
            f"{tuple(ids.shape)} of {ids.dtype}"
        )
    if mask is None:
        return {"input_ids": ids, "position_ids": torch.arange(ids.shape[1]).expand_as(ids)}
    mask = torch.as_tensor(mask)
    if mask.shape != ids.shape:
        raise ValueError(
            f"`attention_mask` must have the shape of `input_ids`, {tuple(ids.shape)}; "
            f"got {tuple(mask.shape)}"
        )
    if not (mask.any() and ((mask == 0) | (mask == 1)).all()):
        raise ValueError("`attention_mask` must be 1 where a token counts, somewhere, else 0")
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def forward(network: nn.Module, inputs: Inputs) -> torch.Tensor:
    """Logits [batch_size, seq_len, vocab_size] of one uncached pass, on the network's device."""
    if network.training:
        raise ValueError(f"{type(network).__name__} must be in eval mode: call `.eval()` first")
    for name, module in network.named_modules():
        if isinstance(module, _DropoutNd) and module.training and module.p:
            raise ValueError(f"`{name}` is in train mode and drops at random: call `.eval()` first")
    embedding = getattr(network.get_input_embeddings(), "num_embeddings", math.inf)
    if not 0 <= int(inputs["input_ids"].min()) <= int(inputs["input_ids"].max()) < embedding:
        raise ValueError(
            f"`input_ids` must lie in 0 to {embedding - 1}, the vocabulary of "
            f"{type(network).__name__}; got up to {int(inputs['input_ids'].max())}: ids of another "
            "tokenizer?"
        )
    taken = inspect.signature(network.forward).parameters
    device = next(network.parameters()).device
    used = {k: v.to(device) for k, v in inputs.items() if k in taken or k != "position_ids"}
    with torch.no_grad():
        return network(**used, use_cache=False).logits


def kept(x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """[positions, size] of [batch_size, seq_len, size] or of its rows, without the pads.

    Examples
    --------
    >>> kept(torch.ones(1, 3, 5), model_inputs([[0, 5, 6]], [[0, 1, 1]])).shape
    torch.Size([2, 5])
    """
    x = x.reshape(*inputs["input_ids"].shape, -1)
    mask = inputs.get("attention_mask")
    return x.flatten(0, -2) if mask is None else x[mask.bool().to(x.device)]
