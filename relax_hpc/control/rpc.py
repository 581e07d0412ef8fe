"""Requests and replies between the processes of a run: pyzmq + msgspec, encrypted with CURVE.

client (any process)                         server (one asyncio loop, port 0)
  call(method, request) --- ROUTER/DEALER --->  handler(caller, request)
     waits for a reply, re-reads               may wait (long-poll); its reply or the RelaxError
     RUN/control/SERVICE.addr every second     that it raised goes back
     and sends again when the service moved

Processes of one node talk over a UNIX socket instead (rpc_near.py): the same messages, a third of
the time. Where that is not possible or breaks, they use TCP like all others.

Delivery: a request is sent again when the service was restarted or a connection may have been
lost, so a handler may see it twice and must be idempotent or carry a key of its own. Replies of an
earlier request never reach a later one (request ids, and a socket whose wait ended at the deadline
is closed, not reused). Nothing received is unpickled or evaluated: msgspec decodes into declared
types only.

This module is the front: rpc_server.py, rpc_client.py, rpc_near.py, rpc_message.py and keys.py do
the work.
"""

from relax_hpc.control.keys import create_keys
from relax_hpc.control.rpc_client import PendingCall, RpcClient
from relax_hpc.control.rpc_message import PING, Address, Caller, Empty
from relax_hpc.control.rpc_server import Responder, RpcServer

__all__ = [
    "PING",
    "Address",
    "Caller",
    "Empty",
    "PendingCall",
    "Responder",
    "RpcClient",
    "RpcServer",
    "create_keys",
]
