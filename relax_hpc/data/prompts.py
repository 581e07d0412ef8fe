"""The prompts of a run: read, tokenized, counted and fingerprinted. Torch-free at import."""

import hashlib
import logging
import typing
from typing import Literal

from relax_hpc.config import DataConfig
from relax_hpc.data.sources import REASONING_GYM, Source, check_rows
from relax_hpc.data.tokenizer import Tokenizer, prompt_text, prompt_token_ids
from relax_hpc.errors import ConfigError
from relax_hpc.log import kv
from relax_hpc.records import Prompt as Prompt

Split = Literal["train", "eval"]

# Without a seed of its own a reasoning_gym source must not evaluate on its training questions.
_DEFAULT_SEEDS: dict[Split, int] = {"train": 1, "eval": 2}
_DEFAULT_NUM_GYM_EVAL = 100

_logger = logging.getLogger(__name__)


class PromptSet:
    """An indexable set of prompts; the index is what the transfer queue's ledger counts.

    Order and content depend on the configuration and the file only, so every rollout engine of a
    run sees the same set; the ledger compares `fingerprint` to make sure.
    """

    def __init__(self, prompts: list[Prompt], num_dropped: int) -> None:
        self._prompts = prompts
        self.num_dropped = num_dropped
        """Prompts left out since they were longer than `data.max_prompt_tokens`."""
        self.fingerprint = _fingerprint(prompts)
        """Hex digest of all token ids and labels, in order."""

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    def __iter__(self) -> typing.Iterator[Prompt]:
        return iter(self._prompts)


def load_prompts(config: DataConfig, split: Split, tokenizer: Tokenizer) -> PromptSet:
    """Read and tokenize a split; prompts over `max_prompt_tokens` are dropped and counted.

    Called by every rollout step at its start.

    Args:
        config: sources, columns and limits.
        split: "train" or "eval" (`num_eval_prompts` of it, from the start).
        tokenizer: of the model folder (`data.tokenizer.load_tokenizer`).

    Raises:
        ConfigError: unreadable source, bad row, or nothing left.
    """
    source = _source(config, split)
    limit = config.num_eval_prompts if split == "eval" else 0
    prompts: list[Prompt] = []
    num_dropped = 0
    for raw in source.rows():
        token_ids = prompt_token_ids(tokenizer, raw.prompt, config.apply_chat_template)
        if len(token_ids) > config.max_prompt_tokens:
            num_dropped += 1
            continue
        text = prompt_text(raw.prompt)
        prompts.append(
            Prompt(token_ids=token_ids, label=raw.label, text=text, metadata=raw.metadata)
        )
        if len(prompts) == limit:
            break
    if not prompts:
        raise source.error(
            f"no prompt is left: {num_dropped} of {num_dropped} are longer than "
            f"data.max_prompt_tokens={config.max_prompt_tokens}"
            if num_dropped
            else "has no rows; an empty data set cannot be trained on"
        )
    _logger.info(
        "prompts %s", kv(split=split, source=source.spec, num=len(prompts), dropped=num_dropped)
    )
    return PromptSet(prompts, num_dropped)


def check_source(config: DataConfig) -> int:
    """Check without a tokenizer that train and eval sources exist, parse and are not empty.

    For `relax-hpc validate`: reads all rows of a jsonl file, the first ones of other sources.

    Returns:
        Number of training prompts, before long ones are dropped.

    Raises:
        ConfigError: with the remedy.
    """
    if config.eval:
        check_rows(_source(config, "eval"))
    return check_rows(_source(config, "train"))


def _source(config: DataConfig, split: Split) -> Source:
    spec = config.train if split == "train" else config.eval
    if not spec:
        raise ConfigError(f"data.{split} is empty: name a *.jsonl, *.parquet or reasoning_gym:TASK")
    size = config.num_train_prompts
    if split == "eval":
        # A set of its own that is generated: as many as will be used.
        size = config.num_eval_prompts if config.num_eval_prompts > 0 else _DEFAULT_NUM_GYM_EVAL
    is_gym = spec.startswith(REASONING_GYM)
    return Source(
        spec=spec,
        prompt_key=config.prompt_key,
        label_key=config.label_key,
        name=f"data.{split}",
        default_size=size if is_gym else 0,
        default_seed=_DEFAULT_SEEDS[split],
    )


def _fingerprint(prompts: list[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        ids = ",".join(map(str, prompt.token_ids))
        digest.update(f"{ids}\x1f{len(prompt.label)}\x1f{prompt.label}\x1e".encode())
    return digest.hexdigest()[:32]
