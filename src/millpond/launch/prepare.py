"""Before engines start: the model and the machine are looked at, and arguments are chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

from millpond.arena.memory import available_bytes
from millpond.config import UpConfig
from millpond.launch.arguments import Choice, Situation, choose_arguments
from millpond.launch.given import GivenArguments
from millpond.launch.model_config import Hub, NoModelConfig, read_model_config
from millpond.launch.refusals import find_refusals
from millpond.launch.resources import engine_version, pick_device, visible_gpus
from millpond.launch.shape import UNKNOWN, ModelShape, model_shape
from millpond.model.errors import SetupError

_MODELSCOPE: Final = "VLLM_USE_MODELSCOPE"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was found out about model and machine, and chosen for them.

    ``unread`` says why the model's configuration was not to be had; None where it was read.
    """

    shape: ModelShape
    situation: Situation
    choice: Choice
    refusals: Sequence[str]
    unread: str | None

    def check(self) -> None:
        """Raise ``SetupError`` with all that cannot work."""
        if self.refusals:
            told = "".join(f"\n- {refusal}" for refusal in self.refusals)
            raise SetupError("this cannot work:" + told)


def prepare(config: UpConfig, engine_args: Sequence[str], environ: Mapping[str, str]) -> Prepared:
    """Choose the engines' arguments, which go before ``engine_args``, those of the user.

    May ask the network for the model's config.json. Raises ``SetupError`` where there is no such
    model, or no vLLM.
    """
    given = GivenArguments(engine_args)
    device = cast("Literal['cpu', 'cuda']", pick_device(config.device, environ))
    situation = Situation(
        device=device,
        engine_version=engine_version(),
        num_replicas=config.num_replicas,
        num_gpus=len(visible_gpus(environ)) if device == "cuda" else 0,
        pool_bytes=config.pool.size_bytes,
        state_ratio=config.pool.retention.state_ratio,
        available_bytes=available_bytes(),
    )
    shape, unread = UNKNOWN, None
    try:
        model = given.value("--hf-config-path") or config.model
        shape = model_shape(read_model_config(model, _hub(given, environ)))
    except NoModelConfig as error:
        unread = str(error)
    choice = choose_arguments(shape, given, situation)
    refusals = find_refusals(shape, given, situation, choice)
    return Prepared(shape, situation, choice, refusals, unread)


def _hub(given: GivenArguments, environ: Mapping[str, str]) -> Hub:
    return Hub(
        revision=given.value("--revision"),
        folder=given.value("--download-dir"),
        token=given.value("--hf-token") or None,
        is_asked=environ.get(_MODELSCOPE, "").strip().lower() not in ("1", "true"),
    )
