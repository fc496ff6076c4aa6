"""The plans of the largest steps, which vLLM's plugin makes while vLLM measures memory, so that they are counted."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Tuple


class LargestPlans:
    """Those of one engine, by layers that have the same; closed, and no more are made, once vLLM has measured."""

    def __init__(self) -> None:
        self.made: Dict[Tuple, List[Any]] = {}
        self.is_over = False

    def close(self) -> None:
        """Leaves their memory to real steps."""
        for plans in self.made.values():
            close_all(plans)
        self.made.clear()
        self.is_over = True


_of_latest_engine = LargestPlans()


def of_new_layer() -> LargestPlans:
    """Those of the engine that a layer which is made now belongs to: vLLM makes the layers of one before it measures, and of one engine after the other."""
    global _of_latest_engine
    if _of_latest_engine.is_over:
        _of_latest_engine = LargestPlans()
    return _of_latest_engine


def end_measuring() -> None:
    """vLLM has measured the latest engine."""
    _of_latest_engine.close()


def close_all(plans: Iterable[Any]) -> None:
    for plan in plans:
        plan.close()


def close_plans_of(*kept: Dict[Tuple, Any]) -> None:
    """Closes the plans that a builder of batches has kept, and whose batches end with it."""
    for plans in kept:
        close_all(plans.values())
        plans.clear()
