"""The usual way: each pipeline stage's first rank gathers full tensors and broadcasts them to all.

As slime and Relax do it (megatron's shards are gathered to the Hugging Face tensors of one bucket
after the other, each broadcast to every engine rank, which takes its part), with two differences
in its favour: shards go to the first rank only, not to all of the tensor parallel group, and the
stages' broadcasts overlap.
"""

import itertools
import typing
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from relax_hpc.dcs.layout import Box, TensorSpec
from relax_hpc.dcs.rank_layout import Sharding
from weights_bench.case import Case


class Bucket(typing.NamedTuple):
    """Tensors of one stage that are gathered and broadcast as one."""

    specs: tuple[TensorSpec, ...]
    nbytes: int


class BroadcastSync:
    """Both sides of gather-and-broadcast; collective over all ranks."""

    def __init__(
        self,
        case: Case,
        tensors: Mapping[Box, torch.Tensor],
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        """`tensors`: what this rank sends from (trainer) or receives into (engine)."""
        self._case, self._tensors, self._device = case, tensors, device
        self._rank, self._first = dist.get_rank(), case.trainer.num_ranks
        by_stage: dict[int, list[TensorSpec]] = {}
        for _, spec in case.specs.values():
            by_stage.setdefault(self._root_of(spec), []).append(spec)
        self._stages = {
            root: _buckets(specs, bucket_bytes) for root, specs in sorted(by_stage.items())
        }
        engines = list(range(self._first, case.world_size))
        self._groups = {root: dist.new_group([root, *engines]) for root in self._stages}
        sizes = [bucket.nbytes for buckets in self._stages.values() for bucket in buckets]
        empty = torch.empty(max(sizes), dtype=torch.uint8, device=device)
        self._buffers = {root: torch.empty_like(empty) for root in self._stages}
        self._shards = torch.empty_like(empty)
        self.num_bytes = 0
        """Received by this rank, of all versions."""

    def run(self) -> None:
        rounds = itertools.zip_longest(*self._stages.values())
        for of_stages in rounds:
            pairs = list(zip(self._stages, of_stages, strict=True))
            if self._rank < self._first:
                self._serve([(root, bucket) for root, bucket in pairs if bucket])
            else:
                self._take([(root, bucket) for root, bucket in pairs if bucket])

    def _serve(self, of_stages: Sequence[tuple[int, Bucket]]) -> None:
        for root, bucket in of_stages:
            shards = [shard for shard in self._shards_of(bucket) if shard[1] != root]
            if self._rank == root:
                flat = self._gather(bucket, shards)
                dist.broadcast(flat, root, group=self._groups[root])
            elif any(owner == self._rank for _, owner in shards):
                mine = [self._words(box) for box, owner in shards if owner == self._rank]
                dist.send(torch.cat([view.reshape(-1) for view in mine]), root)

    def _gather(self, bucket: Bucket, shards: Sequence[tuple[Box, int]]) -> torch.Tensor:
        wholes = _wholes(self._buffers[self._rank], bucket)
        for box, owner in self._shards_of(bucket):
            if owner == self._rank:
                wholes[box.name][box.slices].copy_(self._words(box))
        for owner in sorted({owner for _, owner in shards}):
            boxes = [box for box, other in shards if other == owner]
            packed = self._shards[: 2 * sum(box.size for box in boxes)].view(torch.int16)
            dist.recv(packed, owner)
            self.num_bytes += 2 * len(packed)
            parts = packed.split([box.size for box in boxes])
            for box, part in zip(boxes, parts, strict=True):
                wholes[box.name][box.slices].copy_(part.view(box.shape))
        return self._buffers[self._rank][: bucket.nbytes]

    def _take(self, of_stages: Sequence[tuple[int, Bucket]]) -> None:
        works = [
            dist.broadcast(
                self._buffers[root][: bucket.nbytes], root, self._groups[root], async_op=True
            )
            for root, bucket in of_stages
        ]
        for work, (root, bucket) in zip(works, of_stages, strict=True):
            work.wait()
            self.num_bytes += bucket.nbytes
            wholes = _wholes(self._buffers[root], bucket)
            for box, tensor in self._tensors.items():
                if box.name in wholes:
                    tensor.view(torch.int16).copy_(wholes[box.name][box.slices])

    def _root_of(self, spec: TensorSpec) -> int:
        """First rank of the first stage that holds a tensor."""
        owners = [ranks[0] for ranks in self._sharding(spec).holders]
        return min(owners) // self._case.stage_ranks * self._case.stage_ranks

    def _shards_of(self, bucket: Bucket) -> list[tuple[Box, int]]:
        """The boxes of a bucket's tensors, each with the first rank that holds it."""
        found = []
        for spec in bucket.specs:
            way = self._sharding(spec)
            for (start, stop), ranks in zip(way.ranges, way.holders, strict=True):
                found.append((Box(spec.name, start, stop), ranks[0]))
        return found

    def _sharding(self, spec: TensorSpec) -> Sharding:
        layout = self._case.trainer
        return layout.shardings[layout.sharding_of[self._case.specs[spec.name][0]]]

    def _words(self, box: Box) -> torch.Tensor:
        return self._tensors[box].view(torch.int16)


def _buckets(specs: Sequence[TensorSpec], limit: int) -> list[Bucket]:
    buckets: list[Bucket] = []
    for spec in specs:
        if not buckets or buckets[-1].nbytes + spec.nbytes > limit:
            buckets.append(Bucket((), 0))
        buckets[-1] = Bucket((*buckets[-1].specs, spec), buckets[-1].nbytes + spec.nbytes)
    return buckets


def _wholes(buffer: torch.Tensor, bucket: Bucket) -> dict[str, torch.Tensor]:
    """Views of the full tensors in a bucket's buffer, as 16-bit words."""
    found, first = {}, 0
    for spec in bucket.specs:
        raw = buffer[first : first + spec.nbytes]
        found[spec.name] = raw.view(torch.int16).view(spec.shape)
        first += spec.nbytes
    return found
