"""TransferQueue's side: this process is the producer, a Ray actor is the consumer.

Runs in the environment that holds `transferqueue` (see environment.py). What it is given, so that
the comparison is fair: one storage unit (the better of 1 and 2 on a small machine), a consumer that
polls every 0.5 ms (its own StreamingDataset sleeps 1 s), `polling_mode` (without it a waiting
consumer stops all producers for 5 s), Ray workers at normal priority (Ray's default is nice 15),
tensors that are nested before the clock starts, and old rows cleared while the clock stands. What
it takes to nest the samples, and to cut what a get returns into arrays, is measured apart.
"""

import sys
import time

import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

from transfer_bench.side import Answer, serve
from transfer_bench.work import TASK, WORKS, Arrays, Work, checksum, make_work

POLL_S = 0.0005
_DEADLINE_S = 60.0


class Consumer:
    """Claims rows, fetches them, then reads every byte."""

    def __init__(self) -> None:
        transfer_queue.init()
        self._client = transfer_queue.get_client()

    def take(self, fields: list[str], num_samples: int, partition: str) -> Answer:
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            begun = time.monotonic()
            meta = self._client.get_meta(
                data_fields=fields, batch_size=num_samples, partition_id=partition, task_name=TASK
            )
            if meta.size:
                return _receive(begun, self._client.get_data(meta), fields)
            if begun > deadline:
                raise TimeoutError(f"{partition}: no {num_samples} rows in {_DEADLINE_S:g} s")
            time.sleep(POLL_S)

    def take_keys(self, fields: list[str], keys: list[str], partition: str) -> Answer:
        """Fetch rows whose keys are known, by the key-value interface: without a claim."""
        begun = time.monotonic()
        data = transfer_queue.kv_batch_get(keys=keys, partition_id=partition)
        return _receive(begun, data, fields)


def _receive(begun: float, data: TensorDict, fields: list[str]) -> Answer:
    received = time.monotonic()
    columns = [data[name].unbind() for name in fields]
    samples: list[Arrays] = [
        {name: tensor.numpy() for name, tensor in zip(fields, row, strict=True)}
        for row in zip(*columns, strict=True)
    ]
    unbound = time.monotonic()
    total = checksum(samples)
    read = time.monotonic()
    return {
        "get_s": received - begun,
        "received_at": received,
        "unbind_s": unbound - received,
        "read_s": read - unbound,
        "checksum": total,
    }


class Producer:
    """Puts the work and asks the consumer for it: one round per line of the bench."""

    def __init__(self, consumer: "ray.actor.ActorHandle") -> None:
        self._consumer = consumer
        self._client = transfer_queue.get_client()
        self._works = {name: make_work(name) for name in WORKS}
        self._data = {name: _nest(work) for name, work in self._works.items()}
        self._rounds = 0

    def round(self, work: str) -> Answer:
        """Put everything, then get everything."""
        fields, count, partition = self._next(work)
        begun = time.monotonic()
        self._client.put(self._data[work], partition_id=partition)
        put_s = time.monotonic() - begun
        taken = self._wait(self._consumer.take.remote(fields, count, partition))
        self._client.clear_partition(partition)
        return {"put_s": put_s, **taken, "nest_s": self._time_nesting(work)}

    def key_value_round(self, work: str) -> Answer:
        """Do the same by the key-value interface."""
        fields, count, partition = self._next(work)
        keys = [str(index) for index in range(count)]
        begun = time.monotonic()
        transfer_queue.kv_batch_put(keys=keys, partition_id=partition, fields=self._data[work])
        put_s = time.monotonic() - begun
        taken = self._wait(self._consumer.take_keys.remote(fields, keys, partition))
        transfer_queue.kv_clear(keys=keys, partition_id=partition)
        return {"put_s": put_s, **taken}

    def latency(self, work: str) -> Answer:
        """Put while the consumer already waits; from the start of the put to its tensors."""
        fields, count, partition = self._next(work)
        waiting = self._consumer.take.remote(fields, count, partition)
        time.sleep(0.05)
        begun = time.monotonic()
        self._client.put(self._data[work], partition_id=partition)
        put_s = time.monotonic() - begun
        taken = self._wait(waiting)
        self._client.clear_partition(partition)
        latency_s = taken["received_at"] - begun
        return {
            "put_s": put_s, "latency_s": latency_s, **taken, "nest_s": self._time_nesting(work)
        }  # fmt: skip

    def _time_nesting(self, work: str) -> float:
        """Make what a put takes of the samples once more; the round's put had it already."""
        begun = time.monotonic()
        _nest(self._works[work])
        return time.monotonic() - begun

    def _next(self, name: str) -> tuple[list[str], int, str]:
        self._rounds += 1
        work = self._works[name]
        return work.fields, len(work.samples), f"{name}-{self._rounds}"

    def _wait(self, reference: "ray.ObjectRef[Answer]") -> Answer:
        answer: Answer = ray.get(reference, timeout=_DEADLINE_S)
        return answer


def _nest(work: Work) -> TensorDict:
    columns = {}
    for name in work.fields:
        tensors = [torch.from_numpy(sample[name]) for sample in work.samples]
        is_ragged = len({tensor.shape for tensor in tensors}) > 1
        columns[name] = (
            torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
            if is_ragged
            else torch.stack(tensors)
        )
    return TensorDict(columns, batch_size=len(work.samples))


def main() -> None:
    """Start Ray with as few processes as it can, TransferQueue in it; serve; stop both."""
    try:
        ray.init(
            address="local", num_cpus=4, include_dashboard=False, object_store_memory=80 << 20,
            _temp_dir=sys.argv[1], log_to_driver=False, logging_level="ERROR",
        )  # fmt: skip
        backend = {"SimpleStorage": {"num_data_storage_units": 1}}
        transfer_queue.init(
            OmegaConf.create({"controller": {"polling_mode": True}, "backend": backend})
        )
        producer = Producer(ray.remote(num_cpus=0)(Consumer).remote())
        serve(
            {
                "ready": lambda: {"version": transfer_queue.__version__},
                "round": producer.round,
                "key_value_round": producer.key_value_round,
                "latency": producer.latency,
            }
        )
    finally:
        transfer_queue.close()
        ray.shutdown()


if __name__ == "__main__":
    main()
