"""Which backends the conformance suite runs against: those of the project, or `--backend module:Class`."""

from __future__ import annotations

import pytest

OURS = {
    "local": (1,),
    "torch": (1, 2, 3, 4),
    "tests.moe.all2all.forms:dense": (2, 3),
    "tests.moe.all2all.forms:counted": (2, 3),
    "examples.custom_all2all:GatherAll2All": (2, 3),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", help="all2all to test, module:Class; default: the project's own")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"backend", "ep_size"} <= set(metafunc.fixturenames):
        named = metafunc.config.getoption("--backend", default=None)
        backends = {named: (1, 2, 3)} if named else OURS
        pairs = [(name, n) for name, sizes in backends.items() for n in sizes]
        metafunc.parametrize(("backend", "ep_size"), pairs, ids=[f"{name.split(':')[-1]}-{n}" for name, n in pairs])
