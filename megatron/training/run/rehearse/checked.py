"""The report of --check-config: the model is looked at and ranks are built for it where torch is there, which is
imported by name and no sooner (floor 0)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from megatron.core import optional
from megatron.core.pipeline_parallel.plan.ir import without_collector
from megatron.training.config.check_config import Report, build_report, with_vocabulary
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.config.problems import Problem
from megatron.training.config.rules import plan_problems
from megatron.training.config.saved_config import shape_elsewhere

DESCRIBE, ESTIMATE = "megatron.training.run.describe", "megatron.training.run.rehearse.estimated"


def checked(config: Config, problems: Sequence[Problem], env: LaunchEnv) -> tuple[Report, list[Problem]]:
    """The report, and the problems with those that a plan has."""
    undescribed = ""
    with without_collector():  # which would go through all of torch again and again: a tenth of the time
        if not problems:
            config, undescribed = _described(with_vocabulary(config))
            problems = [] if undescribed else plan_problems(config, env)
        estimated = None if config.description is None else importlib.import_module(ESTIMATE).estimated
        return build_report(config, problems, undescribed, estimated), list(problems)


def _described(config: Config) -> tuple[Config, str]:
    """With the description of its model, and why there is none."""
    if not optional.available("torch"):
        return config, "torch is not installed here, with which a model is looked at"
    if shape_elsewhere(config.checkpoint):
        return config, ""
    return importlib.import_module(DESCRIBE).described(config), ""
