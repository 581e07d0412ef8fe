"""What the rollout loop needs from an inference engine, and which engine a run gets.

Engines are token-in/token-out. Two of them keep this protocol and pass the same conformance tests:
`embedded.py` (plain torch in this process) and `sglang_server.py` (a server in a child process).
"""

import dataclasses
import typing
from collections.abc import Mapping

import numpy as np

from relax_hpc.config import Config, EngineKind
from relax_hpc.records import Completion

if typing.TYPE_CHECKING:
    from relax_hpc.control.identity import Identity

NO_VERSION = -1
"""`Engine.version` before the first weights were loaded."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One sample to generate."""

    request_id: str
    """Unique among the requests that run at the same time; names the request in `abort`."""
    token_ids: list[int]
    """Prompt; not empty."""
    max_new_tokens: int
    """> 0. A completion of this length without a stop token ends with reason length."""
    temperature: float
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 = all tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the completion, all of them: an engine adds none of its own (an evaluation
    that ignores the end of sequence passes none). The stop token stays in the completion."""
    seed: int = 0
    """In [0, 2**63). Equal seed, prompt and weights give the equal completion in any company."""


class WeightTensor(typing.Protocol):
    """One whole canonical (Hugging Face) tensor in host memory, as the weight service gives it."""

    @property
    def dtype(self) -> str:
        """Name of the element type: float32, bfloat16, float16."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the canonical tensor."""
        ...

    @property
    def data(self) -> np.ndarray:
        """Raw bytes, uint8, C order; may be a read-only view that is valid during the call only."""
        ...


class Engine(typing.Protocol):
    """One inference engine. All methods are called from one asyncio loop."""

    @property
    def version(self) -> int:
        """Policy version of the weights that are served; NO_VERSION before the first update."""
        ...

    async def start(self) -> None:
        """Get ready for `update_weights`; `generate` needs one version first.

        Raises:
            EngineError: the model folder cannot be served (message says why).
        """
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Generate one sample; many calls run at the same time.

        `logprobs` are of the distribution that was sampled from: log-softmax over the whole
        vocabulary of logits / temperature (greedy: temperature 1; top-p and top-k, which only
        evaluation uses, do not change the reported value). `token_versions` never decrease.
        Reason length means truncated: max_new_tokens without a stop token. Reason abort carries
        what was generated so far. A cancelled call aborts its request.

        Raises:
            EngineError: no weights yet, an impossible request, or the engine broke.
        """
        ...

    async def update_weights(self, version: int, tensors: Mapping[str, WeightTensor]) -> None:
        """Serve a whole version, or stay with the old one.

        Pauses, verifies (names, shapes, all bytes arrived), swaps, goes on: running requests
        continue and their later tokens carry the new version; keys and values of the old weights
        serve no new request. A version older than the served one (the trainer was rolled back) ends
        the running requests with reason abort.

        Raises:
            EngineError: nothing changed, the old version is served.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a running request with reason abort; unknown ids are ignored (it may have ended)."""
        ...

    async def healthy(self) -> bool:
        """Whether the engine can still answer."""
        ...

    async def close(self) -> None:
        """Stop; running `generate` calls raise EngineError. Safe to call twice."""
        ...


def make_engine(config: Config, identity: "Identity") -> Engine:
    """Build the engine that the recipe names; the import of the other one never happens."""
    if config.rollout.engine is EngineKind.SGLANG:
        from relax_hpc.rollout.sglang_server import SglangEngine

        return SglangEngine(config, identity)
    from relax_hpc.rollout.embedded import EmbeddedEngine

    return EmbeddedEngine.from_config(config, identity)
