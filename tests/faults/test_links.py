"""What a worker tells of its link to the arena, and what of that is believed."""

from typing import Any

import msgspec
import pytest

from millpond.model.limits import LINK_PROBLEM_LENGTH_MAX
from millpond.service import protocol
from tests.faults.raw import RawClient, scheduler_hello
from tests.faults.world import Daemon


def test_a_worker_tells_of_its_link_and_the_status_does(daemon: Daemon) -> None:
    told = protocol.Link(h2d_gb_s=55.0, d2h_gb_s=54.0, allowed_gb_s=57.6)
    with RawClient(daemon.socket_path) as scheduler, RawClient(daemon.socket_path) as worker:
        scheduler.greet(scheduler_hello())
        worker.greet(scheduler_hello(role="worker"))
        worker.send(protocol.Link(problem="ulimit -l"))
        worker.send(told)
        worker.send(protocol.Status(id=1))
        reply = worker.reply()
        assert isinstance(reply, protocol.StatusReply)
        clients: Any = reply.statistics["service"]
        links = {client["role"]: client["link"] for client in clients["clients"]}
        assert links["worker"] == msgspec.to_builtins(told)
        assert links["scheduler"] is None


@pytest.mark.parametrize(
    "link",
    [
        protocol.Link(h2d_gb_s=float("nan")),
        protocol.Link(d2h_gb_s=-1.0),
        protocol.Link(allowed_gb_s=float("inf")),
        protocol.Link(problem="x" * (LINK_PROBLEM_LENGTH_MAX + 1)),
    ],
    ids=["nan", "negative", "endless", "long"],
)
def test_a_link_that_cannot_be_is_a_bad_frame(daemon: Daemon, link: protocol.Link) -> None:
    with RawClient(daemon.socket_path) as scheduler, RawClient(daemon.socket_path) as worker:
        scheduler.greet(scheduler_hello())
        worker.greet(scheduler_hello(role="worker"))
        worker.send(link)
        assert worker.is_hung_up()
    assert daemon.status()["service"]["bad_frames"] == 1
