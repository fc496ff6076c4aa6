"""Compares what the plugin attends with attention in float32 over the rows as they were appended, by vLLM's slots."""

import torch

import attn.vllm as plugin


class Shadow:
    """Rows of all layers, and the errors of the results since `start`."""

    def __init__(self):
        self.rows = {}
        self.start()
        usual = plugin.AttnImpl.forward
        shadow = self

        def forward(impl, layer, query, key, value, kv_cache, attn_metadata, *rest, **named):
            out = usual(impl, layer, query, key, value, kv_cache, attn_metadata, *rest, **named)
            if attn_metadata is not None and attn_metadata.num_actual_tokens > 0:
                shadow.look(impl, query, key, value, kv_cache, attn_metadata, out)
            return out

        plugin.AttnImpl.forward = forward

    def start(self):
        self.sum = self.worst = 0.0
        self.count = self.resumed = self.mixed = 0

    @property
    def mean(self):
        return self.sum / self.count

    def look(self, impl, query, key, value, kv_cache, batch, out):
        n, dim, per = batch.num_actual_tokens, impl.head_size, impl.num_heads // impl.num_kv_heads
        block = batch.builder.kv_cache_spec.block_size
        if impl not in self.rows:
            self.rows[impl] = torch.full((2, kv_cache.shape[0] * block, impl.num_kv_heads, dim), float("nan"))
        k, v = self.rows[impl]
        slots = batch.slot_mapping[:n].long()
        k[slots], v[slots] = (x[:n].view(n, -1, dim).float() for x in (key, value))
        self.mixed += len(set(batch.q_lens)) > 1
        first = 0
        for i, (q_len, length) in enumerate(zip(batch.q_lens, batch.seq_lens.tolist())):
            positions = torch.arange(length)
            places = batch.block_table[i].long()[positions // block] * block + positions % block
            own_k, own_v = (x[places].repeat_interleave(per, 1).transpose(0, 1) for x in (k, v))
            assert not own_k.isnan().any(), "a token that was never appended"
            mask = positions[None] <= torch.arange(length - q_len, length)[:, None]
            q = query[first : first + q_len].view(q_len, -1, dim).float().transpose(0, 1)
            wanted = torch.nn.functional.scaled_dot_product_attention(q, own_k, own_v, attn_mask=mask, scale=impl.scale).transpose(0, 1)
            given = out[first : first + q_len].view(q_len, -1, dim).float()
            errors = (given - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)
            self.sum, self.count = self.sum + float(errors.sum()), self.count + errors.numel()
            self.worst = max(self.worst, float(errors.max()))
            self.resumed += q_len > 1 and length > q_len
            first += q_len
