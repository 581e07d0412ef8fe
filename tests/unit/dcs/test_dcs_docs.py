"""The worked example of docs/dcs.md is what the code computes."""

from pathlib import Path

from relax_hpc.dcs.architectures import read_model
from relax_hpc.dcs.engine_layout import EngineParallel, engine_layout
from relax_hpc.dcs.pull import plan_pull
from relax_hpc.dcs.trainer_layout import TrainerParallel, trainer_layout
from tests.unit.dcs.pull_shards import make_shard, owned_boxes
from tests.unit.dcs.weight_shapes import random_tensors

DOC = Path(__file__).parents[3] / "docs" / "dcs.md"
CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 150,
    "tie_word_embeddings": False,
}


def block(text, name):
    """The fenced text behind a marker of the document."""
    _, _, rest = text.partition(f"<!-- {name} -->\n```\n")
    found, _, _ = rest.partition("```\n")
    return found


def example():
    """Plan the pulls of all four engine ranks; returns (config line, holders, reads, totals)."""
    model = read_model(CONFIG)
    trainer = trainer_layout(model, TrainerParallel(tp=2, pp=2, vocab_multiple=128))
    engine = engine_layout(model, EngineParallel(tp=4))
    tensors = random_tensors(model, 0)
    shards = [
        make_shard(rank, f"n{rank}", boxes, tensors)[0]
        for rank, boxes in owned_boxes(trainer, lambda ranks: ranks[:1]).items()
    ]
    plans = [plan_pull(engine.specs, shards, engine.boxes_of(rank)) for rank in range(4)]
    holders = "".join(
        f"trainer rank {shard.rank}: {len(shard.pieces)} pieces, {shard.nbytes} bytes\n"
        for shard in shards
    )
    reads = "".join(
        f"from {shard.rank}: {read.box} {plans[1].nbytes(read)} B\n"
        for shard, of_shard in zip(shards, plans[1].reads, strict=True)
        for read in of_shard
    )
    totals = "".join(
        f"engine rank {rank}: {plan.minimum_bytes} bytes, by trainer rank {plan.shard_bytes}\n"
        for rank, plan in enumerate(plans)
    )
    gathered = 4 * sum(spec.nbytes for spec in engine.specs)
    totals += f"together {sum(p.minimum_bytes for p in plans)}; whole tensors to each: {gathered}\n"
    return holders, reads, totals


def test_the_worked_example_is_what_the_code_computes():
    text = DOC.read_text(encoding="utf-8")
    for name, found in zip(("holders", "reads", "totals"), example(), strict=True):
        assert block(text, name) == found


if __name__ == "__main__":  # prints the blocks for the document
    print(*example(), sep="\n")
