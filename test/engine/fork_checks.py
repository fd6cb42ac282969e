"""What holds of a `ForkEngine` between any two of its steps, and when it is idle."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from fork_engine import ForkEngine
from kv_truth import hashes_of, sample


class Checker:
    """Remembers the hashes of each request, so that a check costs what is new."""

    def __init__(self, engine: ForkEngine) -> None:
        self._engine = engine
        self._hashes: dict[Any, list[int]] = {}
        self._num_sampled: dict[Any, int] = {}
        self._table = engine.req_to_token_pool.req_to_token
        self._page = engine.page_size

    def check(self) -> None:
        rows = [req for req in self._engine._taper_requests() if req.kv.holds_kv]
        for req in rows:
            self.check_tokens(req)
            self._check_kv(req)
        shared = self._check_ownership(rows)
        self._check_locks(shared)
        self._check_groups()

    def check_tokens(self, req: Any) -> None:
        """What `req` said follows from its prompt, however often it was deferred,
        retracted or started without a prefill."""
        prompt, output = len(req.origin_input_ids), list(req.output_ids)
        hashes = self._hashes_of(req)
        seed = req.sampling_params.sampling_seed
        for index in range(self._num_sampled.get(req, 0), len(output)):
            assert output[index] == sample(hashes[prompt + index - 1], seed), req.rid
        self._num_sampled[req] = len(output)

    def _hashes_of(self, req: Any) -> list[int]:
        return hashes_of(req, self._hashes.setdefault(req, []))

    def _check_kv(self, req: Any) -> None:
        """Every slot of the row holds what was computed from the row's own tokens."""
        hashes = self._hashes_of(req)[: req.kv.kv_committed_len]
        slots = self._table[req.kv.req_pool_idx, : len(hashes)].long()
        found = self._engine.tp_worker.kv[slots].tolist()
        assert found == hashes, f"{req.rid}: wrong KV"

    def _pages(self, slots: torch.Tensor) -> list[int]:
        return torch.unique(slots // self._page).tolist()

    def _check_ownership(self, rows: list[Any]) -> set[int]:
        """Each page is free, in the tree, or of one row. Returns those of the tree
        that rows rely on."""
        engine = self._engine
        cached = engine.tree_cache.all_values_flatten()
        free = engine.token_to_kv_pool_allocator.get_all_free_pages()
        owners = Counter(free.tolist())
        owners.update(self._pages(cached))
        shared: set[int] = set()
        for req in rows:
            slots = self._table[req.kv.req_pool_idx, : req.kv.kv_allocated_len].long()
            own = req.kv.cache_protected_len
            assert own % self._page == 0
            owners.update(self._pages(slots[own:]))
            shared.update(self._pages(slots[:own]))
        number = engine.max_total_num_tokens // self._page
        assert owners == Counter(range(1, number + 1))
        assert shared <= set(self._pages(cached))
        assert len(set(cached.tolist())) == len(cached)
        tree = engine.tree_cache
        assert tree.evictable_size() + tree.protected_size() == len(cached)
        return shared

    def _check_locks(self, shared: set[int]) -> None:
        """Locked is what rows rely on, and what is pinned: not less, not more."""
        engine, pins = self._engine, self._engine.taper.pins
        engine.tree_cache.sanity_check()
        protected = engine.tree_cache.protected_size()
        num_shared = len(shared) * self._page
        longest = max((pin.num_tokens for pin in pins._pins.values()), default=0)
        assert max(num_shared, longest) <= protected <= num_shared + pins.num_tokens
        assert pins.num_tokens <= pins._max_tokens

    def _check_groups(self) -> None:
        """Who lives is who waits or runs; a pin goes with its group, or at the next
        pass after it."""
        engine = self._engine
        live = [req for req in engine._taper_requests() if not req.taper.ended]
        per_group = Counter(r.taper.group for r in live if r.taper.group)
        table = engine.taper.groups
        for group in table.groups.values():
            assert group.num_live == per_group.pop(group, 0)
        assert not per_group
        assert table.num_live_groups == len({r.taper.group for r in live} - {None})
        known = list(table.groups.values())
        for (_, place), pin in engine.taper.pins._pins.items():
            is_due = engine.now_ms - pin.idle_since_ms > table.ttl_ms
            assert pin.group in known or is_due
            if place[0] == "fork":
                assert place in pin.group.forks, "its last branch has ended"

    def check_idle(self) -> None:
        """Nothing is left of the requests but what the tree keeps, and the pins."""
        engine, pool = self._engine, self._engine.req_to_token_pool
        assert engine.is_fully_idle()
        self.check()
        assert sorted(pool.free_slots) == list(range(1, pool.size + 1))
        assert engine.taper.groups.num_live_groups == 0
        tree = engine.tree_cache
        if not len(engine.taper.pins):
            assert tree.protected_size() == 0
