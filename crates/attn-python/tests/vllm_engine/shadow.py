"""Compares what the plugin attends with attention in float32 over the rows as they were appended, by vLLM's slots, and with itself: the same query behind the same tokens."""

import functools

import torch

import attn.vllm as plugin

# Tokens of a sequence.
LONGEST = 4096


class Shadow:
    """Rows of all layers, the errors of the results since `start`, and a digest of every result for the digest of all that it depends on."""

    def __init__(self):
        self.rows = {}
        self.results = {}
        self.start()
        usual = plugin.AttnImpl.forward
        shadow = self

        def forward(impl, layer, query, key, value, kv_cache, attn_metadata, *rest, **named):
            out = usual(impl, layer, query, key, value, kv_cache, attn_metadata, *rest, **named)
            # A graph's steps have no Python; those that are captured read nothing.
            is_captured = query.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if attn_metadata is not None and attn_metadata.num_actual_tokens > 0 and not is_captured:
                shadow.look(impl, layer.layer_name, query, key, value, kv_cache, attn_metadata, out)
            return out

        plugin.AttnImpl.forward = forward

    def start(self, label=None, is_compared=True):
        """Errors are counted anew, and measured if `is_compared`. Results of the same label are to have the same bits."""
        self.label, self.is_compared = label, is_compared
        self.sum = self.worst = 0.0
        self.count = self.resumed = self.mixed = 0
        # Results whose query and tokens had been seen before, and those of them with other bits.
        self.repeated = self.changed = 0

    @property
    def mean(self):
        return self.sum / self.count

    def look(self, impl, name, query, key, value, kv_cache, batch, out):
        n, dim, per = batch.num_actual_tokens, impl.head_size, impl.num_heads // impl.num_kv_heads
        block = batch.builder.kv_cache_spec.block_size
        if impl not in self.rows:
            slots = kv_cache.shape[0] * block
            rows = torch.full((2, slots, impl.num_kv_heads, dim), float("nan"), device=query.device)
            self.rows[impl] = rows, torch.zeros(slots, dtype=torch.int64, device=query.device)
        (k, v), digests = self.rows[impl]
        slots = batch.slot_mapping[:n].long()
        kept, window = slots >= 0, impl.options["window_left"]
        k[slots[kept]], v[slots[kept]] = (x[:n].view(n, -1, dim).float()[kept] for x in (key, value))
        self.mixed += len(set(batch.q_lens)) > 1
        digests[slots[kept]] = digest(k[slots[kept]]) * 3 + digest(v[slots[kept]])
        first = 0
        for i, (q_len, length) in enumerate(zip(batch.q_lens, batch.seq_lens.tolist())):
            if length == 0:
                first += q_len
                continue
            positions = torch.arange(length, device=query.device)
            places = batch.block_table[i].long()[positions // block] * block + positions % block
            q, given = (x[first : first + q_len].view(q_len, -1, dim).float() for x in (query, out))
            known = digests[places]
            seen = (known * weights(LONGEST, query.device)[:length]).cumsum(0)[length - q_len :]
            # A graph's steps append what is not seen here.
            if bool((known != 0).all()):
                self.compare_with_itself(name, length - q_len, digest(q) * 5 + seen, digest(given))
            self.resumed += q_len > 1 and length > q_len
            first += q_len
            if not self.is_compared:
                continue
            own_k, own_v = (x[places].repeat_interleave(per, 1).transpose(0, 1) for x in (k, v))
            if window is None:
                assert not own_k.isnan().any(), "a token that was never appended"
            else:  # vLLM takes the blocks before a window back
                own_k, own_v = own_k.nan_to_num(), own_v.nan_to_num()
            own = positions[length - q_len :, None]
            mask = (positions <= own) & (window is None or positions >= own - window)
            wanted = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), own_k, own_v, attn_mask=mask, scale=impl.scale).transpose(0, 1)
            errors = (given - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)
            self.sum, self.count = self.sum + float(errors.sum()), self.count + errors.numel()
            self.worst = max(self.worst, float(errors.max()))

    def compare_with_itself(self, name, first, given, results):
        for position, (key, result) in enumerate(zip(given.tolist(), results.tolist()), first):
            place = (self.label, name, position, key)
            self.repeated += place in self.results
            self.changed += self.results.setdefault(place, result) != result


@functools.lru_cache(maxsize=None)
def weights(count, device):
    return torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(count), dtype=torch.int64).to(device) | 1


def digest(rows):
    """An integer for the bits of each row."""
    bits = rows.contiguous().view(torch.int32).flatten(1).long()
    return (bits * weights(bits.shape[1], rows.device)).sum(1)
