"""`loop` on CUDA: one WHILE graph whose body is the captured step; the device goes from step to step by itself.

The graph is a step boundary, which takes in admitted requests, and a loop of steps, each ending in a step boundary that
sets the loop's condition. One launch lasts until no slot is live. Only the step boundary is CUDA C++: Triton cannot set
a condition.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ostinato.backends.cuda.start import BOUNDARY_THREADS, DevicePaced
from ostinato.errors import HardwareCannot, first_line


class WhileGraph(DevicePaced):
    """The whole loop as one executable; the host launches it once per trigger."""

    name = "loop"

    def _make(self) -> None:
        from cuda.bindings import driver
        from cuda.core import LaunchConfig, Stream, launch
        from cuda.core.graph import GraphDefinition

        graph = GraphDefinition()
        condition = graph.create_condition(default_value=0)
        config = LaunchConfig(grid=1, block=BOUNDARY_THREADS)
        first = graph.launch(config, self._boundary_in_loop, *self._boundary_arguments, condition)
        body = first.while_loop(condition).body
        stream = driver.CUstream(self.stream.cuda_stream)
        own_thread = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        _ok(driver.cuStreamBeginCaptureToGraph(stream, body.handle, None, None, 0, own_thread), "begin the capture")
        try:
            with torch.cuda.stream(self.stream):
                for node in self._plan.nodes:
                    node.run()
                own = Stream.from_handle(self.stream.cuda_stream)
                launch(own, config, self._boundary_in_loop, *self._boundary_arguments, condition)
        except Exception as error:  # torch raises RuntimeError, cuda-core a kind of its own that is only an Exception
            raise HardwareCannot(
                f"the step could not be captured into the loop: {first_line(error)}; use --mode graph"
            ) from error
        finally:
            # Always ended, whatever happened inside: a stream left capturing would fail everything after it (E-59).
            ended = driver.cuStreamEndCapture(stream)
            if int(ended[0]) != 0:
                # The driver has thrown the body away with the broken capture, and destroying the graph around it ends
                # the process, at its exit too: so one reference is leaked on purpose, a few kilobytes, once.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object((graph, condition, first, body)))
        _ok(ended, "end the capture")
        self._check_captured(len(body.nodes()))
        try:
            self._graph, self._executable = graph, graph.instantiate()
        except Exception as error:  # cuda-core's own kind
            raise HardwareCannot(
                f"the loop could not be instantiated: {first_line(error)}; use --mode graph"
            ) from error
        self.n_instantiations += 1
        self._own = Stream.from_handle(self.stream.cuda_stream)

    def launch(self) -> None:
        self._guard.allow_launch()
        self.n_launches += 1
        self._executable.launch(self._own)
        self._passed.record(self.stream)

    def step(self) -> None:
        self._guard.allow("I-2", "submitting a single step from the host")
        super().step()

    def close(self) -> None:
        super().close()
        self._executable = self._graph = None


def _ok(result: Any, what: str) -> None:
    error = result[0] if isinstance(result, tuple) else result
    if int(error) != 0:
        raise HardwareCannot(f"the driver could not {what} of the loop: {error}; use --mode graph")
