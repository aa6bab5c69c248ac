"""From `--overlap auto --profile FILE` to an engine that decides by it, on all ranks alike.

Its own file because it joins the profile, which knows no ranks, with the ranks: rank 0 reads the file and shares it, so
that a host with another copy cannot decide otherwise.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TypeVar

from dbo.config import DBOConfig
from dbo.errors import ConfigError
from launch.config import EngineOptions, defaults
from launch.engine import Engine
from launch.environment import describe_environment
from launch.prepare import share_text
from launch.profile import Setup, costs_for, fingerprint, read_text
from launch.session import together
from moe.sms import whole_comm_sms

OptionsT = TypeVar("OptionsT", bound=EngineOptions)


def check_profile_option(options: EngineOptions) -> None:
    """Raises ConfigError where a profile is given that nothing would read."""
    if options.profile is not None and options.overlap != "auto":
        raise ConfigError("--profile", options.profile, f"--overlap auto, not {options.overlap}", "leave one out")


def setup_of(engine: Engine, dbo: DBOConfig) -> Setup:
    """What runs here, as a profile names it."""
    return Setup(
        model=fingerprint(engine.model.config),
        ranks=engine.mesh.world_size,
        device=engine.mesh.device.type,
        all2all=engine.all2all.name,
        num_ubatches=dbo.num_ubatches,
        driver=dbo.driver,
        cut=dbo.cut,
        comm_sms=None,
        whole_comm_sms=whole_comm_sms(engine.all2all, engine.mesh.device),
    )


def use_profile(options: OptionsT, engine: Engine, dbo: DBOConfig) -> OptionsT:
    """Give the engine the costs that `auto` decides by; nothing for other settings of the overlap.

    Returns the options with the number of SMs for communication that the profile was measured with, where it has one:
    graphs are captured with it. Collective. Warns, once, if there is no profile (thresholds then decide), and of what
    differs from where it was measured. Raises CommandError on every rank for one that does not hold here, naming both
    values.
    """
    mesh = engine.mesh
    if dbo.overlap != "auto":
        return options
    file = options.profile
    if file is None:
        if mesh.rank == 0:
            logging.warning(
                "--overlap auto without --profile goes by the thresholds; measure a profile with `launch calibrate`"
            )
        return options
    text = share_text(mesh, "profile", together(mesh, "profile", lambda: read_text(file) if mesh.rank == 0 else ""))
    here, environment = setup_of(engine, dbo), describe_environment(mesh.device)
    profile, warnings = together(mesh, "costs", lambda: costs_for(text, file, here, environment))
    engine.costs = profile.step_costs()
    if (mode := getattr(options, "cudagraph_mode", "none")) != "none":
        warnings.append(f"cudagraph-mode none in the profile, {mode} here")
    num_sms = profile.setup.comm_sms
    if num_sms is not None and options.comm_sms not in ("auto", defaults(type(options))["comm_sms"], str(num_sms)):
        warnings.append(f"comm-sms {num_sms} in the profile, which is used, not {options.comm_sms}")
    if mesh.rank == 0:
        for warning in warnings:
            logging.warning("%s: %s", file, warning)
    return options if num_sms is None else replace(options, comm_sms=str(num_sms))
