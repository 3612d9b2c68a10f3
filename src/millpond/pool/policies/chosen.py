"""The policies by the names under which they are configured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from millpond.model.names import Admission, Eviction
from millpond.pool.policies.admission import AlwaysAdmit, SecondTouch
from millpond.pool.policies.arc import ArcPolicy
from millpond.pool.policies.base import AdmissionPolicy, PolicyFactory
from millpond.pool.policies.lru import LruPolicy

EVICTION: Final[dict[Eviction, PolicyFactory]] = {
    Eviction.LRU: LruPolicy,
    Eviction.ARC: ArcPolicy,
}
ADMISSION: Final[dict[Admission, Callable[[], AdmissionPolicy]]] = {
    Admission.ALWAYS: AlwaysAdmit,
    Admission.SECOND_TOUCH: SecondTouch,
}
