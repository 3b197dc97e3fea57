"""A device whose memory is not the host's: llama.cpp's RPC backend, served by a process of its own on loopback.

    python -m testkit.processes.rpc_device PORT

It stands in for a graphics card: what is computed on it has to be copied to the host before it can be read there.
`add_rpc_device` starts one for this process, in which llama.cpp lists it from then on, like any card.
"""

import os
import subprocess
import sys
import threading

from edgellm.engine.hardware import ComputeDevice, compute_devices, offload_devices
from edgellm.rpc_engine import backend
from testkit import ROOT, free_port, until_listening

HOST = "127.0.0.1"
DEVICES = ("host", "rpc", "card")
"""Where models can be: in this process's memory, on a device of `add_rpc_device`, or on this machine's own cards."""


def add_rpc_device() -> ComputeDevice:
    """Start a device with one thread, and return it as llama.cpp lists it. It ends with this process.

    llama.cpp ends a process whose RPC device has gone away, so nothing stops it before.
    """
    if not backend.is_compiled_in():
        raise RuntimeError("llama.cpp is compiled without its RPC backend; ./start test compiles it with it.")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(port)], cwd=ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    _running.append(process)
    until_listening(port, process)
    # llama.cpp asks the device to compute the last graph that any thread sent once more, even after the device has
    # dropped it because a buffer was freed. So each graph is sent.
    os.environ["LLAMA_GRAPH_REUSE_DISABLE"] = "1"
    (name,) = backend.add_server(port)
    return next(device for device in compute_devices() if device.name == name)


def require_device(device: str) -> None:
    """Make sure that models can be on a device of `DEVICES`; they are put there as `Hardware` says.

    On a card, llama.cpp's Vulkan backend computes in 32 bits from here on, as a processor does: by default it rounds
    what it multiplies to 16, if the card can, and texts are compared whose logits differ less.

    Raises:
        RuntimeError: llama.cpp finds no graphics card. Its Vulkan backend leaves out a driver that computes on the
            processor, such as llvmpipe, unless GGML_VK_VISIBLE_DEVICES names it.
    """
    if device == "rpc":
        add_rpc_device()
    if device == "card":
        os.environ["GGML_VK_DISABLE_F16"] = "1"  # read when the first model is loaded there
        if not offload_devices():
            raise RuntimeError("llama.cpp finds no graphics card; ./start --gpu auto compiles it for one.")


_running: list[subprocess.Popen[bytes]] = []  # their input closes when this process ends, however it does


def serve(port: int) -> None:
    """Serve the processor as a device until the input closes."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    backend.serve(port, 1, ("CPU",))


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
