"""What is looked at before engines start: the model as vLLM would get it, and the machine."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from millpond.config import UpConfig, load_settings
from millpond.launch import prepare as prepare_module
from millpond.launch.model_config import Hub, NoModelConfig
from millpond.launch.prepare import prepare
from millpond.launch.shape import Config, Kind
from millpond.model.errors import SetupError
from tests.unit import launch_values as configs


@dataclass
class Asked:
    """What was asked for, and the configuration that is answered."""

    answer: Config | None = None
    models: list[tuple[str, Hub]] = field(default_factory=list[tuple[str, Hub]])

    def read(self, model: str, hub: Hub) -> Config:
        self.models.append((model, hub))
        if self.answer is None:
            raise NoModelConfig("there is no network")
        return self.answer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()
    monkeypatch.setattr(prepare_module, "read_model_config", asked.read)
    monkeypatch.setattr(prepare_module, "pick_device", lambda _wanted, _environ: "cpu")
    monkeypatch.setattr(prepare_module, "engine_version", lambda: "0.32.0")
    return asked


def settings(model: str = "org/model", size: str = "16MiB") -> UpConfig:
    return load_settings({}, config_file=None, flags={"up.model": model, "pool.size": size}).up()


def test_the_hub_is_asked_as_vllm_would_ask_it(asked: Asked) -> None:
    given = ("--hf-token", "secret", "--revision", "r2", "--download-dir", "/d")
    prepare(settings(), given, {})
    prepare(settings(), ("--hf-token",), {})
    prepare(settings(), ("--hf-config-path", "org/other"), {})
    assert asked.models == [
        ("org/model", Hub(revision="r2", folder="/d", token="secret")),
        ("org/model", Hub()),  # the token that the user is logged in with
        ("org/other", Hub()),
    ]


@pytest.mark.parametrize(
    ("said", "is_asked"), [("1", False), (" True ", False), ("0", True), ("", True)]
)
def test_models_of_modelscope_are_not_looked_for_on_the_hub(
    asked: Asked, said: str, is_asked: bool
) -> None:
    prepare(settings(), (), {"VLLM_USE_MODELSCOPE": said})
    ((_, hub),) = asked.models
    assert hub.is_asked is is_asked


def test_a_model_that_cannot_be_looked_at_is_left_to_the_engine(asked: Asked) -> None:
    prepared = prepare(settings(), (), {})
    assert asked.models
    assert prepared.unread == "there is no network"
    assert prepared.shape.kind is Kind.UNKNOWN
    prepared.check()


def test_what_cannot_work_is_told_by_the_check_alone(asked: Asked) -> None:
    asked.answer = configs.QWEN35_TEXT
    prepared = prepare(settings(), ("--port", "1"), {})
    assert prepared.choice.argv
    with pytest.raises(
        SetupError, match=r"(?s)cannot work:\n- --port would .*\n- .* pool of 16 MiB"
    ):
        prepared.check()


def test_a_folder_needs_no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prepare_module, "pick_device", lambda _wanted, _environ: "cpu")
    monkeypatch.setattr(prepare_module, "engine_version", lambda: "0.32.0")
    (tmp_path / "config.json").write_text(json.dumps(configs.QWEN3))
    prepared = prepare(settings(str(tmp_path)), (), {"VLLM_USE_MODELSCOPE": "1"})
    assert (prepared.shape.kind, prepared.unread) == (Kind.ATTENTION, None)
