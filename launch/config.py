"""Every option of the command line, declared once: name, type, default, check and help.

Its own file because an option has several readers (the command line, `--config FILE`, the engine, the start-up
comparison between ranks, the banner) and they must not disagree. A field of a frozen dataclass *is* the option:
`max_num_tokens` is `--max-num-tokens` on the command line and `max_num_tokens` (or with dashes) in a file.

Invariants: an options object is valid once it exists; nothing here imports torch, so that a wrong option is reported
before anything slow starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dbo.errors import ConfigError


@dataclass(frozen=True)
class Check:
    """A condition on a value, with the words that say what is allowed."""

    allowed: str
    accepts: Callable[[Any], bool]


def at_least(bound: float) -> Check:
    """Numbers from `bound` up."""
    return Check(f"{bound} or more", lambda value: value >= bound)


def above_to(low: float, high: float) -> Check:
    """Numbers in (low, high]."""
    return Check(f"above {low}, up to {high}", lambda value: low < value <= high)


@dataclass(frozen=True, kw_only=True)
class OptionSpec:
    """What a field says about its option besides name, type and default."""

    help: str
    check: Check | None = None
    parse: Callable[[str], Any] | None = None  # text -> value; raises ValueError that says what is allowed
    metavar: str | None = None


def option(default: Any = dataclasses.MISSING, help: str = "", **spec: Any) -> Any:
    """A dataclass field that is an option; without a default it must be given."""
    return field(default=default, metadata={"option": OptionSpec(help=help, **spec)})


def parse_bytes(text: str) -> int:
    """`4GiB`, `512MiB`, `65536` -> bytes. Raises ValueError."""
    units = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].lower() not in units:
        raise ValueError("a number of bytes, KiB, MiB, GiB or TiB, such as 4GiB")
    return int(float(match[1]) * units[match[2].lower()])


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of the option sets: checks every declared field on construction (ConfigError)."""

    def __post_init__(self) -> None:
        for name, spec in specs(type(self)).items():
            value = getattr(self, name)
            choices = choices_of(type(self), name)
            if choices and value not in choices:
                raise ConfigError(flag(name), value, ", ".join(choices), closest(str(value), choices))
            if spec.check and value is not None and not spec.check.accepts(value):
                raise ConfigError(flag(name), value, spec.check.allowed, "")


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options):
    """What a loaded model and its engine need: shared by every command that runs steps."""

    model: str = option(help="Hugging Face model directory (config.json, safetensors, tokenizer).", metavar="DIR")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "Where to run; auto takes CUDA where there is one.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Type of weights and activations; auto keeps the checkpoint's."
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto", "dummy: seeded random weights, the same for any number of ranks; only config.json is read."
    )
    all2all: Literal["auto", "local", "torch", "deepep", "deepep_ht", "deepep_ll"] = option(
        "auto", "How tokens reach their experts; auto: local on one rank, deepep if it can, else torch (gloo, NCCL)."
    )
    overlap: Literal["off", "on", "auto"] = option(
        "off", "Run steps as interleaved ubatches where all ranks agree to; auto: where a profile says that it pays."
    )
    profile: str | None = option(None, "What --overlap auto decides by: a file made by calibrate.", metavar="FILE")
    num_ubatches: int = option(2, "Ubatches a step is cut into.", check=at_least(2))
    dbo_prefill_token_threshold: int = option(
        512, "Tokens every rank needs before a step with prefill is cut.", check=at_least(0)
    )
    dbo_decode_token_threshold: int = option(
        32, "Tokens every rank needs before a decode step is cut.", check=at_least(0)
    )
    cut: Literal["tokens", "requests", "balanced"] = option(
        "tokens", "Where to cut: equal tokens, the nearest request boundary, or equal attention work."
    )
    cut_alignment: int = option(1, "Cuts fall on multiples of this many tokens.", check=at_least(1))
    allow_single_rank: bool = option(False, "Let one rank alone split, for study.")
    driver: Literal["threads", "greenlet"] = option("threads", "What carries the ubatches of a rank.")
    batch_invariant: bool = option(
        False,
        "Make a token's result, bit for bit, independent of what else is in its batch and of how that is cut or "
        "padded: slower, for comparing.",
    )
    comm_sms: str = option(
        "20",
        "SMs set aside for messages while ubatches run, where the transport takes a number; auto: measured once for "
        "this model, host and number of ranks; 0: none, and messages take as many as those of whole steps.",
        check=Check(
            "auto, or an even number from 0 (none) to 64",
            lambda value: value == "auto" or (value.isdecimal() and int(value) % 2 == 0 and int(value) <= 64),
        ),
        metavar="N|auto",
    )
    whole_comm_sms: int | None = option(
        None,
        "SMs for the messages of steps that are not cut, where the transport takes a number; the default takes as many "
        "as help. With 8, and --comm-sms 8, messages inside a host take as long as over a network card.",
        check=Check("an even number from 2 to 64", lambda value: value % 2 == 0 and 2 <= value <= 64),
        metavar="N",
    )
    max_num_tokens: int = option(8192, "Tokens a rank computes in one step, at most.", check=at_least(1))
    max_num_seqs: int = option(256, "Requests a rank works on at once, at most.", check=at_least(1))
    max_model_len: int | None = option(
        None, "Longest prompt + answer in tokens; the default is the model's own limit.", check=at_least(2)
    )
    block_size: int = option(16, "Tokens in one block of the KV cache.", check=at_least(1))
    kv_cache_memory: int = option(
        4 * 2**30, "Memory for the KV cache of a rank, at most.", check=at_least(1), parse=parse_bytes, metavar="SIZE"
    )
    offload_layers: int = option(
        0,
        "Layers whose experts live in host memory and are copied in ahead of use; two at a time are on the device.",
        check=Check("0, or 3 or more", lambda value: value == 0 or value >= 3),
    )
    seed: int = option(0, "Seed of sampling and of dummy weights.", check=at_least(0))
    step_timeout: float = option(
        60.0,
        "Seconds after which a step that waits is given up; 0 waits for ever.",
        check=Check("0 or more, finite", lambda value: 0 <= value < math.inf),
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "Least severe messages shown.")
    json: bool = option(False, "Print a summary as one JSON object on standard output.")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(EngineOptions):
    """`generate`: prompts in, answers out."""

    prompts: str = option(help="Prompts, one JSON object a line; - reads standard input.", metavar="FILE")
    output: str = option(help="Answers, one JSON object a line, in the order of the prompts.", metavar="FILE")
    max_new_tokens: int = option(64, "Tokens to generate for a prompt, at most.", check=at_least(1))
    temperature: float = option(0.0, "0 is greedy.", check=at_least(0))
    top_p: float = option(1.0, "Sample from the likeliest tokens that hold this probability.", check=above_to(0, 1))
    top_k: int = option(0, "Sample from this many likeliest tokens; 0 = all.", check=at_least(0))
    ignore_eos: bool = option(False, "Go on after the model's end token.")
    logprobs: int | None = option(
        None, "Add the log-probability of each token and of this many likeliest ones.", check=at_least(0)
    )
    resume: bool = option(False, "Keep the answers in the output file and run the other prompts only, errors again.")
    metrics: str | None = option(None, "Write what every step did, one JSON object a line.", metavar="FILE")
    metrics_port: int | None = option(
        None, "Let Prometheus read metrics at this port of rank 0's host; 0 takes a free one.", check=at_least(0)
    )
    metrics_host: str = option("127.0.0.1", "Address that --metrics-port listens on.", metavar="ADDRESS")
    strict: bool = option(False, "Stop at the first prompt that cannot run, before any runs.")
    cudagraph_mode: Literal["none", "piecewise", "full", "full-decode-only", "full-and-piecewise"] = option(
        "none", "Run steps from CUDA graphs: in segments between attention calls, whole, or by kind of step."
    )
    cudagraph_capture_sizes: str | None = option(
        None,
        "Tokens of the steps to capture; steps are padded to them. The default has many small and fewer large ones.",
        check=Check("numbers of tokens such as 1,2,4", lambda text: bool(re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text))),
        metavar="N,N,...",
    )
    cudagraph_memory_limit: int | None = option(
        None,
        "Capture no further size once graphs take so much memory.",
        check=at_least(1),
        parse=parse_bytes,
        metavar="SIZE",
    )


@dataclass(frozen=True, kw_only=True)
class StudyOptions(EngineOptions):
    """What `ab` and `calibrate` share: a model, or no more than its shape."""

    model: str | None = option(None, "Model directory, as for generate; or give --shape.", metavar="DIR")  # type: ignore[assignment]
    shape: str | None = option(
        None,
        "A published model's shape with random weights: qwen3-30b-a3b, qwen3-235b-a22b, deepseek-v3, mixtral-8x7b, "
        "olmoe, gpt-oss-120b; or one for study: tiny, link.",
        metavar="NAME",
    )
    num_layers: int | None = option(
        None, "Layers with experts to run of a model with random weights.", check=at_least(1)
    )


@dataclass(frozen=True, kw_only=True)
class ABOptions(StudyOptions):
    """`ab`: one workload, whole and split and overlapped."""

    routing: str = option(
        "model",
        "Which experts tokens go to: the router's choice (model), all alike (uniform), some more often than others "
        "(zipf:1.2), or the same for all (one-expert).",
        check=Check(
            "model, uniform, one-expert, or zipf:A with A from 0 to 9",
            lambda value: bool(re.fullmatch(r"model|uniform|one-expert|zipf:\d(\.\d+)?", value)),
        ),
    )
    workload: str = option(
        help="Prompt file (as for generate), Azure or Mooncake trace, or "
        "synthetic:requests=16,prompt_tokens=64-256,new_tokens=lognormal:16:0.8; slashes between values "
        "(prompt_tokens=64/256/1024) compare the arms for each.",
        metavar="FILE|synthetic:...",
    )
    rate: str | None = option(
        None,
        "How requests arrive: so many a second (2.5), or at a multiple of the trace's own pace (2x); the default is as "
        "fast as they are taken.",
        check=Check(
            "requests a second, such as 2.5, or a multiple of the trace's pace, such as 2x",
            lambda value: bool(re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)?x?", value)),
        ),
        metavar="N|Nx",
    )
    max_requests: int | None = option(
        None, "Take this many requests of the workload, the first ones.", check=at_least(1)
    )
    report: str = option(help="Directory for report.html, ab.json and trace.json.", metavar="DIR")
    arms: str = option("whole,split,overlap", "Arms to compare, of whole, split, overlap and auto.")
    rounds: int = option(
        20, "Measured rounds; every arm runs once in each. A speed-up is stated from 5 on.", check=at_least(1)
    )
    warmup: int = option(2, "Rounds before those, not counted.", check=at_least(0))
    skip_breakdown: bool = option(
        False, "Take no step apart at the end: no ceiling and no shares, and a shorter run where steps are long."
    )
    max_new_tokens: int = option(16, "Tokens to generate for a prompt of a file that does not say.", check=at_least(1))
    overlap: Literal["off", "on"] = "on"  # the arms decide, so it is no option here


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(StudyOptions):
    """`calibrate`: what steps cost here, whole and overlapped."""

    out: str = option(help="The profile, for --overlap auto --profile and for plan.", metavar="PROFILE.json")
    prefill_tokens: str = option(
        "auto", "Tokens a rank of the prefill steps to measure: 64,256,1024; auto: powers of 2 that fit."
    )
    decode_tokens: str = option("auto", "The same for decode steps: requests of a rank.")
    prompt_tokens: int = option(512, "Longest prompt in a prefill step.", check=at_least(1))
    context: int = option(64, "Tokens before each request's decode steps.", check=at_least(1))
    comm_sms: str = option(  # several, so the check of one does not hold
        "auto", "SMs for communication to try in overlap, where the transport has a choice; auto: 8,16,24."
    )
    budget: float = option(100.0, "Seconds that measuring may take.", check=at_least(1), metavar="SECONDS")
    max_rounds: int = option(15, "Measurements of each step, at most.", check=at_least(3))
    overlap: Literal["off", "on", "auto"] = "on"  # both arms are measured, so it is no option here
    profile: str | None = None


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Options):
    """`plan`: step times for clusters that are not here."""

    profile: str | None = option(None, "What calibrate measured.", metavar="FILE")
    shape: str | None = option(
        None,
        "Instead of a profile: a model whose costs are derived from --hardware's figures, not measured.",
        metavar="NAME",
    )
    hardware: Literal["h200"] = option("h200", "What --shape runs on.")
    derive: str | None = option(None, "Write the derived profile to this file.", metavar="FILE")
    context: int = option(2000, "With --shape: tokens before each request's decode step.", check=at_least(1))
    prompt_tokens: int = option(4096, "With --shape: tokens of a prompt in prefill.", check=at_least(1))
    ep: str | None = option(None, "Ranks to predict for, such as 8,64: each 2 to 1024; default: some usual ones.")
    phase: Literal["prefill", "decode", "both"] = option("both", "Which steps.")
    tokens: str | None = option(None, "Tokens a rank, such as 32,64,128,256; default: those of the profile.")
    link: str = option("400gb", "Between nodes: measured, nvlink4, nvlink5, 200gb, 400gb, 800gb, or GB/s,us as 45,10.")
    node_link: str = option("nvlink4", "Inside a node, the same.")
    gpus_per_node: int = option(8, "Ranks inside a node.", check=at_least(1))
    redundant_experts: int = option(0, "Copies of experts beside the model's own.", check=at_least(0))
    imbalance: float = option(
        1.0, "Load of the busiest rank over the mean, beyond what chance makes of it.", check=at_least(1)
    )
    report: str | None = option(None, "Write an HTML page with a plot.", metavar="FILE.html")
    json: bool = option(False, "Print one JSON object on standard output instead of a table.")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Options):
    """`doctor`: what works between these ranks."""

    device: Literal["auto", "cpu", "cuda"] = option("auto", "What to examine; auto takes CUDA where there is one.")
    timeout_per_check: float | None = option(
        None, "Seconds for each check, instead of its own limit.", check=at_least(0.1), metavar="SECONDS"
    )
    expect_interface: str | None = option(
        None, "Network interface that every rank should use; another one is a failure.", metavar="NAME"
    )
    json: bool = option(False, "Print one JSON object on standard output instead of tables.")


def specs(options: type[Options]) -> dict[str, OptionSpec]:
    """The declared options of a set, by field name, in order of declaration (required ones first)."""
    fields = sorted(dataclasses.fields(options), key=lambda f: f.default is not dataclasses.MISSING)
    return {f.name: f.metadata["option"] for f in fields if "option" in f.metadata}


def defaults(options: type[Options]) -> dict[str, Any]:
    """Default by field name; `dataclasses.MISSING` for a required option."""
    return {f.name: f.default for f in dataclasses.fields(options)}


def value_type(options: type[Options], name: str) -> Any:
    """The type of a field's values: `int` for `int | None`, a Literal as it is."""
    hint = typing.get_type_hints(options)[name]
    inner = [a for a in typing.get_args(hint) if a is not type(None)]
    return inner[0] if len(inner) == 1 and type(None) in typing.get_args(hint) else hint


def choices_of(options: type[Options], name: str) -> tuple[str, ...]:
    """The values a Literal field allows; empty for other types."""
    hint = value_type(options, name)
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def flag(name: str) -> str:
    """`max_num_tokens` -> `--max-num-tokens`."""
    return "--" + name.replace("_", "-")


def closest(word: str, words: Iterable[str]) -> str:
    """`did you mean x?` for the nearest of `words`, or nothing."""
    near = difflib.get_close_matches(word, list(words), n=1)
    return f"did you mean {near[0]}?" if near else ""


def read_options_file(file: Path, options: type[Options]) -> dict[str, str]:
    """The options in a TOML or JSON file as text, by field name, to be parsed like the command line's.

    Raises ConfigError for a file that cannot be read, an unknown key (with the nearest known one) and a value that
    is a list or a table.
    """
    known = specs(options)
    found: dict[str, str] = {}
    for key, value in _load(file).items():
        name = key.replace("-", "_")
        if name not in known:
            raise ConfigError(f"{file}: {key}", value, "an option of this command", closest(name, known))
        if not isinstance(value, str | int | float | bool):
            raise ConfigError(f"{file}: {key}", value, "one plain value", "")
        found[name] = str(value)
    return found


def _load(file: Path) -> Mapping[str, Any]:
    try:
        text = file.read_text()
        loaded = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError("--config", str(file), "a readable TOML or JSON file", str(error)) from None
    if not isinstance(loaded, dict):
        raise ConfigError("--config", str(file), "an object of options", "")
    return loaded
