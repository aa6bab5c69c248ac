"""A real language model: the tokens of transformers for chat prompts, on every layout of ranks and every overlap."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from launch.output import read_rows
from tests.ranks import launch_ranks

pytestmark = pytest.mark.slow

NUM_NEW = 48
QUESTIONS = [
    "What is the capital of France?",
    "Name three fruits.",
    "Write a haiku about rain.",
    "What is 12 plus 30?",
    "Explain gravity to a child.",
    "Who wrote Hamlet?",
    "List the days of the week.",
    "What colour is the sky at noon, and why?",
    "Translate 'good morning' to Spanish.",
    "How do I boil an egg?",
    "What is a prime number?",
    "Tell me a joke.",
    "Where do penguins live?",
    "What is the largest planet?",
    "Give me a synonym of happy.",
    "How many legs has a spider?",
    "Describe the sea in one sentence.",
    "What does a compiler do?",
    "Who was Marie Curie?",
    "Why do leaves fall in autumn?",
]
OVERLAP = ["--overlap", "on", "--dbo-prefill-token-threshold", "2", "--dbo-decode-token-threshold", "2"]
LAYOUTS = {
    "1 rank": (1, []),
    "2 ranks, off": (2, []),
    "2 ranks, on": (2, OVERLAP),
    "2 ranks, on, 3 ubatches": (2, [*OVERLAP, "--num-ubatches", "3"]),
    "4 ranks, on": (4, OVERLAP),
}


class Reference:
    """transformers' model of the same function, and its greedy answers."""

    def __init__(self, model, tokenizer):
        self.model = model
        self.prompts = [
            tokenizer.apply_chat_template(_messages(q), add_generation_prompt=True, return_dict=False)
            for q in QUESTIONS
        ]
        self.answers = [self._greedy(prompt) for prompt in self.prompts]

    def _greedy(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()

    def agrees(self, number: int, answer: list[int]) -> bool:
        """Equal tokens, or a first difference at a tie: the two tokens' logits are within 1e-3."""
        expected = self.answers[number]
        if answer == expected:
            return True
        at = next(i for i, (a, b) in enumerate(zip(answer, expected, strict=False)) if a != b)
        ids = torch.tensor([self.prompts[number] + expected[:at]])
        with torch.inference_mode():
            logits = self.model(ids).logits[0, -1]
        return abs(float(logits[answer[at]] - logits[expected[at]])) <= 1e-3


def _messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def cases(demo_gguf, demo_moe, demo_moe_noisy):
    """By name: the directory of the mixture, and its reference, made when first asked for."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made: dict[str, tuple[Path, Reference]] = {}

    def get(name: str) -> tuple[Path, Reference]:
        if name not in made:
            directory = demo_moe if name == "dense source" else demo_moe_noisy
            source = dict(gguf_file=demo_gguf.name) if name == "dense source" else {}
            path = demo_gguf.parent if name == "dense source" else directory
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **source).eval()
            made[name] = directory, Reference(model, AutoTokenizer.from_pretrained(directory))
        return made[name]

    return get


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["dense source", "transformers' Mixtral, noise 0.2"])
@pytest.mark.filterwarnings("default")
def test_chat_answers_equal_transformers(cases, tmp_path, name, layout):
    directory, reference = cases(name)
    num_ranks, options = LAYOUTS[layout]
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": str(i), "messages": _messages(q)} for i, q in enumerate(QUESTIONS)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ["--model", str(directory), "--prompts", str(prompts), "--output", str(out)]
    run = ["-m", "launch", "generate", *files, "--device", "cpu", "--max-new-tokens", str(NUM_NEW), "--json"]
    # A small budget cuts prompts into chunks, which also keeps ranks equally loaded while they prefill.
    done = launch_ranks(num_ranks, [*run, "--max-num-tokens", "64", *options], timeout=900)
    assert done.returncode == 0, done.stderr
    rows = list(read_rows(out).values())
    assert [r["prompt_tokens"] for r in rows] == [len(p) for p in reference.prompts]
    wrong = [i for i, r in enumerate(rows) if not reference.agrees(i, r["token_ids"])]
    assert not wrong
    assert "The capital of France is Paris." in rows[0]["text"] or name != "dense source"
    phases = json.loads(done.stdout)["phases"]
    for phase in ("prefill", "decode"):
        assert (phases[phase]["split"] > 0) == bool(options), phases
