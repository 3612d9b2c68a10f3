"""Getting a model's config.json: from its folder, or from the hub as vLLM itself would."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from millpond.launch.shape import Config
from millpond.model.errors import SetupError

_CONFIG_FILE: Final = "config.json"


class NoModelConfig(Exception):
    """There is a model, perhaps, but no config.json to be had; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """How vLLM gets at a model that is no local folder.

    ``folder`` is where the hub's files are kept, ``token`` what it is shown; None stands for the
    user's own. ``is_asked`` is False where models come from elsewhere.
    """

    revision: str | None = None
    folder: str | None = None
    token: str | None = None
    is_asked: bool = True


def read_model_config(model: str, hub: Hub) -> Config:
    """Return the config.json of a local folder or of a model on the hub.

    A model that was used before is read from the hub's cache. Else the network is asked; where
    there is none, that takes half a minute. Raises ``NoModelConfig`` where only the file is out of
    reach, and ``SetupError`` where there is no such model.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _read(path / _CONFIG_FILE)
    if path.is_file():
        raise NoModelConfig(f"{model} is a single file")
    if model.startswith(("/", ".", "~")):
        raise SetupError(f"there is no model at {model}: check --model")
    if not hub.is_asked:
        raise NoModelConfig("it comes from ModelScope")
    return _read(_download(model, hub))


def _download(model: str, hub: Hub) -> Path:
    # It comes with vLLM, so it is there wherever an engine can be started.
    try:
        import huggingface_hub
        from huggingface_hub.errors import RepositoryNotFoundError
    except ImportError as error:
        raise NoModelConfig("huggingface_hub is not installed") from error
    try:
        cached = huggingface_hub.try_to_load_from_cache(
            model, _CONFIG_FILE, cache_dir=hub.folder, revision=hub.revision
        )
        if isinstance(cached, str):
            return Path(cached)
        found = huggingface_hub.hf_hub_download(  # pyright: ignore[reportUnknownMemberType]
            model, _CONFIG_FILE, revision=hub.revision, cache_dir=hub.folder, token=hub.token
        )
    except RepositoryNotFoundError as error:
        raise SetupError(
            f"there is no folder and no model of the hub named {model}, or it needs a token: "
            "check --model, and HF_TOKEN or --hf-token"
        ) from error
    except (OSError, ValueError) as error:
        raise NoModelConfig(str(error).strip().partition("\n")[0]) from error
    return Path(found)


def _read(path: Path) -> Config:
    try:
        config: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NoModelConfig(f"there is no {path}") from error
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, Mapping):
        raise SetupError(f"{path} is not a JSON object")
    return cast("Config", config)
