"""The tiny models, written once."""

from __future__ import annotations

import logging

import pytest

from tests.launch import tiny

NUM_PROMPTS, NUM_NEW = 24, 8


class TinyModel:
    """A model directory, prompts, and what transformers answers to them."""

    def __init__(self, family: str, directory):
        hf = tiny.build(family)
        hf.save_pretrained(directory)
        self.directory = str(directory)
        self.prompts = tiny.prompts(NUM_PROMPTS)
        self.answers = [tiny.greedy(hf, prompt, NUM_NEW) for prompt in self.prompts]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    made: dict[str, TinyModel] = {}

    def get(family: str) -> TinyModel:
        if family not in made:
            made[family] = TinyModel(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture
def fresh_logging():
    """Commands set up logging for their process; here the next test gets it back as it was."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
