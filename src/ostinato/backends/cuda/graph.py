"""`graph`: one captured step, replayed by the host for every token."""

from __future__ import annotations

import torch

from ostinato.backends.cuda.start import CudaStart
from ostinato.errors import HardwareCannot, first_line


class CudaGraph(CudaStart):
    """The step as one executable; the host launches it once per step."""

    name = "graph"
    device_paced = False

    def _make(self) -> None:
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # so that its nodes can be counted
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                for node in self._plan.nodes:
                    node.run()
                self._run_boundary()
            self._check_captured(_n_nodes(graph.raw_cuda_graph()))
            graph.instantiate()
        except RuntimeError as error:
            raise HardwareCannot(
                f"the step could not be captured as a graph: {first_line(error)}; use --mode eager"
            ) from error
        self.n_instantiations += 1
        self._graph = graph

    def _enqueue_step(self) -> None:
        self.n_launches += 1
        self._graph.replay()

    def close(self) -> None:
        super().close()
        self._graph = torch.cuda.CUDAGraph()


def _n_nodes(handle: int) -> int:
    from cuda.bindings import driver

    error, _, n_nodes = driver.cuGraphGetNodes(driver.CUgraph(handle))
    if int(error) != 0:
        raise HardwareCannot(f"the driver could not count the nodes of the captured step: {error}; use --mode eager")
    return int(n_nodes)
