"""The work that both queues do. numpy only: it is imported in both environments.

text      256 samples of int32 tokens and float32 logprobs, 4096 to 8192 long: 12.8 MB, 512 arrays
tensors   64 samples of one float32 tensor of 4 MiB: 268 MB
latency   32 text samples as one micro-batch: 1.6 MB
"""

import dataclasses

import numpy as np

WORKS = ("text", "tensors", "latency")
GROUP_SIZE = 8
TASK = "train"
_NUM_SAMPLES = {"text": 256, "tensors": 64, "latency": 32}
_TENSOR_SHAPE = (1024 * 1024,)
_SHORTEST, _LONGEST = 4096, 8192
_VOCABULARY = 151_936

Arrays = dict[str, np.ndarray]
"""One sample by field."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Samples to be moved."""

    name: str
    samples: list[Arrays]

    @property
    def fields(self) -> list[str]:
        """Names of the fields."""
        return list(self.samples[0])

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return sum(array.nbytes for sample in self.samples for array in sample.values())


def make_work(name: str) -> Work:
    """Make the work `name`; the same numbers in every process."""
    random = np.random.default_rng(7)
    make_sample = _tensor_sample if name == "tensors" else _text_sample
    return Work(name, [make_sample(random) for _ in range(_NUM_SAMPLES[name])])


def _text_sample(random: np.random.Generator) -> Arrays:
    length = int(random.integers(_SHORTEST, _LONGEST, endpoint=True))
    return {
        "tokens": random.integers(0, _VOCABULARY, length, np.int32),
        "logprobs": -random.random(length, np.float32),
    }


def _tensor_sample(random: np.random.Generator) -> Arrays:
    return {"pixel_values": random.standard_normal(_TENSOR_SHAPE, np.float32)}


def checksum(samples: list[Arrays]) -> int:
    """Read every byte; equal on both ends, for any order of the samples."""
    total = 0
    for sample in samples:
        for array in sample.values():
            bits = array.reshape(-1).view(np.uint32)
            total += int(np.bitwise_xor.reduce(bits)) * bits.size
    return total
