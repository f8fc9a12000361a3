"""Models and tokenizers from a directory, a hub name, or as they are; bad input refused early."""

from __future__ import annotations

import json
import re
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import getproxies

import torch
from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from foretoken import shipped
from foretoken.errors import CheckpointError, ConfigError, TokenizerError
from foretoken.lm.runtime.family import refuse_encoder_decoder
from foretoken.lm.runtime.pages import into_large_pages
from foretoken.lm.unreadable import (
    NO_MEMORY,
    UNREADABLE,
    explain,
    first_line,
    no_config,
    no_memory,
    unreached,
)

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
SAFE = ("*.safetensors",)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
WORDS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")
SECONDS = 5.0  # to find out that the hub cannot be reached
_reading = threading.RLock()


def load_model(
    source: Any,
    *,
    device: Any = None,
    dtype: Any = None,
    device_map: Any = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal LM in eval mode. A loaded model is returned as it is, where it is.

    `device_map` was checked by `lm.placing`, and says where modules are in place of `device`.

    `device` is CUDA where there is one, else the CPU; `dtype` is float32 on a CPU and the
    checkpoint's elsewhere.
    """
    if isinstance(source, PreTrainedModel):
        return same_model(source, device, dtype, device_map)
    place = find_device(device)
    kind = find_dtype(dtype, place)
    where = check_source(source, allow_pickle)
    options = {"trust_remote_code": trust_remote_code, "local_files_only": isinstance(where, Path)}
    reading = {**options, "use_safetensors": None if allow_pickle else True}
    if device_map is not None:
        reading["device_map"] = device_map
    with quiet():
        config = read_config(where, options)
        model, report = read_weights(where, config, kind, reading)
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{source} lacks {len(missing)} of the model's weights, {missing[0]} among them.",
            "every weight must be in the checkpoint; missing ones would be random numbers.",
            "use a complete checkpoint of a causal language model.",
        )
    if device_map is None:
        model = moved(model, place, source)
    loaded: PreTrainedModel = model.eval()
    into_large_pages(loaded)
    return loaded


def moved(model: Any, place: torch.device, source: Any) -> Any:
    """The model on a device that it fits on."""
    try:
        return model.to(place)
    except RuntimeError as error:
        if NO_MEMORY.search(str(error)) is None:
            raise
        raise no_memory(f"{source} does not fit on {place}: {first_line(error)}.") from error


def target_config(
    source: Any, *, allow_pickle: bool = False, trust_remote_code: bool = False
) -> Any:
    """The configuration of a model that is loaded, or would be: no weight is read."""
    if isinstance(source, PreTrainedModel):
        return source.config
    where = check_source(source, allow_pickle)
    options = {"trust_remote_code": trust_remote_code, "local_files_only": isinstance(where, Path)}
    with quiet():
        return read_config(where, options)


def check_source(source: Any, allow_pickle: bool) -> Path | str:
    """Where a model lies: a directory that can be loaded, or a hub name."""
    where = locate(source, "model")
    if isinstance(where, Path):
        check_directory(where, allow_pickle)
    return where


def load_tokenizer(source: Any, tokenizer: Any = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer given, or the one beside the model, or None where there is none.

    That of a loaded model is where the model came from: a directory, or the local hub cache.
    """
    if tokenizer is not None and not isinstance(tokenizer, str | Path):
        return tokenizer
    asked = tokenizer is not None
    if not asked and isinstance(source, PreTrainedModel):
        return tokenizer_of(source, trust_remote_code)
    where = locate(tokenizer if asked else source, "tokenizer")
    if isinstance(where, Path) and not has_words(where):
        if not asked:
            return None
        raise CheckpointError(
            f"{where} was given as a tokenizer and has no tokenizer files.",
            f"a tokenizer directory holds one of {', '.join(WORDS)}.",
            "pass the directory the tokenizer was saved to.",
        )
    return read_tokenizer(where, trust_remote_code)


def tokenizer_of(model: PreTrainedModel, trust_remote_code: bool) -> Any:
    """The tokenizer that lies where a loaded model came from; None where there is none."""
    origin = str(model.config.name_or_path or "/nonexistent")
    if has_words(Path(origin)):
        return read_tokenizer(Path(origin), trust_remote_code)
    if Path(origin).exists() or not HUB_NAME.fullmatch(origin):
        return None
    try:  # of a model of the hub: nothing is asked of it
        with quiet():
            return AutoTokenizer.from_pretrained(
                origin, local_files_only=True, trust_remote_code=trust_remote_code
            )
    except UNREADABLE:
        return None


def same_model(model: PreTrainedModel, device: Any, dtype: Any, device_map: Any) -> PreTrainedModel:
    """A loaded model belongs to the caller: it is neither moved nor converted."""
    asked = model.device if device is None else find_device(device, anywhere=True)
    numbers = {asked.index, model.device.index} - {None}  # of GPUs; none named: any
    other_place = asked.type != model.device.type or len(numbers) > 1
    other_kind = dtype is not None and find_dtype(dtype, model.device) not in (model.dtype, "auto")
    if other_place or other_kind or device_map is not None:
        raise ConfigError(
            f"a loaded model ({model.device}, {model.dtype}) was passed with "
            f"device={device!r}, dtype={dtype!r}, device_map={device_map!r}.",
            "a loaded model is used as it is.",
            "call model.to(...) first, or pass its directory instead of the model.",
        )
    return model


def locate(source: Any, what: str) -> Path | str:
    """A directory that exists (of a shipped model: by its name), or a hub name to be asked for."""
    source = shipped.resolve(source)
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"a {type(source).__name__} was passed as {what}.",
            f"a {what} is a directory, a hub name or a loaded object of transformers.",
            way_inside(source),
        )
    path = expanded(source, what)
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(
            f"{source} is a file.",
            f"a {what} is a directory with config.json beside its weights.",
            f"pass {path.parent}.",
        )
    if isinstance(source, Path) or not HUB_NAME.fullmatch(source):
        raise CheckpointError(
            f"there is no directory {source}.",
            f"a {what} is a directory, or a hub name such as owner/name.",
            "check the path" + beside(path) + ".",
        )
    return source


def way_inside(source: Any) -> str:
    """What to do about an object of another kind: many are modules around a model."""
    if hasattr(source, "_orig_mod"):
        return "pass its _orig_mod, the model as it was before torch.compile."
    if hasattr(source, "get_base_model"):
        return "pass its get_base_model(), or merge_and_unload() for weights that hold the adapter."
    if isinstance(source, torch.nn.Module):
        return "pass the transformers model inside it, or the directory it was saved to."
    return "pass one of these."


def expanded(source: str | Path, what: str) -> Path:
    """A path with the home directory that it begins with written out."""
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        raise CheckpointError(
            f"{source} was passed as {what}.",
            "the system knows no home directory of that user.",
            "write the path out in full.",
        ) from error


def beside(path: Path) -> str:
    """Directories that lie where the missing one was looked for."""
    if not path.parent.is_dir():
        return ""
    found = sorted(other.name for other in path.parent.iterdir() if other.is_dir())[:5]
    return f"; {path.parent} holds {', '.join(found)}" if found else ""


def check_directory(path: Path, allow_pickle: bool) -> None:
    """A configuration and weights that may be read."""
    files = sorted(item.name for item in path.iterdir())
    if not files:
        raise CheckpointError(
            f"{path} is empty.",
            "a model directory holds config.json and *.safetensors.",
            "save or download the model again.",
        )
    if "config.json" not in files:
        raise no_config(path, files)
    if any(next(path.glob(pattern), None) for pattern in SAFE):
        return
    pickled = sorted(item.name for pattern in PICKLES for item in path.glob(pattern))
    if pickled and not allow_pickle:
        raise CheckpointError(
            f"{path} has pickled weights only: {', '.join(pickled[:3])}.",
            "loading a pickle can run any code in it, so only *.safetensors are read.",
            "convert them, or pass allow_pickle=True (--allow-pickle) if you trust their source.",
        )
    if not pickled:
        raise CheckpointError(
            f"{path} has no weights.",
            "a model directory holds *.safetensors beside config.json.",
            "save or download the model again.",
        )


def find_device(device: Any, anywhere: bool = False) -> torch.device:
    """A device of this machine; `anywhere`: any that torch has a name for."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        place = None
    if place is None or not (anywhere or is_here(place)):
        gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        others = [kind for kind in ("mps", "xpu") if is_here(torch.device(kind))]
        raise ConfigError(
            f"device={device!r} was asked for.",
            f"devices of this machine: {', '.join(['cpu', *gpus, *others])}.",
            "pass one of these, or leave device out.",
        ) from None
    return place


def is_here(place: torch.device) -> bool:
    """Whether this machine has a device; of kinds that we do not know the load will tell."""
    if place.type == "cuda":
        return torch.cuda.is_available() and (place.index or 0) < torch.cuda.device_count()
    if place.type == "mps":
        return torch.backends.mps.is_available()
    if place.type == "xpu":
        return torch.xpu.is_available() and (place.index or 0) < torch.xpu.device_count()
    return True


def find_dtype(dtype: Any, place: torch.device) -> Any:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is None:
        return torch.float32 if place.type == "cpu" else "auto"
    if dtype not in DTYPES:
        raise ConfigError(
            f"dtype={dtype!r} was asked for.",
            f"dtype is a torch.dtype or one of {', '.join(DTYPES)}.",
            "pass one of these, or leave dtype out.",
        )
    return dtype if dtype == "auto" else getattr(torch, dtype)


def read_config(where: Path | str, options: dict[str, Any]) -> Any:
    if isinstance(where, str):
        check_reachable(where, options)
    else:
        try:
            json.loads((where / "config.json").read_text())
        except ValueError as error:
            raise CheckpointError(
                f"{where}/config.json is no JSON: {error}.",
                "the configuration must be readable.",
                "save or download the model again.",
            ) from error
    try:
        config = AutoConfig.from_pretrained(where, **options)
    except UNREADABLE as error:
        explain(where, error, options)
    refuse_encoder_decoder(config, config.model_type)
    return config


def read_weights(
    where: Path | str, config: Any, dtype: Any, options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    text = config.get_text_config(decoder=True)
    soft = getattr(text, "attn_logit_softcapping", None) is not None
    if soft or config.model_type == "gpt_oss":
        # Fused attention has no soft cap and no sinks; some versions drop them without a word.
        options = {**options, "attn_implementation": "eager"}
    read: Any = AutoModelForCausalLM.from_pretrained
    try:
        model, report = read(where, config=config, dtype=dtype, output_loading_info=True, **options)
    except UNREADABLE as error:
        explain(where, error, options, config)
    return model, report


def read_tokenizer(where: Path | str, trust_remote_code: bool = False) -> Any:
    # Said in so many words: where it is left out, transformers asks whoever sits at the terminal.
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    options["local_files_only"] = isinstance(where, Path)
    if isinstance(where, str):
        check_reachable(where, {"trust_remote_code": trust_remote_code})
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(where, **options)
    except UNREADABLE as error:
        if "trust_remote_code" in str(error):
            explain(where, error, options)
        raise TokenizerError(
            f"the tokenizer of {where} cannot be read: {first_line(error)}.",
            "tokenizer files must be those that save_pretrained wrote.",
            "pass tokenizer= with another directory or a loaded tokenizer.",
        ) from error


def has_words(path: Path) -> bool:
    return any((path / name).is_file() for name in WORDS)


def check_reachable(name: str, options: dict[str, Any]) -> None:
    """Say within seconds that a hub name cannot be had, instead of after minutes of retries."""
    try:
        AutoConfig.from_pretrained(name, **{**options, "local_files_only": True})
        return
    except UNREADABLE:
        pass  # not in the local copy of the hub: it must be asked
    host = urlparse(ENDPOINT)
    if host.hostname and not HF_HUB_OFFLINE:
        if getproxies().keys() & {"http", "https", "all"}:  # not NO_PROXY alone
            return
        try:
            port = host.port or (80 if host.scheme == "http" else 443)
            socket.create_connection((host.hostname, port), timeout=SECONDS).close()
            return
        except (OSError, ValueError):  # a port that is no number
            pass  # told below, together with what is not asked at all
    raise unreached(name, ENDPOINT, HF_HUB_OFFLINE)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, log lines or warnings from loading; what matters becomes an error.

    One thread at a time: these, and the type that transformers makes modules in, are the process's,
    and two that each restore what they found would leave it as the first one had set it.
    """
    with _reading:
        level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity(50)  # nothing below critical
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()  # type: ignore[no-untyped-call]
