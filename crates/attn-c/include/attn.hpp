// attn for C++17: handles that destroy themselves, and errors as exceptions. Header-only, over attn.h.
#ifndef ATTN_HPP
#define ATTN_HPP

#include "attn.h"

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace attn {

// A refused or failed call: the library's sentence, and its status.
class Error : public std::runtime_error {
public:
    explicit Error(attn_status status) : std::runtime_error(attn_last_error()), status_(status) {}
    attn_status status() const noexcept { return status_; }

private:
    attn_status status_;
};

// Throws an Error for any status but ATTN_STATUS_OK.
inline void check(attn_status status) {
    if (status != ATTN_STATUS_OK) throw Error(status);
}

// Throws where the program was compiled with another version of the interface than its library has.
inline void check_abi() {
    const auto of_library = attn_abi_version();
    if (of_library != ATTN_ABI_VERSION)
        throw std::runtime_error("attn.h is of version " + std::to_string(ATTN_ABI_VERSION) + " of the interface, and the library of " +
                                 std::to_string(of_library) + "; compile the program with the header that came with the library");
}

// The attn_dtype of numbers in host memory. For 16-bit ones, give the dtype by name.
template <typename T> struct dtype_of;
template <> struct dtype_of<float> {
    static constexpr attn_dtype value = ATTN_DTYPE_F32;
};

// An opened device.
class Device {
public:
    // "cpu", "cuda", "cuda:1"; without a name, the best one here.
    Device() : Device(nullptr) {}
    explicit Device(const char *name) {
        check_abi();
        attn_device *device = nullptr;
        check(attn_device_open(name, &device));
        handle_.reset(device);
    }
    std::string name() const { return attn_device_name(get()); }
    attn_device *get() const noexcept { return handle_.get(); }

private:
    struct Close {
        void operator()(attn_device *device) const noexcept { attn_device_close(device); }
    };
    std::unique_ptr<attn_device, Close> handle_;
};

// A struct of attn.h with its size set and all else zero.
template <typename Config> Config make() {
    Config config{};
    config.struct_size = sizeof config;
    return config;
}

// A paged, quantized cache of K and V, of one layer or several.
class Cache {
public:
    // `config.struct_size` need not be set.
    Cache(const Device &device, attn_cache_config config) {
        config.struct_size = sizeof config;
        attn_cache *cache = nullptr;
        check(attn_cache_create(device.get(), &config, &cache));
        handle_.reset(cache);
    }

    // K and V `[tokens][kv_heads][head_dim]` in host memory, for one sequence.
    template <typename T> void append(std::size_t sequence, std::size_t tokens, const T *k, const T *v) { append({{sequence, tokens}}, k, v); }
    template <typename T> void append(const std::vector<attn_append> &appends, const T *k, const T *v) {
        auto rows = make<attn_tokens>();
        rows.k = k;
        rows.v = v;
        rows.dtype = dtype_of<T>::value;
        check(attn_cache_append(get(), appends.data(), appends.size(), &rows));
    }

    // A step of a cache of several layers: its tokens are reserved once, then written layer by layer, `[tokens][kv_heads][head_dim]` in host memory.
    void reserve(const std::vector<attn_append> &appends) { check(attn_cache_reserve(get(), appends.data(), appends.size())); }
    template <typename T> void write(std::size_t layer, const T *k, const T *v) {
        auto rows = make<attn_tokens>();
        rows.k = k;
        rows.v = v;
        rows.dtype = dtype_of<T>::value;
        check(attn_cache_write(get(), layer, &rows));
    }
    void cancel_step() { check(attn_cache_cancel_step(get())); }

    // One query token of each sequence, `[sequences][q_heads][head_dim]` in host memory.
    template <typename T>
    void attend(const std::vector<std::size_t> &sequences, std::size_t q_heads, const T *q, T *out, float *lse = nullptr, const attn_modifiers &modifiers = {},
                std::size_t layer = 0) {
        auto step = make<attn_step>();
        step.q_heads = q_heads;
        step.count = sequences.size();
        step.sequences = sequences.data();
        step.modifiers = modifiers;
        step.layer = layer;
        auto rows = make<attn_rows>();
        rows.q = q;
        rows.out = out;
        rows.dtype = dtype_of<T>::value;
        rows.lse = lse;
        check(attn_cache_attend(get(), &step, &rows));
    }

    void fork(std::size_t from, std::size_t to) { check(attn_cache_fork(get(), from, to)); }
    void truncate(std::size_t sequence, std::size_t tokens) { check(attn_cache_truncate(get(), sequence, tokens)); }
    std::size_t longest_prefix(std::size_t sequence, std::size_t tokens) const {
        std::size_t longest = 0;
        check(attn_cache_longest_prefix(get(), sequence, tokens, &longest));
        return longest;
    }
    void drop_before(std::size_t sequence, std::size_t token) { check(attn_cache_drop_before(get(), sequence, token)); }
    std::size_t drop_range(std::size_t sequence, std::size_t first, std::size_t end) {
        std::size_t dropped = 0;
        check(attn_cache_drop_range(get(), sequence, first, end, &dropped));
        return dropped;
    }
    void free(std::size_t sequence) { check(attn_cache_free(get(), sequence)); }
    std::size_t tokens(std::size_t sequence) const {
        std::size_t tokens = 0;
        check(attn_cache_tokens(get(), sequence, &tokens));
        return tokens;
    }
    attn_cache_stats stats() const {
        attn_cache_stats stats{};
        check(attn_cache_get_stats(get(), &stats));
        return stats;
    }

    // A sequence as one block of bytes, and back into an empty sequence of this or another cache of the same format and shape.
    std::vector<std::uint8_t> save(std::size_t sequence) const {
        std::size_t needed = 0;
        check(attn_cache_save(get(), sequence, nullptr, 0, &needed));
        std::vector<std::uint8_t> bytes(needed);
        check(attn_cache_save(get(), sequence, bytes.data(), bytes.size(), &needed));
        return bytes;
    }
    void restore(std::size_t sequence, const std::vector<std::uint8_t> &bytes) { check(attn_cache_restore(get(), sequence, bytes.data(), bytes.size())); }

    // For what this class leaves to attn.h: several query tokens of a sequence, memory of a GPU.
    attn_cache *get() const noexcept { return handle_.get(); }

private:
    struct Destroy {
        void operator()(attn_cache *cache) const noexcept { attn_cache_destroy(cache); }
    };
    std::unique_ptr<attn_cache, Destroy> handle_;
};

} // namespace attn

#endif
