// Decode over an int4 cache from C++: a sequence leaves the cache and comes back, with the same bits.
#include "attn.hpp"

#include <iostream>

int main(int argc, char **argv) {
    constexpr std::size_t q_heads = 4, kv_heads = 1, dim = 128, tokens = 300;
    const attn::Device device(argc > 1 ? argv[1] : nullptr);
    std::cout << "attn " << attn_version() << " on " << device.name() << "\n";

    attn_cache_config config{};
    config.format = "int4";
    config.kv_heads = kv_heads;
    config.head_dim = dim;
    config.sequences = 2;
    config.max_tokens = 1024;
    attn::Cache cache(device, config);

    std::vector<float> k(tokens * kv_heads * dim), v(k.size()), q(q_heads * dim), out(q.size()), again(q.size());
    unsigned seed = 1;
    for (auto *numbers : {&k, &v, &q})
        for (float &x : *numbers) x = static_cast<float>((seed = seed * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1.0f;
    cache.append(0, tokens, k.data(), v.data());
    cache.attend({0}, q_heads, q.data(), out.data());

    const auto bytes = cache.save(0);
    cache.free(0);
    cache.restore(1, bytes);
    cache.attend({1}, q_heads, q.data(), again.data());
    if (out != again || cache.tokens(1) != tokens) {
        std::cerr << "a restored sequence has other bits\n";
        return 1;
    }
    try {
        cache.free(7);
        std::cerr << "sequence 7 was freed\n";
        return 1;
    } catch (const attn::Error &error) {
        if (error.status() != ATTN_STATUS_SEQUENCE) throw;
        std::cout << "refused, as it should be: " << error.what() << "\n";
    }
    std::cout << tokens << " tokens in " << bytes.size() << " bytes, the same bits when they are back\n";
}
