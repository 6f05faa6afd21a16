"""The whole round as one graph: the host starts it and reads what it wrote, one round late."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from fastea.round import Outcome, Round
from fastea.state import DecodeState

RING = 4  # rounds that are kept; two are under way at most
WARM_UPS = 3  # before capturing: kernels compile, libraries take their workspaces

Action = Callable[[], object]


class Replay:
    """Rounds of one state and one kind of sampling.

    A round ends by writing its record (emitted, path, count, finite) into a ring on the device and the ring into
    pinned memory. `step` starts the next round before it waits for the last, so the device never waits for the host;
    a sequence that has ended advances no more (`DecodeState.done`), and the round started in vain is not read.
    capture: turns an action on the device into one that repeats it; by default a CUDA graph on a GPU, and the action
    itself elsewhere.
    """

    def __init__(self, round: Round, state: DecodeState, capture: Callable[[Action], Action] | None = None):
        self.round, self.state, self.on_gpu = round, state, state.root.is_cuda
        batch, self.width = state.emitted.shape
        with torch.inference_mode(False):  # as the state's
            self.ring = torch.zeros(RING, batch, 2 * self.width + 2, dtype=torch.int64, device=state.root.device)
            self.host = torch.zeros(self.ring.shape, dtype=torch.int64, pin_memory=self.on_gpu)
            self.turn = torch.zeros(1, dtype=torch.int64, device=state.root.device)
        self.started = self.finished = 0
        self.events = [torch.cuda.Event() for _ in range(RING)] if self.on_gpu else []
        with self.here():
            self.play = (capture or (graph if self.on_gpu else lambda action: action))(self._round)

    def here(self) -> contextlib.AbstractContextManager[None]:
        """With this device as the current one, whose streams events and graphs are of."""
        return torch.cuda.device(self.ring.device) if self.on_gpu else contextlib.nullcontext()

    @torch.inference_mode()
    def _round(self) -> None:
        outcome = self.round(self.state)
        ends = torch.stack((outcome.count, outcome.finite.long()), 1)
        record = torch.cat((outcome.emitted, outcome.path, ends), 1)
        self.ring.index_copy_(0, self.turn % RING, record[None])
        self.turn.add_(1)
        self.host.copy_(self.ring, non_blocking=True)

    def begin(self) -> None:
        """The state is ready for its first round. A round that was started in vain is waited for."""
        if self.on_gpu:
            torch.cuda.current_stream(self.ring.device).synchronize()
        self.started = self.finished = 0
        self.turn.zero_()

    def step(self) -> Outcome:
        """The next round's outcome, on the host."""
        with self.here():
            while self.started < self.finished + 2:
                self.play()
                if self.on_gpu:
                    self.events[self.started % RING].record()
                self.started += 1
        slot = self.finished % RING
        if self.on_gpu:
            self.events[slot].synchronize()
        self.finished += 1
        emitted, path, count, finite = self.host[slot].clone().split((self.width, self.width, 1, 1), 1)
        return Outcome(emitted, count[:, 0], path, finite[:, 0] != 0)


def graph(action: Action) -> Action:
    """The action as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            action()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay
