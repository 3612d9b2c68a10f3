"""Where a config.json is looked for; the hub is stood in for."""

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from millpond.launch.model_config import Hub, NoModelConfig, read_model_config
from millpond.model.errors import SetupError


def read(model: str) -> object:
    return read_model_config(model, Hub(revision="main", folder="cache", token="secret"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x"}))
    return tmp_path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What the hub answers: ``cached`` and ``found``, a path or an error."""
    answers: dict[str, object] = {"cached": None, "found": AssertionError("the hub was asked")}

    def answer(name: str, file: str, **options: object) -> object:
        assert (name, file) == ("org/model", "config.json")
        assert options == {"revision": "main", "cache_dir": "cache", "token": "secret"}
        if isinstance(answers["found"], BaseException):
            raise answers["found"]
        return answers["found"]

    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda *_a, **_o: answers["cached"]
    )
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", answer)
    return answers


def test_a_folder_is_read(folder: Path) -> None:
    assert read(str(folder)) == {"model_type": "x"}


def test_a_model_that_was_used_before_is_read_without_the_network(
    folder: Path, hub: dict[str, object]
) -> None:
    hub["cached"] = str(folder / "config.json")
    assert read("org/model") == {"model_type": "x"}


def test_a_model_of_the_hub_is_asked_for(folder: Path, hub: dict[str, object]) -> None:
    hub["found"] = str(folder / "config.json")
    assert read("org/model") == {"model_type": "x"}


def test_without_a_network_the_file_is_not_to_be_had(hub: dict[str, object]) -> None:
    hub["found"] = LocalEntryNotFoundError("no network\nretrying")
    with pytest.raises(NoModelConfig, match=r"^no network$"):
        read("org/model")


def test_a_model_that_is_not_there_is_an_error(hub: dict[str, object]) -> None:
    error = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    hub["found"] = error
    with pytest.raises(SetupError, match="no model of the hub named org/model"):
        read("org/model")


def test_a_model_that_comes_from_elsewhere_is_not_looked_for_on_the_hub(
    folder: Path, hub: dict[str, object]
) -> None:
    hub["cached"] = str(folder / "config.json")
    elsewhere = Hub(is_asked=False)
    with pytest.raises(NoModelConfig, match="ModelScope"):
        read_model_config("org/model", elsewhere)
    assert read_model_config(str(folder), elsewhere) == {"model_type": "x"}


@pytest.mark.parametrize("name", ["./none", "/none/at/all", "~/none-at-all"])
def test_a_path_that_is_not_there_is_an_error(name: str) -> None:
    with pytest.raises(SetupError, match="there is no model at"):
        read(name)


def test_a_single_file_has_no_configuration(folder: Path) -> None:
    weights = folder / "model.gguf"
    weights.touch()
    with pytest.raises(NoModelConfig, match="single file"):
        read(str(weights))


def test_a_folder_without_one_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(NoModelConfig, match="there is no"):
        read(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", '"x"'])
def test_a_broken_file_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SetupError, match=r"config\.json"):
        read(str(tmp_path))
