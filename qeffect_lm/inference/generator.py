"""Generation of several sequences side by side, each as if it were alone.

Every sequence has a row of the cache. Its first pass takes its prompt alone; then all rows take one token at a time together. A
row whose sequence ended gets the next prompt. What steps read and write lies in storages that never move and is never read on
the host inside a step, so a step can be captured: one graph for each number of places that it looks at.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from qeffect_lm.errors import UsageError
from qeffect_lm.graphs.backend import Graph, GraphBackend
from qeffect_lm.graphs.register import HiddenStateRegister, Rule
from qeffect_lm.inference.model import InferenceModel
from qeffect_lm.inference.sampling import Sampling, choose
from qeffect_lm.layers.kv_cache import KVCache

PLACES = 256  # steps look at this many places of the cache, or a power of two times as many, or all


@dataclass(frozen=True)
class NewToken:
    """``token`` continues prompt number ``prompt``; ``reason`` is given with its last: ``eos`` or ``length``."""

    prompt: int
    token: int
    reason: str | None = None


@dataclass
class _Sequence:
    """A sequence in a row: all its tokens, how many are new, which is the first that the model still sees, and how many of
    these the cache holds."""

    prompt: int
    tokens: list[int]
    key: int
    new: int = 0
    first: int = 0
    cached: int = 0


@dataclass
class _Rows:
    """What a step reads and writes, besides the cache: int64 ``[rows]`` each. ``active`` is 0 for a row without a sequence."""

    token: torch.Tensor
    key: torch.Tensor
    count: torch.Tensor
    active: torch.Tensor
    held: torch.Tensor | None  # bool [rows, vocab]

    @staticmethod
    def make(rows: int, vocab: int, device: torch.device, penalty: bool) -> _Rows:
        token, key, count, active = torch.zeros(4, rows, dtype=torch.int64, device=device).unbind()
        held = torch.zeros(rows, vocab, dtype=torch.bool, device=device) if penalty else None
        return _Rows(token, key, count, active, held)

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {"token": self.token, "key": self.key, "count": self.count, "active": self.active}
        return named if self.held is None else {**named, "held": self.held}


@dataclass
class Generator:
    """Continues prompts of token ids.

    Args:
        rows: most sequences side by side; one at a time where the model asks for it (``alone``).
        end: token ids that end a sequence; they are given out as its last.
        vocab: choose among the first ``vocab`` ids only (a model may have rows that its tokenizer does not know); None: all.
        graphs: captures the step; None runs it eagerly.
    """

    model: InferenceModel
    sampling: Sampling
    rows: int = 1
    end: Collection[int] = ()
    vocab: int | None = None
    graphs: GraphBackend | None = None
    _stopped: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise UsageError(f"--batch-size is {self.rows}; it must be at least 1")
        if self.model.alone:
            self.rows = 1

    def stop(self, prompt: int) -> None:
        """While :meth:`run` is iterated: prompt number ``prompt`` needs no further token."""
        self._stopped.add(prompt)

    def capacity(self, prompts: Sequence[Sequence[int]], count: int) -> int:
        """Places that a row of the cache needs for ``count`` new tokens of the longest prompt."""
        longest = min(max(map(len, prompts), default=1) + count, self.model.context_length)
        return -(-longest // PLACES) * PLACES

    def run(self, prompts: Sequence[Sequence[int]], count: int) -> Iterator[NewToken]:
        """Up to ``count`` new tokens for each prompt, as they are made; those of one prompt in order.

        A sequence that fills the context goes on from its second half.

        Raises:
            UsageError: a prompt without a token, or with one that the model does not know.
        """
        self._check(prompts, count)
        self._begin(prompts, count)
        copies: Counter[tuple[int, ...]] = Counter()
        waiting: deque[_Sequence] = deque()
        for number, prompt in enumerate(prompts):
            copy = copies[tuple(prompt)]
            copies[tuple(prompt)] += 1
            waiting.append(_Sequence(number, list(prompt), self.sampling.key(prompt, copy)))
        running: dict[int, _Sequence] = {}
        try:
            while waiting or running:
                for row in range(self.rows):  # of a model without a cache whole sequences, one by one
                    yield from self._ready(row, running, waiting, count)
                if running:
                    tokens = self._step(running)
                    for row in list(running):
                        if running[row].prompt not in self._stopped:
                            yield from self._take(running, row, count, tokens[row])
        finally:
            for graph in self._captured.values():
                graph.reset()

    # ---- rows --------------------------------------------------------------------------------------------------

    def _begin(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        device = self.model.device
        self._cache = KVCache.empty(self.rows, self.capacity(prompts, count), device)
        self._width = self.vocab or self.model.vocab_size
        self._state = _Rows.make(self.rows, self._width, device, self.sampling.repetition_penalty != 1)
        self._captured: dict[int, Graph] = {}
        self._stopped = set()

    def _ready(
        self, row: int, running: dict[int, _Sequence], waiting: deque[_Sequence], count: int
    ) -> Iterator[NewToken]:
        """Afterwards the row has a sequence with room for another token, or no prompt waits."""
        while True:
            sequence = running.get(row)
            if sequence is not None and sequence.prompt in self._stopped:
                self._free(running, row)
                sequence = None
            if sequence is None:
                if not waiting:
                    return
                running[row] = waiting.popleft()
            elif self.model.caches and sequence.cached < self.model.context_length:
                return
            yield from self._take(running, row, count, self._first_pass(row, running[row]))

    def _take(self, running: dict[int, _Sequence], row: int, count: int, token: int) -> Iterator[NewToken]:
        sequence = running[row]
        sequence.tokens.append(token)
        sequence.new += 1
        reason = "eos" if token in self.end else "length" if sequence.new == count else None
        if reason is not None:
            self._free(running, row)
        yield NewToken(sequence.prompt, token, reason)

    def _free(self, running: dict[int, _Sequence], row: int) -> None:
        del running[row]
        self._state.active[row].zero_()
        self._cache.lengths[row].zero_()  # the row goes on in each step, at its first place

    @torch.no_grad()
    def _first_pass(self, row: int, sequence: _Sequence) -> int:
        """The tokens of a new sequence, or the second half of one that filled the context; returns the next token. Where the
        model has no cache every pass is one."""
        context, count = self.model.context_length, len(sequence.tokens)
        if count - sequence.first > context:
            sequence.first = count - (context if sequence.new == 0 else max(1, context // 2))
        part = sequence.tokens[sequence.first :]
        state, device = self._state, self.model.device
        cache = self._cache.fresh_row(row) if self.model.caches else None
        hidden = self.model.hidden(torch.tensor([part], device=device), cache)
        logits = self.model.head(hidden[:, -1:])[:, -1, : self._width]
        if cache is not None:
            cache.lengths.add_(len(part))
        sequence.cached = len(part)
        state.key[row].fill_(sequence.key)
        state.count[row].fill_(sequence.new)
        state.active[row].fill_(1)
        if state.held is not None:
            state.held[row].zero_()
            known = torch.tensor([token for token in sequence.tokens if token < self._width], device=device)
            state.held[row].index_fill_(0, known, True)
        self._choose(logits, slice(row, row + 1))
        return int(state.token[row])

    def _choose(self, logits: torch.Tensor, rows: slice) -> None:
        """The next token of each of ``rows`` into the state."""
        state = self._state
        held = None if state.held is None else state.held[rows]
        token = choose(logits, self.sampling, state.key[rows], state.count[rows], held)
        state.token[rows].copy_(token)
        state.count[rows].add_(1)
        if held is not None:
            held.scatter_(1, token[:, None], True)

    # ---- steps -------------------------------------------------------------------------------------------------

    def _step(self, running: dict[int, _Sequence]) -> list[int]:
        """One token for every row; those of rows without a sequence mean nothing."""
        limit = PLACES
        while limit <= max(sequence.cached for sequence in running.values()):
            limit *= 2
        limit = min(limit, self._cache.capacity)
        if self.graphs is None:
            self._work(limit)
        else:
            if limit not in self._captured:
                self._captured[limit] = self._capture(self.graphs, limit)
            self._captured[limit].replay()
        for sequence in running.values():
            sequence.cached += 1
        tokens: list[int] = self._state.token.tolist()
        return tokens

    @torch.no_grad()
    def _work(self, limit: int) -> None:
        """What a step does on the device."""
        self._cache.limit = limit
        hidden = self.model.hidden(self._state.token[:, None], self._cache)
        logits = self.model.head(hidden)[:, -1, : self._width]
        self._cache.lengths.add_(self._state.active)
        self._choose(logits, slice(0, self.rows))

    def _capture(self, backend: GraphBackend, limit: int) -> Graph:
        """The step as a graph. What running it meanwhile changed is put back; keys and values it writes again itself."""
        register = HiddenStateRegister()
        for name, tensor in self.model.tensors.items():
            register.add(name, tensor, owner="model", rule=Rule.CONSTANT)
        for layer, (k, v) in self._cache.entries.items():
            register.add(f"{layer}/k", k, owner="cache", rule=Rule.SCRATCH)
            register.add(f"{layer}/v", v, owner="cache", rule=Rule.SCRATCH)
        state = {"lengths": self._cache.lengths, **self._state.tensors()}
        for name, tensor in state.items():
            register.add(name, tensor, owner="rows")
        before = {name: tensor.clone() for name, tensor in state.items()}

        def put_back() -> None:
            for name, tensor in state.items():
                tensor.copy_(before[name])

        if backend.warms_up:
            with _beside(backend):
                self._work(limit)
            put_back()
        graph = backend.capture(f"generation over {limit} places", lambda: self._work(limit), register=register)
        put_back()
        return graph

    def _check(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        if count < 1:
            raise UsageError(f"--max-new-tokens is {count}; it must be at least 1")
        for number, prompt in enumerate(prompts, 1):
            if not len(prompt):
                raise UsageError(f"prompt {number} has no token: give at least one character")
            wrong = next((token for token in prompt if not 0 <= token < self.model.vocab_size), None)
            if wrong is not None:
                raise UsageError(
                    f"prompt {number} has token id {wrong}, the model knows 0 to {self.model.vocab_size - 1}: the tokenizer is "
                    "another model's"
                )


@contextmanager
def _beside(backend: GraphBackend) -> Iterator[None]:
    """Work on the stream that captures, where libraries keep scratch for each stream."""
    stream = getattr(backend, "stream", None)
    if stream is None:
        yield
        return
    torch.cuda.synchronize(stream.device)
    with torch.cuda.stream(stream):
        yield
    torch.cuda.synchronize(stream.device)
