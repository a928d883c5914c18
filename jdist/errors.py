"""Every error that jdist raises on purpose.

    JDistError
    ├── DeviceError
    ├── StrategyError
    ├── StepError
    │   ├── BoundaryError
    │   ├── GlobalViewError
    │   └── VerificationError
    ├── BatchError
    ├── DatasetError
    ├── DonatedStateError
    ├── ReplicaDivergenceError
    ├── NonFiniteError
    ├── OutOfMemoryError
    ├── CheckpointError
    ├── ClusterError
    │   ├── PeerLostError
    │   ├── PeerFailedError
    │   ├── PortInUseError
    │   └── ClusterTimeoutError
    ├── ClusterConfigError
    ├── ArtifactError
    ├── WireError
    ├── ClosureError
    │   ├── ClosureCancelledError
    │   ├── NonFiniteClosureError, a NonFiniteError as well
    │   └── NoWorkersError
    ├── ShardLostError
    ├── JobReplacedError
    ├── LaunchError
    ├── ScalingError
    ├── ProcessFailedError
    └── ConfigError
        └── OptionError, in jdist/tasks/options.py

Each also derives from the built-in error that a reader would expect (ValueError, RuntimeError), so that code which knows
nothing of jdist can catch it. Every message says what is wrong, which value it was, what is allowed and how to mend it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


class JDistError(Exception):
    """The root of every error that jdist raises on purpose."""


class DeviceError(JDistError, ValueError):
    """A device that was asked for is not there, or cannot serve."""


class StrategyError(JDistError, ValueError):
    """A strategy's name or an option of it is not valid, or two strategies are mixed."""


class StepError(JDistError, ValueError):
    """A step, its declared roles, its results, or values of its replicas are not valid."""


class BoundaryError(StepError):
    """A step cannot be split into a gradient part and an update part."""


class GlobalViewError(StepError):
    """A replica call has no meaning in a step that sees the whole batch (`transform="jit"`)."""


class VerificationError(StepError):
    """A step computes something else on many replicas than on one with all rows, and `verify="strict"` forbids it.

    Attributes:
        verification: what `jdist.verify` found.
    """

    def __init__(self, message: str, verification: Any):
        super().__init__(message)
        self.verification = verification


class BatchError(JDistError, ValueError):
    """A batch does not fit the replicas, or its leaves disagree."""


class DatasetError(JDistError, ValueError):
    """An input source is empty, cannot be resumed, or changes its structure."""


class DonatedStateError(JDistError, RuntimeError):
    """A state was used again after a step had consumed (donated) it."""


class ReplicaDivergenceError(JDistError, RuntimeError):
    """Replicas hold different values of state that was declared the same on all.

    Attributes:
        leaves: path of each leaf that differs, as `jax.tree_util.keystr` writes it.
        replicas: for each of these leaves, the replicas that differ from the majority; all without a majority.
    """

    def __init__(self, message: str, leaves: tuple[str, ...], replicas: tuple[tuple[int, ...], ...]):
        super().__init__(message)
        self.leaves = leaves
        self.replicas = replicas


class NonFiniteError(JDistError, FloatingPointError):
    """A step made a floating-point leaf of the state NaN or infinite.

    Attributes:
        leaf: path of the first such leaf.
        step: number of the step, from 0, since it was distributed; of a call with `steps_per_call` each of its steps counts.
    """

    def __init__(self, message: str, leaf: str, step: int):
        super().__init__(message)
        self.leaf = leaf
        self.step = step


@dataclass(frozen=True)
class LiveLeaf:
    """An array that lay on the devices.

    Attributes:
        path: its name: the tree that it was in, and where in it, `state.params['w']`.
        shape: of all of it.
        dtype: its dtype's name.
        bytes_per_device: bytes that a device held of it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    bytes_per_device: int

    @property
    def array(self) -> str:
        """Dtype and shape, as `float32[3, 4]`."""
        return f"{self.dtype}{list(self.shape)}"


class OutOfMemoryError(JDistError, MemoryError):
    """A device had no memory left for a step of `jdist.fit` or `jdist run`.

    Attributes:
        leaves: the arrays that lay on the devices, the largest first.
    """

    def __init__(self, message: str, leaves: tuple[LiveLeaf, ...]):
        super().__init__(message)
        self.leaves = leaves


class CheckpointError(JDistError, RuntimeError):
    """A checkpoint, or a file of weights, cannot be written, found or read."""


class ClusterError(JDistError, RuntimeError):
    """The processes of a job did not come together, or did not come to the same call.

    Attributes:
        at_fault: the process or program to look at first; None if the message alone can tell.
    """

    def __init__(self, message: str = "", *, at_fault: str | None = None):
        super().__init__(message)
        self.at_fault = at_fault


class PeerLostError(ClusterError):
    """A process of a synchronous job is gone, or stands still, so that the others cannot go on.

    Attributes:
        process: its index.
        address: where it was, "host:port".
        last_step: the last step that any process reported.
        cause: how the loss was noticed, as a clause.
        places: if it kept the others waiting, the `process`, `step`, `phase` and `stack` of each.
    """

    if_it_takes_long: ClassVar = (
        "If this is work that takes this long, mark it by `with strategy.cluster.busy(...):`, or raise "
        "`CommunicationOptions(progress_timeout_s=...)`."
    )

    def __init__(self, process: int, address: str, last_step: int, cause: str, places: tuple[Any, ...] = ()):
        super().__init__(
            f"process {process} ({address}) is lost: {cause}. {f'{self.if_it_takes_long} ' if places else ''}The last step "
            f"was {last_step}. Nothing is saved from here on; start all processes again, and they go on from the last "
            "checkpoint.",
            at_fault=f"process {process} ({address})",
        )
        self.process = process
        self.address = address
        self.last_step = last_step
        self.cause = cause
        self.places = places


class PeerFailedError(ClusterError):
    """Another process met an error in what all do together, and reports it in full.

    A program that it ends leaves with exit code 75; or with 2 or 74 if the other does, as a restart does not help then.

    Attributes:
        exit_code: that of the other process.
    """

    def __init__(self, message: str, *, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class ClusterTimeoutError(ClusterError):
    """Other processes did not come, or did not come to the same call, in time.

    A program that it ends leaves with exit code 75: after a restart they may come.
    """


class PortInUseError(ClusterError):
    """A port that process 0 has to listen on is taken, perhaps by a process of an earlier job that is about to end.

    A program that it ends leaves with exit code 75: after a restart the port may be free.
    """


class ClusterConfigError(JDistError, ValueError):
    """A cluster's description is not valid: an environment variable, an argument, or several together.

    Attributes:
        variable: the environment variable or argument, `TF_CONFIG`.
        field: the part of it, `worker[1]`; the variable's name where it has no parts.
        value: the value there, or None.
    """

    def __init__(self, message: str, *, variable: str, field: str, value: object):
        super().__init__(message)
        self.variable = variable
        self.field = field
        self.value = value


class ArtifactError(JDistError, ValueError):
    """A function cannot travel to another process, or one that was received must not run here."""


class WireError(JDistError, ValueError):
    """Bytes from a peer are not a message of the protocol, or larger than allowed."""


class ClosureError(JDistError, RuntimeError):
    """A scheduled step failed on a worker; it took no effect."""


class ClosureCancelledError(ClosureError):
    """A scheduled step was never computed: another one had failed, or the program has cancelled it."""


class NonFiniteClosureError(ClosureError, NonFiniteError):
    """A scheduled step met a NaN or infinite gradient; it took no effect.

    Attributes:
        leaf: "", as only the worker has the gradients.
        step: number of the scheduled step, from 0.
    """

    def __init__(self, step: int):
        super().__init__(
            f"closure {step}: a gradient is NaN or infinite. Lower the learning rate, clip gradients, or choose what happens "
            'then: `jdist.distribute(non_finite="skip")`, or "apply".',
            leaf="",
            step=step,
        )


class NoWorkersError(ClosureError):
    """No worker is left, or there has been none for long."""


class ShardLostError(JDistError, RuntimeError):
    """A parameter server is gone, and nobody took its place in time."""


class JobReplacedError(JDistError, RuntimeError):
    """Another coordinator has taken over the parameter servers of this job.

    A program that it ends leaves with exit code 2, after which no launcher restarts it: two would take turns for ever.
    """


class LaunchError(JDistError, ValueError):
    """The command to launch, or the number or place of its processes, is not valid."""


class ScalingError(JDistError, ValueError):
    """A scaling rule cannot take a batch or a hyperparameter, or does not reach as far."""


class ProcessFailedError(JDistError, RuntimeError):
    """A function that runs in several processes failed in one of them, or they did not end in time."""


class ConfigError(JDistError, ValueError):
    """A config file, an override of it, or a run folder is not valid."""
