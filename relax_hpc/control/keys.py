"""The run's CURVE keys: who holds them belongs to the run."""

import msgspec
import zmq

from relax_hpc.errors import ControlError
from relax_hpc.runfolder import RunFolder, write_secret


class Keys(msgspec.Struct, frozen=True):
    """Content of RUN/secret/curve.json."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str


def create_keys(folder: RunFolder) -> None:
    """Make the run's CURVE keys once, at submit time: RUN/secret/curve.json, mode 0600.

    A second call keeps the keys: a requeued job goes on with the same ones.
    """
    path = folder.secret / "curve.json"
    if path.exists():
        return
    folder.secret.mkdir(mode=0o700, exist_ok=True)
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    keys = Keys(
        server_public.decode(),
        server_secret.decode(),
        client_public.decode(),
        client_secret.decode(),
    )
    write_secret(path, msgspec.json.encode(keys))


def load_keys(folder: RunFolder) -> Keys:
    """Read the keys.

    Raises:
        ControlError: they are not there, not private, or damaged.
    """
    path = folder.secret / "curve.json"
    try:
        data, mode = path.read_bytes(), path.stat().st_mode
    except OSError as err:
        raise ControlError(
            f"cannot read the keys of run {folder.run_id} ({path}: {err.strerror}): only the user "
            "who submitted the run can talk to it"
        ) from err
    if mode & 0o077:
        raise ControlError(f"{path} can be read by others (mode {mode & 0o777:o}): chmod 600 it")
    try:
        return msgspec.json.decode(data, type=Keys)
    except msgspec.DecodeError as err:
        raise ControlError(f"{path} is not a key file: {err}") from err
