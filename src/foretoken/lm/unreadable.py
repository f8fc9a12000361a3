"""What transformers says where a model cannot be read, as an error with a way out."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlparse

from safetensors import SafetensorError

from foretoken.errors import CapabilityError, CheckpointError, ForetokenError

# What transformers raises for a configuration, weights or a tokenizer it cannot read.
UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError, ImportError,
    SafetensorError,
)  # fmt: skip
NOT_TO_BE_HAD = re.compile(
    "gated|private|not a valid model identifier|Repository Not Found|restricted"
)
NO_MEMORY = re.compile("can't allocate memory|out of memory|not enough memory", re.IGNORECASE)
# A disk that may not be written, and one on which nothing more may be.
NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EDQUOT)
TRANSPORT = re.compile("Proxy|Connection|Timeout")  # in names of what fails on the way to the hub


def explain(
    where: Path | str, error: Exception, options: dict[str, Any], config: Any = None
) -> NoReturn:
    """Turn what transformers said into an error with a way out; `config`, once it was read."""
    said, whole = first_line(error), str(error)
    if "trust_remote_code" in whole and not options["trust_remote_code"]:
        raise CheckpointError(
            f"{where} brings code of its own.",
            "code from a checkpoint is not run unless asked for.",
            "pass trust_remote_code=True (--trust-remote-code) if you trust its source.",
        ) from error
    if isinstance(error, ImportError):
        raise CapabilityError(
            f"{where} needs a package that is not installed: {said}.",
            "models whose packages are installed.",
            "install it, then load again.",
        ) from error
    if NO_MEMORY.search(whole):
        raise no_memory(f"{where} does not fit into memory: {said}.") from error
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        raise CheckpointError(
            f"{where} cannot be kept: {said}.",
            "models of the hub are kept in its local cache (HF_HOME).",
            "make room on that disk, or set HF_HOME to a larger one.",
        ) from error
    if isinstance(where, str) and cannot_write(error):
        raise CheckpointError(
            f"{where} cannot be kept, the hub's local cache cannot be written: {said}.",
            "models of the hub are kept in its local cache (HF_HOME).",
            "set HF_HOME to a folder that may be written.",
        ) from error
    if isinstance(where, str) and NOT_TO_BE_HAD.search(whole):
        raise CheckpointError(
            f"{where} cannot be had from the hub: {said}.",
            "public models, and those that your login may read.",
            "check the name; for a private or gated one ask for access on its page, then log in "
            "with `hf auth login`.",
        ) from error
    lost = on_the_way(error) if isinstance(where, str) and isinstance(error, OSError) else None
    if lost is not None:
        raise CheckpointError(
            f"{where} cannot be had from the hub: {first_line(lost)}.",
            "models of the hub that are not in its local cache come over the network.",
            "check the network and its proxy (HTTPS_PROXY, NO_PROXY), or pass a directory.",
        ) from error
    if re.search("model.type|Unrecognized", whole):
        if reads_images(config):
            raise of_images(where, config) from error
        raise CapabilityError(
            f"{where} is of a kind that the installed transformers cannot build: {said}.",
            "any causal language model that AutoModelForCausalLM builds.",
            "use such a model, or a newer transformers.",
        ) from error
    if isinstance(where, str) and options.get("use_safetensors") and "safetensors" in whole:
        raise CheckpointError(
            f"{where} cannot be read: {said}.",
            "hub models are read from *.safetensors, never from pickles.",
            "check the name, or pass allow_pickle=True (--allow-pickle) if you trust its source.",
        ) from error
    raise CheckpointError(
        f"{where} cannot be read: {said}.",
        "config.json and *.safetensors as save_pretrained writes them.",
        "save or download the model again.",
    ) from error


def cannot_write(error: Exception) -> bool:
    """Whether the disk refused; of some refusals transformers hands on no more than the name."""
    refused = isinstance(error, OSError) and error.errno in NOT_WRITABLE
    return refused or str(error).startswith("PermissionError at")


def on_the_way(error: BaseException | None) -> BaseException | None:
    """What failed between here and the hub, among an error and its causes; None: nothing did.

    transformers names only the outcome. Known by names: which client is used is not ours to say.
    """
    while error is not None:
        name, client = type(error).__name__, type(error).__module__.partition(".")[0]
        # an HTTPError or HTTPStatusError is an answer, of a hub that was reached
        answered = name.startswith("HTTP")
        if TRANSPORT.search(name) or (client in ("httpx", "requests") and not answered):
            return error
        error = error.__cause__ or error.__context__
    return None


def unreached(name: str, endpoint: str, offline: bool) -> CheckpointError:
    """A hub name that is not in the local cache, where the hub is not asked or cannot be."""
    asked = (
        f"{name} was asked for: there is no such directory, and it is not in the local hub cache."
    )
    host = urlparse(endpoint).hostname
    if offline:
        way = "unset it, or pass a directory."
        return CheckpointError(asked, "HF_HUB_OFFLINE is set, so the hub is not asked.", way)
    if not host:
        return CheckpointError(
            asked,
            f"HF_ENDPOINT is {endpoint!r}, which names no host.",
            "set HF_ENDPOINT to an address such as https://huggingface.co, or unset it.",
        )
    return CheckpointError(
        asked,
        f"{host} cannot be reached from here.",
        "pass a directory, or fetch the model where there is a network.",
    )


def of_images(where: Any, config: Any) -> CapabilityError:
    """A name of a model that only its own class reads."""
    return CapabilityError(
        f"{where} is a model of images and text, {config.model_type}.",
        "models are read by name with AutoModelForCausalLM, which has none of this kind; "
        "prompts are text in any case.",
        "load it with AutoModelForImageTextToText of transformers, and pass the model.",
    )


def no_config(path: Path, files: list[str]) -> CheckpointError:
    """A directory with these files and no configuration; many are adapters of another model."""
    if "adapter_config.json" in files:
        base = adapted(path / "adapter_config.json")
        return CheckpointError(
            f"{path} holds an adapter of {base}, and no model.",
            "a model directory holds config.json beside all of a model's weights.",
            "merge it first (merge_and_unload, then save_pretrained), or load the base with "
            "transformers, call its load_adapter with this directory, and pass that model.",
        )
    return CheckpointError(
        f"{path} has no config.json.",
        "a model directory holds config.json beside its weights; found here: "
        f"{', '.join(files[:5])}.",
        "pass the directory that save_pretrained wrote to.",
    )


def adapted(path: Path) -> str:
    """The model that an adapter's configuration names."""
    try:
        return str(json.loads(path.read_text())["base_model_name_or_path"] or "another model")
    except (ValueError, KeyError, TypeError, OSError):
        return "another model"


def reads_images(config: Any) -> bool:
    """Whether transformers has a model of images and text for it, and none of text alone."""
    # not at the top: the command line asks this module what an error means before models are read
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = type(config)
    causal, images = AutoModelForCausalLM._model_mapping, AutoModelForImageTextToText._model_mapping
    return kind in images and kind not in causal


def no_memory(asked: str) -> ForetokenError:
    """A model, or a text, for which there is no memory."""
    return CapabilityError(
        asked,
        "weights, a KV cache of each text and what a forward takes have to fit.",
        "load in a smaller dtype, ask for fewer or shorter texts, or give a memory budget "
        "(memory_budget='2GiB' in Python, --set memory_budget=2GiB for generate and chat, "
        "--memory-budget for serve); `foretoken plan` says what fits.",
    )


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:200].rstrip(".")
