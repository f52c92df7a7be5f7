import torch

from qeffect_lm.contract import Guard, Slot, Summary
from qeffect_lm.graphs import HiddenStateRegister, HostReplay

cuda = torch.cuda.is_available()
names = ("weight", "cache", "x", "dy", "out", "dx", "grad")
mine = {name: torch.randn(64, 64, device="cuda" if cuda else "cpu") for name in names}
weight, cache, x, dy, out, dx, grad = mine.values()
streams = {"copy": torch.cuda.Stream(), "compute": torch.cuda.Stream()} if cuda else ["copy", "compute"]
guard = Guard(streams, tensors=mine, weights=["weight"], grads={"weight": grad})
reads_cache = {"layers": ("linear",), "weights": (("weight", "rows"),)}

def guarded(kind, work, effects, **touched):  # a capture of your own, and what it does
    if cuda:
        work()  # once outside, so that libraries allocate before the capture
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            work()
    else:
        graph = HostReplay().capture(kind, work, register=HiddenStateRegister(mine))
    return guard.graph(kind, graph, "compute", summary=Summary(kind, **effects), **touched)

f = guarded("F", lambda: torch.mm(x, cache, out=out), reads_cache, reads=[x, cache], writes=[out])
i = guarded("I", lambda: torch.mm(dy, cache.t(), out=dx), reads_cache, reads=[dy, cache], writes=[dx])
effects = {"layers": ("linear",), "grads": ("weight",), "beta": 0}
w = guarded("W", lambda: torch.mm(x.t(), dy, out=grad), effects, reads=[x, dy], writes=[grad])

for step in range(3):
    with guard.step(step):
        with guard.work("compute", "refresh", reads=[weight], writes=[cache]):
            cache.copy_(weight.to(torch.float8_e4m3fn))  # one cast per step, of the weight's present version
        guard.ledger.refreshed({"weight": "linear"}, ["rows"])
        with guard.work("copy", "batch", writes=[x, dy]):
            x.normal_(), dy.normal_()
        guard.edge("copy", "compute")  # the graphs wait for the batch
        f.replay(slots=(Slot("I", 0, 0), Slot("W", 0, 0))), i.replay(), w.replay()
        guard.edge("compute", "copy")  # the next batch waits for the graphs
        with guard.update("compute", writers=1, reads=[grad], writes=[weight]):
            weight.sub_(grad, alpha=1e-3)
        guard.ledger.commit(epoch=step)
