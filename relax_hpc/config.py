"""The run's configuration: recipe (TOML) -> frozen dataclasses -> one resolved JSON.

A recipe is read once, where the run is submitted. Everything that a job step needs is in
`RUN/config.json`; no step reads a recipe or the environment for configuration.
"""

import dataclasses
import enum
import json
import re
import tomllib
import typing
from pathlib import Path
from typing import Any

import msgspec

from relax_hpc import recipe_keys
from relax_hpc.errors import ConfigError
from relax_hpc.ranges import check_numbers


class Mode(enum.StrEnum):
    """How rollout and training overlap; one switch, the same code paths."""

    ASYNC_ON_POLICY = "async_on_policy"
    """Micro-batches stream inside a step; every token comes from the newest weights."""
    ASYNC = "async"
    """Engines run ahead of the train step, at most max_staleness versions."""


class Layout(enum.StrEnum):
    """Shape of the Slurm allocation."""

    HET = "het"
    """One heterogeneous job: each role with its own component (partition, nodes)."""
    SINGLE = "single"
    """One homogeneous allocation shared by all roles; the only shape that job arrays can have."""


class LauncherKind(enum.StrEnum):
    """Who starts the job steps."""

    SLURM = "slurm"
    LOCAL = "local"


class EngineKind(enum.StrEnum):
    """Which inference engine the rollout steps run."""

    EMBEDDED = "embedded"
    SGLANG = "sglang"


class StalePolicy(enum.StrEnum):
    """What happens to a group whose samples became too old to be trained (after a roll-back)."""

    REGENERATE = "regenerate"
    """Its prompt is dispatched again."""
    DROP = "drop"
    """It is counted as dropped; the prompt is used up."""
    CORRECT = "correct"
    """It is trained all the same, its staleness counted; importance sampling corrects."""


class Sampler(enum.StrEnum):
    """How the groups of a chunk are divided over the data parallel ranks."""

    BALANCED = "balanced"
    """By tokens: all ranks finish at about the same time."""
    FIFO = "fifo"
    """By count, in the order of completion; the first ranks get one more where it does not fit."""


class RdmaUse(enum.StrEnum):
    """Whether payload of other nodes is read by RDMA (package nixl)."""

    AUTO = "auto"
    """Where hardware and package are there, else TCP."""
    OFF = "off"
    FORCE = "force"
    """Also over the library's software transports (tests)."""


class AlgorithmName(enum.StrEnum):
    """Algorithms that this version trains with."""

    GRPO = "grpo"
    DAPO = "dapo"


class LossAggregation(enum.StrEnum):
    """What one optimizer step's loss is the mean over."""

    TOKEN = "token"
    """All response tokens of the step (DAPO, arXiv:2503.14476 sec. 3.3)."""
    SAMPLE = "sample"
    """Mean over tokens inside a sample, then over samples (GRPO, arXiv:2402.03300 eq. 3)."""


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Identity and length of the run."""

    name: str
    """Name of the run: letters, digits, `_`, `-`, `.`; also the Slurm job name."""
    mode: Mode = Mode.ASYNC
    seed: int = 0
    """Seed of data order, sampling and initialisation."""
    train_steps: int
    """Optimizer steps of the whole run."""
    folder: str = "runs"
    """Parent of the run folder, on the shared file system; relative to the submit folder."""
    init_from: str = ""
    """`RUN@STEP`: start from the weights of another run's checkpoint; empty = `model.path`."""

    def __post_init__(self) -> None:
        ok = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", self.name) is not None
        _require(
            ok,
            f"run.name={self.name!r}: use 1 to 100 letters, digits, '_', '-' and '.', the first "
            "of them a letter, a digit or '_'",
        )
        check_numbers("run", self)
        ok = not self.init_from or re.fullmatch(r".+@[0-9]{1,9}", self.init_from) is not None
        _require(ok, f"run.init_from={self.init_from!r}: write RUN_FOLDER@STEP, e.g. runs/a-1@20")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The policy's starting point."""

    path: str
    """Hugging Face folder (config.json, *.safetensors, tokenizer), readable on all nodes."""
    dtype: str = "float32"
    """Parameter dtype of trainer and engine: float32 or bfloat16."""

    def __post_init__(self) -> None:
        ok = self.dtype in ("float32", "bfloat16")
        _require(ok, f"model.dtype={self.dtype!r}: valid are float32, bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where prompts come from. A source is a `.jsonl`/`.parquet` file (DAPO-Math-17k schema:
    `prompt` = message list or string, `label`) or `reasoning_gym:TASK?key=value&...`."""

    train: str
    eval: str = ""
    """Source of held-out prompts; empty = no evaluation."""
    prompt_key: str = "prompt"
    label_key: str = "label"
    apply_chat_template: bool = True
    """False: the prompt's text (the contents of its messages, joined) is tokenized as it is."""
    max_prompt_tokens: int = 1024
    """Longer prompts are dropped at load time and counted."""
    num_train_prompts: int = 1000
    """Prompts to generate; only for reasoning_gym sources."""
    num_eval_prompts: int = 0
    """Prompts used of the eval source; 0 = all (100 for reasoning_gym)."""
    shuffle: bool = True
    allow_changed: bool = False
    """Go on when the data set is not the one that the run began with (its ledger counts rows)."""

    def __post_init__(self) -> None:
        check_numbers("data", self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """How completions are scored."""

    kind: str = "math"
    """math (symbolic answer), dapo (score +-1), exact (string equality), reasoning_gym (the
    task's own score), or the dotted path of a function (see relax_hpc.rewards.reward)."""
    timeout_s: float = 10.0
    """Wall-clock limit of one score; beyond it the sample is invalid, with that reason."""

    def __post_init__(self) -> None:
        check_numbers("reward", self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig:
    """Objective of the policy update."""

    name: AlgorithmName = AlgorithmName.DAPO
    clip_low: float = 0.2
    """Lower clip range of the probability ratio (DAPO eq. 10: epsilon_low)."""
    clip_high: float = 0.28
    """Upper clip range (DAPO eq. 10: epsilon_high)."""
    loss_aggregation: LossAggregation = LossAggregation.TOKEN
    dynamic_sampling: bool = True
    """Drop groups whose raw accuracy does not vary; another prompt takes the slot (DAPO eq. 11)."""
    normalise_by_std: bool = True
    """Divide group advantages by their standard deviation (off: Dr.GRPO, arXiv:2503.20783)."""
    kl_coef: float = 0.0
    """Weight of the k3 KL to the reference in the loss; > 0 needs the `ref` role."""
    entropy_coef: float = 0.0
    tis_clip: float = 2.0
    """Upper clip of truncated importance sampling, used when samples may be stale; 0 = off."""
    overlong_buffer_tokens: int = 0
    """Soft overlong punishment (DAPO eq. 13) in the last so many tokens before
    max_response_tokens; 0 = off."""
    overlong_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_numbers("algorithm", self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """Generation: engines, batch shape and sampling."""

    engine: EngineKind = EngineKind.EMBEDDED
    num_engines: int = 1
    """Rollout job steps, one engine each."""
    engine_tp: int = 1
    """Tensor parallel ranks (GPUs) of one engine."""
    groups_per_step: int
    """Prompts (groups) that one optimizer step trains on."""
    group_size: int
    """Samples of one prompt (n)."""
    max_response_tokens: int
    max_staleness: int = 1
    """Train version minus the oldest version among a sample's tokens never exceeds this."""
    stale_policy: StalePolicy = StalePolicy.REGENERATE
    archive: bool = True
    """Write every group that is put also to `RUN/trajectories` (HDF5), in the background."""
    replay: str = ""
    """Folder of archived groups that are put instead of generated ones; no engine is started."""
    max_concurrent_groups: int = 0
    """Groups that one engine generates at a time; 0 = its share of the admission capacity."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    """Stop strings besides the end-of-sequence token."""
    max_tokens_in_cache: int = 20000
    """KV cache size of a CPU engine, in tokens."""
    eval_interval: int = 20
    """Evaluate every this many train steps, before the first and after the last; 0 = never."""
    eval_samples: int = 1
    eval_temperature: float = 0.0
    eval_top_p: float = 1.0
    eval_max_response_tokens: int = 0
    """0 = max_response_tokens."""
    sglang_args: dict[str, str | int | float] = dataclasses.field(default_factory=dict)
    """More `sglang.launch_server` options: {"attention-backend" = "fa3"}; empty text: a flag."""

    def __post_init__(self) -> None:
        check_numbers("rollout", self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Megatron-core: parallelism, optimizer, step shape."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    """Expert parallelism: divides TP x DP / etp and the number of experts."""
    etp: int = 0
    """Tensor parallelism inside an expert; 0 = tp."""
    first_stage_layers: int = 0
    last_stage_layers: int = 0
    """Layers of the first and last pipeline stage; 0 = as the others."""
    sequence_parallel: bool = False
    micro_batch_tokens: int = 8192
    """Token budget of one packed micro-batch; a longer sample gets one of its own."""
    chunks_per_step: int = 4
    """A step is fetched in this many chunks: training starts when the first is complete."""
    sampler: Sampler = Sampler.BALANCED
    lr: float = 1e-6
    min_lr: float = -1.0
    """Learning rate at the last step (linear decay after warm-up); -1 = constant lr."""
    lr_warmup_steps: int = 0
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    recompute: bool = False
    """Full activation recompute."""
    save_interval: int = 20
    """Checkpoint every this many steps and after the last; 0 = only after the last."""
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        check_numbers("train", self)
        ok = self.min_lr == -1 or 0 <= self.min_lr <= self.lr
        _require(ok, f"train.min_lr={self.min_lr}: must be -1 (constant) or in 0 .. lr={self.lr}")
        ok = not self.sequence_parallel or self.tp > 1
        _require(ok, "train.sequence_parallel=true: needs train.tp > 1")

    @property
    def model_parallel(self) -> int:
        """Ranks that one replica of the model takes: TP x PP."""
        return self.tp * self.pp


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TransferConfig:
    """The transfer queue: shared memory that payload lies in, and how other nodes read it."""

    extent_mb: int = 64
    """Shared memory that a producer asks for at a time; a larger group gets its own extent."""
    arena_mb: int = 4096
    """Shared memory that one producer may hold; when it is full, `put` spills or waits."""
    node_shm_mb: int = 0
    """Shared memory of all producers of a node; 0 = 80 % of what is free when its agent starts."""
    spill_mb: int = 0
    """Disk that the producers of a node may use when their memory is full; 0 = none, they wait."""
    spill_folder: str = ""
    """Where to spill: a folder of the node or a shared one; empty = `RUN/spill`."""
    put_timeout_s: float = 600.0
    """A put that finds no room for this long is an error."""
    streams: int = 4
    """TCP connections over which one large read of another node is spread."""
    rdma: RdmaUse = RdmaUse.AUTO
    verify_shm: bool = False
    """Compare the checksum of all payload on reads of the same node too (others: always)."""

    def __post_init__(self) -> None:
        check_numbers("transfer", self)
        ok = self.extent_mb <= self.arena_mb
        _require(ok, f"transfer.extent_mb={self.extent_mb}: larger than arena_mb={self.arena_mb}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoleResources:
    """What one role gets. With `gpus_per_node > 0` one rank owns one GPU."""

    ranks: int = 1
    """Processes (train, ref, logprob) or engine ranks (rollout: num_engines x engine_tp)."""
    nodes: int = 1
    """Nodes of the role's own component (layout het)."""
    partition: str = ""
    """Partition of the component (layout het); empty = resources.partition."""
    cpus_per_rank: int = 1

    def __post_init__(self) -> None:
        check_numbers("resources.*", self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResourcesConfig:
    """The allocation and who gets what of it."""

    launcher: LauncherKind = LauncherKind.SLURM
    layout: Layout = Layout.HET
    site: str = "local"
    """Site profile: `sbatch/NAME.toml` (fabric prefix, GRES style, modules, requeue policy)."""
    partition: str = ""
    """Partition of all roles that name none; empty = the cluster's default."""
    nodes: int = 1
    """Nodes of the one allocation (layout single)."""
    gpus_per_node: int = 0
    """0: everything runs on CPUs (gloo)."""
    mem_per_node_gb: int = 0
    """0 = the partition's default."""
    time_min: int = 60
    account: str = ""
    qos: str = ""
    train: RoleResources = RoleResources()
    rollout: RoleResources = RoleResources()
    dcs: RoleResources = RoleResources()
    """Component of the dcs leader (layout het; layout single: the first node)."""
    ref: RoleResources | None = None
    """None: no reference step."""
    logprob: RoleResources | None = None
    """None: log-probs of the old policy are computed inside the train step."""
    preflight: bool = False
    """Test the nodes first (`relax-hpc preflight`, under a minute); end where one is faulty."""

    def __post_init__(self) -> None:
        check_numbers("resources", self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryConfig:
    """Bounds and deadlines."""

    max_role_restarts: int = 10
    """Restarts of one step (rollout, dcs, ref, logprob) within the run."""
    max_train_restarts: int = 3
    """Restarts of the train step without a new checkpoint in between."""
    heartbeat_timeout_s: float = 60.0
    """A member that is silent for this long is restarted."""
    start_timeout_s: float = 600.0
    """From the start of a step to its registration."""
    progress_timeout_s: float = 1800.0
    """The run ends with an error when no train step completes for this long."""

    def __post_init__(self) -> None:
        check_numbers("recovery", self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SweepConfig:
    """Runs that one job array starts. Empty in `RUN/config.json`: there a run is one run."""

    runs: tuple[dict[str, Any], ...] = ()
    """Task K is the recipe with the keys of entry K: `{ train.lr = 1e-4 }` (`config_of_task`)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole run. Built by `load_recipe`; written to and read from `RUN/config.json`."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig
    train: TrainConfig = TrainConfig()
    transfer: TransferConfig = TransferConfig()
    resources: ResourcesConfig = ResourcesConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    sweep: SweepConfig = SweepConfig()

    def __post_init__(self) -> None:
        _check_sweep(self)
        _check_algorithm(self)
        _check_staleness(self)
        _check_parallelism(self)
        _check_placement(self)

    @property
    def dp(self) -> int:
        """Data parallel size of the train step."""
        return self.resources.train.ranks // self.train.model_parallel


def _check_algorithm(config: Config) -> None:
    rollout, algorithm = config.rollout, config.algorithm
    _require(
        rollout.group_size > 1,
        f"rollout.group_size={rollout.group_size}: {algorithm.name} compares the samples of a "
        "group, use 2 or more",
    )
    _require(
        algorithm.overlong_buffer_tokens < rollout.max_response_tokens,
        f"algorithm.overlong_buffer_tokens={algorithm.overlong_buffer_tokens}: must be smaller "
        f"than rollout.max_response_tokens={rollout.max_response_tokens}",
    )
    _require(
        algorithm.kl_coef == 0 or config.resources.ref is not None,
        f"algorithm.kl_coef={algorithm.kl_coef}: needs a reference, add [resources.ref]",
    )
    chunks = config.train.chunks_per_step
    _require(
        rollout.groups_per_step % chunks == 0 and rollout.groups_per_step // chunks >= config.dp,
        f"train.chunks_per_step={chunks}: must divide "
        f"rollout.groups_per_step={rollout.groups_per_step} and leave at least one group for "
        f"each of the {config.dp} data parallel ranks",
    )


def _check_staleness(config: Config) -> None:
    mode, staleness = config.run.mode, config.rollout.max_staleness
    if mode is Mode.ASYNC_ON_POLICY:
        _require(
            staleness == 0,
            f"rollout.max_staleness={staleness}: mode {mode} trains on fresh samples only, use 0",
        )
    else:
        _require(staleness >= 1, f"rollout.max_staleness={staleness}: mode {mode} needs 1 or more")


def _check_parallelism(config: Config) -> None:
    train, resources = config.train, config.resources
    _require(
        resources.train.ranks % train.model_parallel == 0,
        f"resources.train.ranks={resources.train.ranks}: must be a multiple of "
        f"TP x PP = {train.tp} x {train.pp} = {train.model_parallel}",
    )
    rollout = config.rollout
    need = rollout.num_engines * rollout.engine_tp
    _require(
        resources.rollout.ranks == need,
        f"resources.rollout.ranks={resources.rollout.ranks}: must be rollout.num_engines x "
        f"engine_tp = {rollout.num_engines} x {rollout.engine_tp} = {need}",
    )


def _check_placement(config: Config) -> None:
    resources = config.resources
    roles = {
        name: role
        for name in ("train", "ref", "logprob", "rollout")
        if (role := getattr(resources, name)) is not None
    }
    gpus = resources.gpus_per_node
    if gpus and resources.layout is Layout.SINGLE:
        need = sum(role.ranks for role in roles.values())
        each = ", ".join(f"{name} {role.ranks}" for name, role in roles.items())
        _require(
            need <= resources.nodes * gpus,
            f"resources: {need} ranks ({each}) need as many GPUs, but "
            f"{resources.nodes} nodes x {gpus} GPUs = {resources.nodes * gpus}",
        )
    if resources.layout is Layout.HET:
        for name, role in roles.items():
            ok = role.ranks % role.nodes == 0 and (not gpus or role.ranks <= role.nodes * gpus)
            _require(
                ok,
                f"resources.{name}: {role.ranks} ranks do not fit evenly on {role.nodes} nodes"
                + (f" with {gpus} GPUs each" if gpus else ""),
            )


def _check_sweep(config: Config) -> None:
    resources = config.resources
    is_het = resources.layout is Layout.HET and resources.launcher is LauncherKind.SLURM
    _require(
        not config.sweep.runs or not is_het,
        "sweep: Slurm has no arrays of heterogeneous jobs; set resources.layout = 'single'",
    )
    recipe_keys.check_sweep(config.sweep.runs, Config)


def load_recipe(path: Path, overrides: typing.Sequence[str] = ()) -> Config:
    """Read a recipe, apply `--set a.b=value` overrides and validate.

    Relative paths in `model.path` and `data.*` that exist relative to the recipe's project
    (the folder above `recipes/`) are kept as written; steps resolve them in the submit folder.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type, impossible combination.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as err:
        raise ConfigError(f"recipe {path} does not exist; see recipes/*.toml") from err
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as err:
        raise ConfigError(f"recipe {path} cannot be read as TOML: {err}") from err
    for override in overrides:
        recipe_keys.apply_override(tree, override, Config)
        recipe_keys.free_sweep(tree, override.partition("=")[0].strip())
    return config_from_tree(tree, where=str(path))


def config_from_tree(tree: dict[str, Any], where: str) -> Config:
    """Build a Config from nested dictionaries; unknown keys are errors that list the valid ones."""
    recipe_keys.refuse_unknown(tree, Config)
    try:
        config = msgspec.convert(tree, Config)
        for task in range(len(config.sweep.runs)):
            config_of_task(config, task)
        return config
    except msgspec.ValidationError as err:
        if isinstance(err.__cause__, ConfigError):
            raise ConfigError(f"{where}: {err.__cause__}") from err
        raise ConfigError(f"{where}: {err}") from err
    except ConfigError as err:
        raise ConfigError(f"{where}: {err}") from err


def config_of_task(config: Config, task: int) -> Config:
    """Return the run of one task of a job array.

    Keys of `sweep.runs[task]` replace the recipe's. Without a `run.seed` there the task's seed is
    `run.seed + task`, also in an array of a recipe that has no sweep: runs that are equal in
    everything are of no use.

    Raises:
        ConfigError: the sweep has no such entry, or the keys do not go together.
    """
    entries = config.sweep.runs
    if entries and task >= len(entries):
        raise ConfigError(
            f"sweep.runs has {len(entries)} entries, for the array's tasks 0 to "
            f"{len(entries) - 1}; there is none for task {task}"
        )
    tree = json.loads(config_to_json(dataclasses.replace(config, sweep=SweepConfig())))
    tree["run"]["seed"] += task
    entry = entries[task] if entries else {}
    return config_from_tree(recipe_keys.merged(tree, entry), f"sweep.runs[{task}]")


def config_to_json(config: Config) -> str:
    """Render the resolved configuration, stable and human-readable."""
    return json.dumps(dataclasses.asdict(config), indent=2, sort_keys=True) + "\n"


def config_from_json(text: str, where: str = "config.json") -> Config:
    """Read what `config_to_json` wrote."""
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as err:
        raise ConfigError(f"{where}: not JSON: {err}") from err
    return config_from_tree(tree, where)
