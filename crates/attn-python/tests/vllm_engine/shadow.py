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
            # A graph's steps have no Python; those that are captured read nothing.
            is_captured = query.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if attn_metadata is not None and attn_metadata.num_actual_tokens > 0 and not is_captured:
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
            self.rows[impl] = torch.full((2, kv_cache.shape[0] * block, impl.num_kv_heads, dim), float("nan"), device=query.device)
        k, v = self.rows[impl]
        slots = batch.slot_mapping[:n].long()
        kept, window = slots >= 0, impl.options["window_left"]
        k[slots[kept]], v[slots[kept]] = (x[:n].view(n, -1, dim).float()[kept] for x in (key, value))
        self.mixed += len(set(batch.q_lens)) > 1
        first = 0
        for i, (q_len, length) in enumerate(zip(batch.q_lens, batch.seq_lens.tolist())):
            if length == 0:
                first += q_len
                continue
            positions = torch.arange(length, device=query.device)
            places = batch.block_table[i].long()[positions // block] * block + positions % block
            own_k, own_v = (x[places].repeat_interleave(per, 1).transpose(0, 1) for x in (k, v))
            if window is None:
                assert not own_k.isnan().any(), "a token that was never appended"
            else:  # vLLM takes the blocks before a window back
                own_k, own_v = own_k.nan_to_num(), own_v.nan_to_num()
            own = positions[length - q_len :, None]
            mask = (positions <= own) & (window is None or positions >= own - window)
            q = query[first : first + q_len].view(q_len, -1, dim).float().transpose(0, 1)
            wanted = torch.nn.functional.scaled_dot_product_attention(q, own_k, own_v, attn_mask=mask, scale=impl.scale).transpose(0, 1)
            given = out[first : first + q_len].view(q_len, -1, dim).float()
            errors = (given - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)
            self.sum, self.count = self.sum + float(errors.sum()), self.count + errors.numel()
            self.worst = max(self.worst, float(errors.max()))
            self.resumed += q_len > 1 and length > q_len
            first += q_len
