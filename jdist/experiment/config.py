"""The schema of config files: every key, its type, its limits and its default.

    name: digits
    task:
      make: jdist.tasks.digits:make
    strategy: {name: mirrored}
    train:
      global_batch: 128
      steps: 600
      optimizer: {name: adamw, learning_rate: 1.0e-3}

is a whole config: `name`, `task.make`, `train.global_batch`, `train.optimizer.name` and one of `train.steps`
and `train.epochs` have no default. A key that is not here is refused, at every level, except options of the task, the
strategy, the optimizer and callbacks: they are checked against the signature of the function that takes them, before the run
starts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from jdist.loop.report.metrics_file import Mode

Count = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
MOST_CPU_DEVICES = 2048  # virtual ones; JAX takes any beyond for another process's


class Section(BaseModel):
    """One level of a config: unknown keys are refused, and a value is taken only as the type it has."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class TaskSection(Section):
    """The model, its loss and its data."""

    make: str = Field(
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$",
        description="Import path `module:function` of a function that returns a `jdist.tasks.Task`. "
        "The current folder can be imported from.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of that function, checked against its signature and its annotations.",
    )


class StrategySection(Section):
    """The strategy; every further key is an option of it."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(default="mirrored", description="A strategy, as `jdist.make_strategy` knows it.")


class ScalingSection(Section):
    """The rule that converts the optimizer's options, tuned at another global batch, to `train.global_batch`."""

    rule: Literal["linear", "square_root", "adam"] = Field(
        description="A rule of `jdist.scaling`: linear or square_root for the learning rate; adam for b1, b2 and eps too."
    )
    base_batch: Count = Field(description="The global batch that the options were tuned at.")


class OptimizerSection(Section):
    """The optax optimizer; every further key is an argument of it, checked against its signature.

    Where optax takes a schedule, the value may be `{schedule: NAME, ...}`: a schedule of optax and its
    arguments, or `gradual_warmup` of `jdist.scaling`. Its `decay_steps` or `transition_steps`, left out, is the
    number of steps of the run.
    """

    model_config = ConfigDict(extra="allow")

    name: str = Field(description="An optimizer of optax: `adamw`, `sgd`, `lion`, ...")
    scaling: ScalingSection | None = Field(
        default=None,
        description="How to convert the options to `global_batch`; null where they are meant for it already.",
    )


class TrainSection(Section):
    """The length of training, and its options."""

    global_batch: Count = Field(description="Rows of one step, over all replicas; at most twice those there are.")
    steps: Count | None = Field(default=None, description="Optimizer updates; or give `epochs`.")
    epochs: Count | None = Field(default=None, description="Passes over the data; or give `steps`.")
    seed: int = Field(default=0, ge=0, lt=2**32, description="Seeds the parameters and the order of the data.")
    optimizer: OptimizerSection
    clip_norm: PositiveFloat | None = Field(
        default=None, description="Scale gradients down to at most this global norm; null for no clipping."
    )
    accumulate: Count = Field(
        default=1, description="Parts that a replica's batch is worked through in, to save memory."
    )
    steps_per_call: Count = Field(
        default=1, description="Steps compiled into one call, to save dispatch; `steps` must be a multiple."
    )
    non_finite: Literal["raise", "skip", "apply"] = Field(
        default="raise", description="What a NaN or infinite update does: stop, be left out, be applied."
    )
    precision: Literal["bf16", "fp16"] | None = Field(
        default=None, description="Compute in 16 bits, parameters in float32; null for float32 throughout."
    )
    check_replicas: Count | None = Field(
        default=1000, description="Compare the replicas' states every so many steps; null for never."
    )
    verify: Literal["first", "strict", "off"] = Field(
        default="first",
        description="Compare the first step with one replica on its whole batch: warn of what differs, stop, or neither.",
    )

    @field_validator("verify", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML's `off`


class InitSection(Section):
    """Weights to begin with, in place of those that the task makes; a run that goes on has its own."""

    path: str = Field(
        min_length=1,
        description="A run folder or a folder of checkpoints, for the newest in it; or safetensors: a file, an "
        "index or a folder.",
    )
    only: str | list[str] | None = Field(
        default="params/.*",
        description="Which leaves of the state: regular expressions for the end of their paths; null for all.",
    )
    rename: dict[str, str | None] | None = Field(
        default=None,
        description="From paths in the checkpoint, or the beginning of some, to those in the state; null leaves one out.",
    )
    skip_mismatch: bool = Field(
        default=False, description="Leave, and list, what does not fit; otherwise it is refused."
    )
    rules: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$",
        description="Import path `module:function` of a function that returns the rules for safetensors, such as "
        "`jdist.weights:gpt2`; null where tensors are called as leaves.",
    )


class EvalSection(Section):
    """Evaluations; there is always one at the end of the run."""

    every: Count | None = Field(default=None, description="Steps between evaluations; null for the end only.")
    global_batch: Count | None = Field(
        default=None,
        description="Rows of one evaluation step, at most those there are; null for as many as in training.",
    )


class CheckpointSection(Section):
    """Checkpoints; one is always saved at the end and on Ctrl-C."""

    every: Count | None = Field(default=1000, description="Steps between checkpoints; null for the end only.")
    keep: Count = Field(default=3, description="Newest checkpoints kept; older ones are deleted.")
    best: str | None = Field(
        default=None,
        pattern=r"^eval/.",
        description="Evaluation metric of the best checkpoint, which is kept too, such as eval/accuracy; null for none.",
    )
    mode: Mode | None = Field(
        default=None,
        description='Whether more ("max") or less ("min") of `best` is better; null: as its name says, less of a '
        '"loss", more of an "accuracy" or "auc".',
    )


def _with_options(value: Any) -> Any:
    """Writes a callback that is named alone as a mapping of its name to no options."""
    if isinstance(value, str):
        return {value: {}}
    if isinstance(value, dict) and len(value) == 1:
        return {name: {} if options is None else options for name, options in value.items()}
    raise PydanticCustomError("callback", "one name, or one name with its options, such as {ema: {decay: 0.99}}")


class LogSection(Section):
    """Reports of the run: how often, and where."""

    every: Count = Field(default=20, description="Steps between lines of `metrics.jsonl`.")
    folder: str = Field(default="runs", min_length=1, description="The run is written to FOLDER/NAME.")

    @field_validator("folder")
    @classmethod
    def _is_on_a_disk(cls, folder: str) -> str:
        if "://" in folder:
            raise PydanticCustomError(
                "folder", "a run is written line by line and locked, which a bucket cannot do: name a folder on a disk"
            )
        return folder


class PlatformSection(Section):
    """Settings that JAX reads when it starts."""

    cpu_devices: Annotated[int, Field(ge=1, le=MOST_CPU_DEVICES)] | None = Field(
        default=None,
        description="Run on this many virtual CPU devices, also where there is an accelerator; "
        "null for the devices that JAX finds.",
    )
    deterministic: bool = Field(
        default=False,
        description="Set XLA's deterministic flags: on GPU two equal runs are then bit-equal, and slower.",
    )
    compilation_cache: bool = Field(
        default=True,
        description="Keep what XLA has compiled in the run folder, so that a run that goes on starts sooner. A folder that "
        "you have given JAX is taken instead.",
    )


class Config(Section):
    """A whole experiment."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=200,
        description="Name of the run and of its folder: letters, digits, `.`, `_` and `-`.",
    )
    task: TaskSection
    strategy: StrategySection = Field(default_factory=StrategySection)
    train: TrainSection
    init_from: InitSection | None = Field(default=None, description="Weights to begin with; null for new ones.")
    eval: EvalSection = Field(default_factory=EvalSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    callbacks: list[Annotated[dict[str, dict[str, Any]], BeforeValidator(_with_options)]] = Field(
        default_factory=list,
        description="What goes along with training: names of jdist.callbacks, or one-key mappings with options.",
    )
    log: LogSection = Field(default_factory=LogSection)
    platform: PlatformSection = Field(default_factory=PlatformSection)
