"""jdist distributes a JAX train step: written once, it runs on one device, on all of a machine, and beyond."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jdist import callbacks as callbacks
    from jdist import cluster as cluster
    from jdist import data as data
    from jdist import errors as errors
    from jdist import metrics as metrics
    from jdist import nnx as nnx
    from jdist import plan as plan
    from jdist import ps as ps
    from jdist import reduction as reduction
    from jdist import scaling as scaling
    from jdist import train as train
    from jdist import typing as typing
    from jdist import weights as weights
    from jdist.checkpoint.evaluator import train_and_evaluate as train_and_evaluate
    from jdist.cluster.communication import CommunicationOptions as CommunicationOptions
    from jdist.core.context import has_strategy as has_strategy
    from jdist.core.context import in_replica_context as in_replica_context
    from jdist.core.per_replica import PerReplica as PerReplica
    from jdist.core.per_replica import ValueContext as ValueContext
    from jdist.core.precision import precision as precision
    from jdist.core.show import show as show
    from jdist.core.step_state import StepState as StepState
    from jdist.core.strategy import Strategy as Strategy
    from jdist.data.options import InputContext as InputContext
    from jdist.data.options import InputOptions as InputOptions
    from jdist.launcher.launch import launch as launch
    from jdist.launcher.ray import ray_launch as ray_launch
    from jdist.loop.evaluate import evaluate as evaluate
    from jdist.loop.evaluate import predict as predict
    from jdist.loop.export import export as export
    from jdist.loop.fit import fit as fit
    from jdist.notebook.launch import notebook_launch as notebook_launch
    from jdist.plan.explain import explain as explain
    from jdist.replica.aggregation import aggregate as aggregate
    from jdist.replica.aggregation import first_replica_only as first_replica_only
    from jdist.replica.collectives import all_gather as all_gather
    from jdist.replica.collectives import all_reduce as all_reduce
    from jdist.replica.collectives import broadcast as broadcast
    from jdist.replica.collectives import mean as mean
    from jdist.replica.collectives import num_replicas as num_replicas
    from jdist.replica.collectives import replica_axes as replica_axes
    from jdist.replica.collectives import replica_id as replica_id
    from jdist.replica.collectives import replica_rng as replica_rng
    from jdist.replica.gradients import global_loss as global_loss
    from jdist.replica.gradients import grad as grad
    from jdist.replica.gradients import value_and_grad as value_and_grad
    from jdist.replica.losses import compute_average_loss as compute_average_loss
    from jdist.replica.losses import scale_regularization_loss as scale_regularization_loss
    from jdist.replica.train_state import TrainState as TrainState
    from jdist.replica.train_state import optimizer as optimizer
    from jdist.report.history import History as History
    from jdist.step.decorator import distribute as distribute
    from jdist.step.differences import Verification as Verification
    from jdist.step.verify import VerificationWarning as VerificationWarning
    from jdist.step.verify import verify as verify
    from jdist.strategies.by_name import make_strategy as make_strategy
    from jdist.strategies.central_storage import central_storage as central_storage
    from jdist.strategies.default import default as default
    from jdist.strategies.default import get_strategy as get_strategy
    from jdist.strategies.default import set_strategy as set_strategy
    from jdist.strategies.mirrored import mirrored as mirrored
    from jdist.strategies.multi_worker import multi_worker as multi_worker
    from jdist.strategies.one_device import one_device as one_device
    from jdist.strategies.parameter_server import parameter_server as parameter_server
    from jdist.strategies.sharded import sharded as sharded
    from jdist.strategies.tpu import tpu as tpu

_MODULES = (
    "callbacks",
    "cluster",
    "data",
    "errors",
    "metrics",
    "nnx",
    "plan",
    "ps",
    "reduction",
    "scaling",
    "train",
    "typing",
    "weights",
)
_NAMES = {
    "CommunicationOptions": "jdist.cluster.communication",
    "History": "jdist.report.history",
    "InputContext": "jdist.data.options",
    "InputOptions": "jdist.data.options",
    "PerReplica": "jdist.core.per_replica",
    "Strategy": "jdist.core.strategy",
    "StepState": "jdist.core.step_state",
    "TrainState": "jdist.replica.train_state",
    "Verification": "jdist.step.differences",
    "VerificationWarning": "jdist.step.verify",
    "ValueContext": "jdist.core.per_replica",
    "aggregate": "jdist.replica.aggregation",
    "all_gather": "jdist.replica.collectives",
    "all_reduce": "jdist.replica.collectives",
    "broadcast": "jdist.replica.collectives",
    "compute_average_loss": "jdist.replica.losses",
    "central_storage": "jdist.strategies.central_storage",
    "default": "jdist.strategies.default",
    "distribute": "jdist.step.decorator",
    "evaluate": "jdist.loop.evaluate",
    "explain": "jdist.plan.explain",
    "export": "jdist.loop.export",
    "first_replica_only": "jdist.replica.aggregation",
    "fit": "jdist.loop.fit",
    "get_strategy": "jdist.strategies.default",
    "global_loss": "jdist.replica.gradients",
    "grad": "jdist.replica.gradients",
    "has_strategy": "jdist.core.context",
    "in_replica_context": "jdist.core.context",
    "launch": "jdist.launcher.launch",
    "make_strategy": "jdist.strategies.by_name",
    "mean": "jdist.replica.collectives",
    "mirrored": "jdist.strategies.mirrored",
    "multi_worker": "jdist.strategies.multi_worker",
    "notebook_launch": "jdist.notebook.launch",
    "num_replicas": "jdist.replica.collectives",
    "one_device": "jdist.strategies.one_device",
    "optimizer": "jdist.replica.train_state",
    "parameter_server": "jdist.strategies.parameter_server",
    "precision": "jdist.core.precision",
    "predict": "jdist.loop.evaluate",
    "ray_launch": "jdist.launcher.ray",
    "replica_axes": "jdist.replica.collectives",
    "replica_id": "jdist.replica.collectives",
    "replica_rng": "jdist.replica.collectives",
    "scale_regularization_loss": "jdist.replica.losses",
    "set_strategy": "jdist.strategies.default",
    "show": "jdist.core.show",
    "sharded": "jdist.strategies.sharded",
    "tpu": "jdist.strategies.tpu",
    "train_and_evaluate": "jdist.checkpoint.evaluator",
    "value_and_grad": "jdist.replica.gradients",
    "verify": "jdist.step.verify",
}
__all__ = [*_MODULES, *_NAMES]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Lazily, so that the command line answers `--help` without importing JAX.
    if name in _MODULES:
        return importlib.import_module(f"jdist.{name}")
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
        globals()[name] = value
        return value
    from jdist.support.tensorflow_names import unknown

    raise unknown("module 'jdist'", name, __all__)


def __dir__() -> list[str]:
    return sorted(__all__)
