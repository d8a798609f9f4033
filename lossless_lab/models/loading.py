"""Loading a model: explicit dtype, safetensors only, no remote code, no dead kernel."""

import hashlib
import json
from dataclasses import dataclass

from lossless_lab.models import places
from lossless_lab.models.fetching import HUB_TEXT_FILES, fetch, fetch_from_hub
from lossless_lab.models.planning import refuse_if_too_large

DTYPES = ("float32", "float64", "float16", "bfloat16")
ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A network with its tokenizer and the identity that a run's manifest records."""

    name: str
    network: object  # transformers PreTrainedModel in eval mode
    tokenizer: object | None
    revision: str  # Hub commit, wheel, or where else the files came from
    weights_sha256: str
    tokenizer_sha256: str
    chat: bool  # the tokenizer has a chat template

    def __str__(self) -> str:
        millions = sum(p.numel() for p in self.network.parameters()) / 1e6
        dtype = str(self.network.dtype).removeprefix("torch.")
        return f"{self.name}: {millions:.1f}M parameters, {dtype}, {self.weights_sha256[:12]}"


def load(name, *, dtype="float32", device="cpu", attn_implementation="sdpa") -> Model:
    """Load a causal language model in eval mode, with everything that decides its numbers explicit.

    Parameters
    ----------
    name : str or Path
        "tiny-target", "tiny-draft", "smollm2", a folder, or a Hub id (downloaded if needed).
    dtype : str or torch.dtype
        float32, float64, float16 or bfloat16; never the checkpoint's own by default.
    device : str
        "cpu", "cuda", "cuda:1", "mps", or "auto": sharded over all GPUs by accelerate.
    attn_implementation : str
        The attention kernel: sdpa, eager, flash_attention_2, flash_attention_3, flex_attention.

    Returns
    -------
    Model

    Raises
    ------
    ValueError
        If a parameter is unknown (the nearest is suggested) or the device is not there.
    FileNotFoundError
        If the weights are missing; names the command that brings them.
    MemoryError
        If the weights alone exceed the memory that is free; nothing has been loaded then.

    Examples
    --------
    >>> load("tiny-draft").network.num_parameters()
    410240
    """
    dtype = places.choose("dtype", str(dtype).removeprefix("torch."), DTYPES)
    places.choose("attn_implementation", attn_implementation, ATTENTION)
    _check_device(device)
    folder = _locate(name, dtype, device)
    network = _network(folder, dtype, device, attn_implementation)
    tokenizer = _tokenizer(folder)
    return Model(
        name=str(name) if places.is_named(name) else folder.resolve().name,
        network=network,
        tokenizer=tokenizer,
        revision=_revision(name, folder),
        weights_sha256=places.digest(places.weight_files(folder)),
        tokenizer_sha256=places.digest(places.tokenizer_files(folder)),
        chat=bool(getattr(tokenizer, "chat_template", None)),
    )


def _locate(name, dtype, device):
    """The folder with all weights, once it is sure that they fit into memory."""
    if places.is_hub_id(name) and not places.is_present(name):
        refuse_if_too_large(fetch_from_hub(name, HUB_TEXT_FILES), dtype, device)
        fetch(name)
    folder = places.folder(name)
    if not places.weight_files(folder):
        raise FileNotFoundError(_what_is_missing(name, folder))
    refuse_if_too_large(folder, dtype, device)
    return folder


def _what_is_missing(name, folder) -> str:
    if name in places.FETCHED:
        return f"{name} is not on this machine: run `lossless-lab models fetch {name}`"
    if name in places.BUNDLED:
        return f"the bundled {name} is missing: run `python data/models/train_tiny_pair.py`"
    found = ", ".join(sorted(f.name for f in folder.iterdir())[:8]) or "nothing"
    return (
        f"`name` {str(name)!r} holds no complete model.safetensors (found {found}); weights in "
        "other formats are not read: save them with `save_pretrained` first"
    )


def _check_device(device) -> None:
    import torch

    kinds = ("cpu", "cuda", "mps", "xpu", "auto")
    kind, _, index = str(device).partition(":")
    if kind not in kinds or (":" in str(device) and not index.isdecimal()):
        hint = places.nearest(kind, kinds) or "; give cpu, cuda, cuda:0, mps or auto"
        raise ValueError(f"`device` {device!r} is none that torch knows{hint}")
    there = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if kind in there and not there[kind]():
        raise ValueError(f"`device` {device!r}: torch sees none here; run `lossless-lab doctor`")


def _network(folder, dtype, device, attn_implementation):
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    placement = {} if device == "cpu" else {"device_map": device}
    safe = {"use_safetensors": True, "trust_remote_code": False, "local_files_only": True}
    wanted = {"dtype": getattr(torch, dtype), "attn_implementation": attn_implementation}
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # for a load of a second
    try:
        network = AutoModelForCausalLM.from_pretrained(folder, **wanted, **safe, **placement)
    finally:
        if shown:
            logging.enable_progress_bar()
    _align(network)
    return network.eval()


def _align(network) -> None:
    """Move weights that were mapped from a file to where an allocator puts tensors.

    safetensors maps them at 8 bytes past a multiple of 64; kernels of a CPU then sum in another
    order, and an exact copy of the network would not be bitwise the same.
    """
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % 64:
            tensor.data = tensor.data.clone()


def _tokenizer(folder):
    from transformers import AutoTokenizer

    if not places.tokenizer_files(folder):
        return None
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def _revision(name, folder) -> str:
    if (folder / "source.json").is_file():
        return json.loads((folder / "source.json").read_text("utf-8"))["wheel"]
    if name in places.BUNDLED:
        return "bundled"
    return folder.name if places.is_hub_id(name) else "folder"


def state_sha256(network) -> str:
    """`state:` and SHA-256 over names, dtypes, shapes and bytes of the network's tensors."""
    import torch

    digest = hashlib.sha256()
    parts = (part for item in sorted(network.state_dict().items()) for part in _parts(*item))
    for name, tensor in parts:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    return f"state:{digest.hexdigest()}"


def _parts(name, tensor):
    """A tensor, or those that a packed one (of torchao, say) is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from _parts(f"{name}.{part}", getattr(tensor, part))
