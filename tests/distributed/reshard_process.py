"""What ranks do in the reshard tests: any model, any layouts, tensors that a version decides."""

import dataclasses
import json
import os
import signal
import sys
import time
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from relax_hpc.dcs import reshard
from relax_hpc.dcs.architectures import Model, read_model
from relax_hpc.dcs.engine_layout import EngineParallel, engine_layout
from relax_hpc.dcs.layout import Box
from relax_hpc.dcs.plan import Placement, Plan, plan
from relax_hpc.dcs.rank_layout import Layout
from relax_hpc.dcs.reshard import ShardReceiver, ShardSender
from relax_hpc.dcs.staging import Held
from relax_hpc.dcs.trainer_layout import TrainerParallel, trainer_layout
from relax_hpc.dcs.weight_group import WeightGroup
from relax_hpc.errors import WeightSyncError
from relax_hpc.trainer.hf_weights import ShardPlace, held_boxes
from relax_hpc.trainer.model_config import shape_from_tree

DEADLINE_S = 60.0
"""Where nothing is broken: against hanging only."""
SHORT_S = 8.0
"""Where a stopped process must be noticed."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its two layouts, as every rank computes them."""

    model: Model
    trainer: Layout
    parallel: TrainerParallel
    engine: Layout
    plan: Plan


def make_case(
    config: Mapping[str, typing.Any], ours: Mapping[str, int], theirs: Mapping[str, int]
) -> Case:
    model, parallel = read_model(config), TrainerParallel(**ours)
    trainer = trainer_layout(model, parallel)
    engine = engine_layout(model, EngineParallel(**theirs))
    made = plan(trainer, engine, Placement.blocks(trainer.num_ranks, engine.num_ranks))
    return Case(model, trainer, parallel, engine, made)


def whole_tensors(model: Model, version: int) -> dict[str, torch.Tensor]:
    """The Hugging Face tensors of a version: any bits, also those of no number."""
    generator = torch.Generator().manual_seed(version)
    return {
        tensor.name: torch.randint(
            -(2**15), 2**15, tensor.shape, dtype=torch.int16, generator=generator
        ).view(torch.bfloat16)
        for tensor in model.tensors
    }


def words(tensor: torch.Tensor) -> torch.Tensor:
    """Bits of a bfloat16 tensor: comparable, where numbers have NaN."""
    return tensor.contiguous().view(torch.int16)


class Parameters:
    """A trainer rank's parameters: fused as megatron's where the tests know how, else boxes."""

    def __init__(self, case: Case, rank: int, config: Mapping[str, typing.Any]) -> None:
        is_dense = not case.model.num_experts
        self.held = _fused(case, rank, config) if is_dense else _boxes(case, rank)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for box, view in self.held:
            view.copy_(tensors[box.name][box.slices].reshape(view.shape))


def _boxes(case: Case, rank: int) -> list[Held]:
    """One parameter a box, transposed in memory where it can be."""
    boxes = case.trainer.boxes_of(rank)
    return [(box, torch.zeros(box.shape[::-1], dtype=torch.bfloat16).T) for box in boxes]


def _fused(case: Case, rank: int, config: Mapping[str, typing.Any]) -> list[Held]:
    """Megatron's parameters of a dense Qwen3 with one bfloat16 buffer for all, as its DDP has."""
    model, tp, pp = case.model, case.parallel.tp, case.parallel.pp
    stage = rank // (tp * case.parallel.cp * case.parallel.dp)
    hidden, head = config["hidden_size"], model.head_dim
    groups, queries = model.num_kv_heads // tp, model.num_heads // model.num_kv_heads
    ffn, rows = config["intermediate_size"] // tp, -(-model.vocab_size // tp)
    shapes: dict[str, tuple[int, ...]] = {}
    if stage == 0:
        shapes["embedding.word_embeddings.weight"] = (rows, hidden)
    for layer in range(model.num_layers // pp):
        shapes |= {
            f"decoder.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm.weight": (hidden,),
                "self_attention.linear_qkv.weight": (groups * (queries + 2) * head, hidden),
                "self_attention.q_layernorm.weight": (head,),
                "self_attention.k_layernorm.weight": (head,),
                "self_attention.linear_proj.weight": (hidden, groups * queries * head),
                "pre_mlp_layernorm.weight": (hidden,),
                "mlp.linear_fc1.weight": (2 * ffn, hidden),
                "mlp.linear_fc2.weight": (hidden, ffn),
            }.items()
        }
    if stage == pp - 1:
        shapes["decoder.final_layernorm.weight"] = (hidden,)
        shapes["output_layer.weight"] = (rows, hidden)
    parameters = {n: torch.zeros(s, dtype=torch.bfloat16) for n, s in shapes.items()}
    place = ShardPlace(tp_rank=rank % tp, tp_size=tp, first_layer=stage * (model.num_layers // pp))
    shape = shape_from_tree({**config, "rms_norm_eps": 1e-6}, "test")
    return [(held.box, held.view) for held in held_boxes(parameters, shape, place)]


def exchange(
    folder: str,
    number: int,
    config: Mapping[str, typing.Any],
    ours: Mapping[str, int],
    theirs: Mapping[str, int],
) -> dict[str, int]:
    """Four versions, the parameters overwritten while each is on its way; counts what travelled."""
    case = make_case(config, ours, theirs)
    rank, first = dist.get_rank(), case.trainer.num_ranks
    size = first + case.engine.num_ranks
    if rank >= size:
        return {}
    store = dist.FileStore(f"{folder}/store-{number}", size)
    group = WeightGroup(store, rank, size, name="one", deadline_s=DEADLINE_S)
    versions = range(1, 5)
    if rank < first:
        parameters = Parameters(case, rank, config)
        sender = ShardSender(case.plan, rank, group, parameters.held, deadline_s=DEADLINE_S)
        for version in versions:
            parameters.load(whole_tensors(case.model, version))
            sender.snapshot(version)
            parameters.load(whole_tensors(case.model, 1000 + version))  # the optimizer
        sender.drain()
        sender.close()
        return {"sent": sender.sent_bytes, "planned": 4 * int(case.plan.sent_bytes[rank])}
    receiver = ShardReceiver(case.plan, rank - first, group, deadline_s=DEADLINE_S)
    received = 0
    for version in versions:
        got, tensors = receiver.receive(version), whole_tensors(case.model, version)
        assert set(got) == set(case.engine.boxes_of(rank - first))
        for box, tensor in got.items():
            assert torch.equal(words(tensor), words(tensors[box.name][box.slices])), (version, box)
            received += tensor.nbytes
    assert receiver.version == 4
    return {"received": received, "minimum": 4 * case.plan.minimum_bytes}


# ---------------------------------------------------------------------------------------------
# Faults: processes of their own, without a default group
# ---------------------------------------------------------------------------------------------


def strike(fault: str, continued: Path) -> None:
    """Kill or stop this process, for good or until somebody continues it."""
    os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    while not continued.exists():  # a stop may come a moment later than this line
        time.sleep(0.05)


def strike_in_the_middle(member: ShardSender | ShardReceiver, fault: str, continued: Path) -> None:
    """Let a fault come when half of each peer's bytes of the next version went through."""
    group = member._group
    is_sender = isinstance(member, ShardSender)
    original: Callable[..., typing.Any] = group.send if is_sender else group.receive

    def half(messages: typing.Any) -> typing.Any:
        if messages[0].data.dtype == torch.int64:  # headers
            return original(messages)
        of_peers = [[m for m in messages if m.rank == peer] for peer in {m.rank for m in messages}]
        assert min(map(len, of_peers)) > 1
        for of_peer in of_peers:
            for pending in original(of_peer[: len(of_peer) // 2]):
                pending.wait(DEADLINE_S)
        strike(fault, continued)
        # Continued, too late: nobody may take or give the rest.
        late = [
            pending for of_peer in of_peers for pending in original(of_peer[len(of_peer) // 2 :])
        ]
        return [late[0]] * len(messages)

    setattr(group, "send" if is_sender else "receive", half)


@dataclasses.dataclass
class Rank:
    """One process of a fault test; it writes what happens as lines of JSON."""

    folder: Path
    rank: int
    generation: int
    """1, or 2 = a replacement."""
    victim: int
    fault: str

    def __post_init__(self) -> None:
        tree = json.loads((self.folder / "case.json").read_text())
        self.config = tree["config"]
        self.case = make_case(tree["config"], tree["ours"], tree["theirs"])
        self.first = self.case.trainer.num_ranks
        reshard._CHUNK_BYTES = 4096

    def group(self, generation: int) -> WeightGroup:
        size = self.first + self.case.engine.num_ranks
        store = dist.FileStore(str(self.folder / f"store-{generation}"), size)
        name = f"generation {generation}"
        return WeightGroup(store, self.rank, size, name=name, deadline_s=DEADLINE_S)

    def say(self, what: str, value: typing.Any) -> None:
        with (self.folder / f"said-{self.rank}-{self.generation}").open("a") as file:
            file.write(json.dumps([what, value]) + "\n")

    def run(self) -> None:
        self.trainer() if self.rank < self.first else self.engine()

    def versions(self) -> Iterator[int]:
        """Whole, broken, whole after a rebuild; a replacement comes in for the third."""
        is_first = self.generation == 1
        yield from (1, 2) if is_first else ()
        yield from () if is_first and self.rank == self.victim else (3,)

    def trainer(self) -> None:
        parameters = Parameters(self.case, self.rank, self.config)
        group = self.group(self.generation)
        sender = ShardSender(
            self.case.plan, self.rank, group, parameters.held, deadline_s=DEADLINE_S
        )
        for version in self.versions():
            parameters.load(whole_tensors(self.case.model, version))
            if version == 2:
                self.arm(sender)
            if version == 3 and self.generation == 1:
                sender.deadline_s = DEADLINE_S
                sender.rebuild(self.group(2))
            try:
                sender.send(version)
                self.say("sent", version)
            except WeightSyncError as err:
                self.say("error", str(err))
                assert sender.is_broken
        sender.close()

    def engine(self) -> None:
        group = self.group(self.generation)
        receiver = ShardReceiver(
            self.case.plan, self.rank - self.first, group, deadline_s=DEADLINE_S
        )
        for version in self.versions():
            if version == 2:
                self.arm(receiver)
            if version == 3 and self.generation == 1:
                receiver.deadline_s = DEADLINE_S
                receiver.rebuild(self.group(2))
            try:
                receiver.receive(version)
                self.say("received", version)
            except WeightSyncError as err:
                self.say("error", str(err))
                assert receiver.is_broken
            self.check(receiver)

    def check(self, receiver: ShardReceiver) -> None:
        """The tensors are whole, and of the version that the receiver names."""
        assert receiver.version is not None
        tensors = whole_tensors(self.case.model, receiver.version)
        for box, tensor in receiver._tensors.items():
            assert torch.equal(words(tensor), words(_part(tensors, box))), (receiver.version, box)
        self.say("holds", receiver.version)

    def arm(self, member: ShardSender | ShardReceiver) -> None:
        """A dead process is noticed at once, a stopped one at the deadline."""
        if self.fault == "stop":
            member.deadline_s = SHORT_S
        if self.rank == self.victim:
            strike_in_the_middle(member, self.fault, self.folder / "continued")


def _part(tensors: Mapping[str, torch.Tensor], box: Box) -> torch.Tensor:
    return tensors[box.name][box.slices]


if __name__ == "__main__":
    Rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]).run()
