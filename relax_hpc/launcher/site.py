"""Site profiles: what differs between clusters, as data (`sbatch/NAME.toml`)."""

import dataclasses
import enum
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from relax_hpc.errors import ConfigError


class GpuOption(enum.StrEnum):
    """How a site wants GPUs to be asked for. Per-task options are left out on purpose: they hide
    the peers' GPUs from a task and break CUDA IPC."""

    GRES = "gres"
    GPUS_PER_NODE = "gpus-per-node"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One cluster's habits. Built by `load_site`."""

    name: str
    description: str = ""
    address_prefix: str = ""
    """Prefix of the IP addresses that services bind to; empty = first that is not loopback."""
    gres: str = "gpu"
    """GRES name with the type if the site needs one: `gpu`, `gpu:h800`."""
    gpu_option: GpuOption = GpuOption.GRES
    gpu_memory_gb: float = 0.0
    """Memory of one GPU in GB (10^9 bytes), for the estimate of `relax-hpc doctor`; 0 = unknown."""
    cross_component_steps: bool = True
    """False where `disable_hetjob_steps` forbids one step over several het components: the dcs then
    gets one step per component."""
    requeue: bool = True
    """Requeue before the time limit; also `#SBATCH --requeue` (node failure, preemption)."""
    signal_lead_s: int = 120
    """`--signal=B:USR2@N`: seconds before the time limit at which the supervisor begins to stop.
    Not USR1: NCCL catches it."""
    max_attempts: int = 20
    """Attempts (requeues) of one run; one without a new checkpoint ends the chain at once."""
    directives: tuple[str, ...] = ()
    """More `#SBATCH` options of every component."""
    srun_options: tuple[str, ...] = ()
    """More srun options of every step."""
    setup: tuple[str, ...] = ()
    """Shell lines that run before the supervisor."""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables of every step."""

    def __post_init__(self) -> None:
        if not 0 < self.signal_lead_s <= 65535:  # sbatch(1), --signal
            raise ConfigError(f"signal_lead_s={self.signal_lead_s}: must be in 1..65535")
        if self.gpu_memory_gb < 0:
            raise ConfigError(f"gpu_memory_gb={self.gpu_memory_gb}: must be >= 0")
        for option in (*self.directives, *self.srun_options):
            if not option.startswith("-") or "\n" in option:
                raise ConfigError(f"directives/srun_options: {option!r} is no option")


def data_folders(kind: str) -> list[Path]:
    """Return where `recipes` or `sbatch` data may lie: submit folder, checkout, package."""
    package = Path(__file__).resolve().parent.parent
    return [Path(kind), package.parent / kind, package / kind]


def find_recipe(name: str) -> Path:
    """Return the path of a recipe given as a path or as the bare name of a shipped one.

    Raises:
        ConfigError: neither exists; lists the recipes that do.
    """
    path = Path(name)
    if path.suffix or path.exists():
        return path
    candidates = [folder / f"{name}.toml" for folder in data_folders("recipes")]
    return next((c for c in candidates if c.is_file()), path)


def load_site(name: str) -> Site:
    """Read the site profile `sbatch/NAME.toml`.

    Raises:
        ConfigError: no such profile (lists those that exist), unknown key, wrong value.
    """
    for folder in data_folders("sbatch"):
        path = folder / f"{name}.toml"
        if path.is_file():
            return _parse(name, path)
    known = sorted({p.stem for folder in data_folders("sbatch") for p in folder.glob("*.toml")})
    raise ConfigError(
        f"resources.site={name!r}: there is no sbatch/{name}.toml; known: {', '.join(known)}"
    )


def _parse(name: str, path: Path) -> Site:
    try:
        tree: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as err:
        raise ConfigError(f"site profile {path} cannot be read as TOML: {err}") from err
    valid = sorted(field.name for field in dataclasses.fields(Site) if field.name != "name")
    for key in tree:
        if key not in valid:
            raise ConfigError(f"{path}: {key}: unknown key; valid here: {', '.join(valid)}")
    try:
        return msgspec.convert({"name": name, **tree}, Site)
    except (msgspec.ValidationError, ConfigError) as err:
        raise ConfigError(f"{path}: {err.__cause__ or err}") from err
