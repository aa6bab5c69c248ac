"""From prompt files to this rank's requests, and the rows of prompts that cannot run.

Its own file because it is the part of `generate` in which ranks must come to the same list: rank 0 reads the files and
shares them through the store, so standard input and a file that only one host has are no special cases. Every rank
takes prompts `rank, rank + world_size, ...` of those that are to run and encodes only its own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dbo.errors import ConfigError
from launch.cli import FAILED, CommandError
from launch.config import GenerateOptions
from launch.mesh import Mesh
from launch.output import Row, error_row, read_rows, write_rows
from launch.sampling import SamplingParams
from launch.scheduler import Limits, Request, Scheduler
from launch.session import read_shared, together
from launch.text import StopStrings, TextCodec
from launch.workload import Prompt, read_prompts
from moe.config import ModelConfig

_PIECE = 2**20  # characters in one value of the store, which takes 8 MiB at most


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be done, the same on every rank."""

    prompts: Sequence[Prompt]  # those that are to run
    order: Mapping[str, int]  # place of every prompt of the file, by id
    num_bad_lines: int


def read_job(options: GenerateOptions, mesh: Mesh) -> Job:
    """Read the prompts, report malformed lines, look into the output file. Collective; raises CommandError on all."""
    text = together(mesh, "prompts", lambda: read_prompt_text("--prompts", options.prompts) if mesh.rank == 0 else "")
    source = "standard input" if options.prompts == "-" else options.prompts
    prompts, bad = read_prompts(share_text(mesh, "prompts", text), source, _default_params(options))
    for line in bad if mesh.rank == 0 else []:
        print(f"error: {line}", file=sys.stderr, flush=True)
    if bad and options.strict:
        raise CommandError(f"{len(bad)} malformed lines, the first at {bad[0]} (--strict)", FAILED)
    kept = together(mesh, "output", lambda: list(_kept_rows(options)) if mesh.rank == 0 else [])
    done = set(json.loads(share_text(mesh, "kept", json.dumps(kept))))
    return Job(
        prompts=[prompt for prompt in prompts if prompt.id not in done],
        order={prompt.id: prompt.index for prompt in prompts},
        num_bad_lines=len(bad),
    )


def make_requests(
    job: Job, options: GenerateOptions, model: ModelConfig, limits: Limits, codec: TextCodec | None, mesh: Mesh
) -> tuple[list[Request], list[Row]]:
    """This rank's share of the job. Collective under --strict, which raises CommandError if a prompt cannot run."""
    checks = Scheduler(limits)
    requests: list[Request] = []
    refused: list[Row] = []
    for prompt in job.prompts[mesh.rank :: mesh.world_size]:
        try:
            token_ids = token_ids_of(prompt, codec, model.vocab_size)
            why = checks.check(len(token_ids))
        except ValueError as error:
            token_ids, why = [], str(error)
        if why is None:
            requests.append(_request(prompt, token_ids, model, codec))
        else:
            refused.append(error_row(prompt.id, len(token_ids), why, mesh.rank))
    if options.strict:
        together(mesh, "strict", lambda: _insist(refused))
    return requests, refused


def read_prompt_text(option: str, file: str) -> str:
    """The text of a prompt file, or of standard input for `-`. Raises ConfigError, which names `option`."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(option, file, "a file that can be read, or -", str(error.strerror)) from None
    # Bytes that are no text become \xff, which is no JSON: the line is reported, the others run.
    return data.decode("utf-8-sig", errors="backslashreplace")


def start_output(options: GenerateOptions) -> None:
    """Make the output file what it is before the run: empty, or the answers it keeps. Last thing before the run, so
    that one that cannot start leaves the file alone. Raises ConfigError."""
    rows = _kept_rows(options)
    try:
        write_rows(Path(options.output), list(rows.values()))
    except OSError as error:
        raise ConfigError("--output", options.output, "a file that can be written", str(error.strerror)) from None


def _kept_rows(options: GenerateOptions) -> dict[str, Row]:
    """The answers that --resume keeps, by id; prompts that were in error run again. Raises ConfigError for a file that
    cannot be written, or that holds something else."""
    file = Path(options.output)

    def refuse(allowed: str, remedy: str) -> ConfigError:
        return ConfigError("--output", options.output, allowed, remedy)

    try:
        if file.exists() and not file.is_file():
            raise refuse("a file", "a directory, device or pipe cannot be put in order at the end")
        if file.exists() and options.prompts != "-" and os.path.samefile(file, options.prompts):
            raise refuse("another file than --prompts", "the answers would replace the prompts")
        with tempfile.TemporaryFile(dir=file.parent):
            rows = read_rows(file) if options.resume else {}
        begins = file.read_bytes()[:1] if options.resume and file.exists() else b""
    except OSError as error:
        raise refuse("a file that can be written", str(error.strerror)) from None
    if begins not in (b"", b"{") or not all("finish_reason" in row for row in rows.values()):
        raise refuse("answers of an earlier run, with --resume", "leave --resume out to replace the file")
    return {key: row for key, row in rows.items() if row["finish_reason"] != "error"}


def share_text(mesh: Mesh, name: str, text: str) -> str:
    """The text of rank 0, on every rank. Collective."""
    if mesh.rank == 0:
        pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
        for number, piece in enumerate(pieces):
            mesh.store.set(f"{name}/{number}", piece)
        mesh.store.set(f"{name}/count", str(len(pieces)))
        return text
    count = int(read_shared(mesh, f"{name}/count"))
    return "".join(read_shared(mesh, f"{name}/{number}").decode() for number in range(count))


def _default_params(options: GenerateOptions) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        ignore_eos=options.ignore_eos,
    )


def token_ids_of(prompt: Prompt, codec: TextCodec | None, vocab_size: int) -> list[int]:
    """The tokens of a prompt. Raises ValueError with the reason why it cannot run."""
    tokens = _encode(prompt, codec)
    if tokens and max(tokens) >= vocab_size:
        whose = "" if prompt.kind == "token_ids" else " (the tokenizer is not this model's)"
        raise ValueError(f"token id {max(tokens)} is not below the vocabulary size {vocab_size}{whose}")
    return tokens


def _encode(prompt: Prompt, codec: TextCodec | None) -> list[int]:
    if prompt.kind == "token_ids":
        if prompt.params.stop and codec is None:
            raise ValueError("stop strings need a tokenizer.json in the model directory")
        return list(prompt.content)
    if codec is None:
        raise ValueError("the model directory has no tokenizer.json; give token_ids")
    if not prompt.content:
        return []
    return codec.encode(prompt.content) if prompt.kind == "prompt" else codec.encode_chat(prompt.content)


def _request(prompt: Prompt, token_ids: list[int], model: ModelConfig, codec: TextCodec | None) -> Request:
    return Request(
        id=prompt.id,
        index=prompt.index,
        prompt_ids=token_ids,
        params=prompt.params,
        eos_token_ids=frozenset(model.eos_token_ids),
        stop_text=StopStrings(codec, prompt.params.stop) if codec and prompt.params.stop else None,
    )


def _insist(refused: Sequence[Row]) -> None:
    if refused:
        raise CommandError(f"prompt {refused[0]['id']!r}: {refused[0]['error']} (--strict)", FAILED)
