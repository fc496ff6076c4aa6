"""Attention over pages that torch allocates, for engines: nothing is allocated or waited for inside a step but its output, so a step works in a CUDA
graph and under `torch.compile`.

A `Plan` is made once for a batch shape. A pool is a uint8 tensor of pages, `[pages, page_bytes]`; a page table says which pages a sequence has;
`kv_lens` says how many tokens, and is read on the device:

    plan = attn.torch.Plan("int8", heads=32, kv_heads=8, dim=128, q_lens=[1] * 4, max_kv_len=8192)
    pool = plan.new_pool(pages=4 * 128)
    page_table = torch.arange(4 * 128, dtype=torch.int32, device="cuda").view(4, 128)
    kv_lens = torch.zeros(4, dtype=torch.int32, device="cuda")
    # Every step, in a graph or outside:
    kv_lens += 1
    out = plan.step(q, k, v, pool, page_table, kv_lens)

A cache that another engine keeps in pages of bf16, f16 or fp8 rows is attended as it lies, as `flash_attn_with_kvcache` does:

    plan = attn.torch.Plan("bf16", heads=32, kv_heads=8, dim=128, q_lens=[1] * 4, max_kv_len=8192, page_size=16, rows=True)
    out, lse = plan.attend_rows(q, k_cache, v_cache, page_table, kv_lens)

Where sequences bring other numbers of query tokens from step to step, the device says how many, once for the layers of a step:

    plan = attn.torch.Plan("int8", heads=32, kv_heads=8, dim=128, q_lens=[1] * 63 + [512], max_kv_len=8192, ragged=True)
    plan.set_query_starts(query_start_loc)  # any shares of up to 575 tokens
    out, lse = plan.attend(q, pool, page_table, kv_lens)

`attn.Cache` keeps pages and lengths itself; use it where neither graphs nor an engine's own page table are needed.
"""

from ._operators import append_slots, append_slots_rotary, attend, attend_rows, step, step_rotary
from ._plan import Centres, Plan, Rotary, Scratch
from ._transfer import copy_pages, merge, merge_spans

__all__ = ["Centres", "Plan", "Rotary", "Scratch", "append_slots", "append_slots_rotary", "attend", "attend_rows", "copy_pages", "merge", "merge_spans", "step", "step_rotary"]
