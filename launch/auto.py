"""From `--overlap auto --profile FILE` to an engine that decides by it, on all ranks alike.

Its own file because it joins the profile, which knows no ranks, with the ranks: rank 0 reads the file and shares it, so
that a host with another copy cannot decide otherwise.
"""

from __future__ import annotations

import logging

from dbo.config import DBOConfig
from dbo.errors import ConfigError
from launch.config import EngineOptions
from launch.engine import Engine
from launch.environment import describe_environment
from launch.prepare import share_text
from launch.profile import Setup, costs_for, fingerprint, read_text
from launch.session import together


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
    )


def use_profile(options: EngineOptions, engine: Engine, dbo: DBOConfig) -> None:
    """Give the engine the costs that `auto` decides by; nothing for other settings of the overlap.

    Collective. Warns, once, if there is no profile (thresholds then decide), and of what differs from where it was
    measured. Raises CommandError on every rank for one that does not hold here, naming both values.
    """
    mesh = engine.mesh
    if dbo.overlap != "auto":
        return
    file = options.profile
    if file is None:
        if mesh.rank == 0:
            logging.warning(
                "--overlap auto without --profile goes by the thresholds; measure a profile with `launch calibrate`"
            )
        return
    text = share_text(mesh, "profile", together(mesh, "profile", lambda: read_text(file) if mesh.rank == 0 else ""))
    here, environment = setup_of(engine, dbo), describe_environment(mesh.device)
    profile, warnings = together(mesh, "costs", lambda: costs_for(text, file, here, environment))
    engine.costs = profile.step_costs()
    if mesh.rank == 0:
        for warning in warnings:
            logging.warning("%s: %s", file, warning)
