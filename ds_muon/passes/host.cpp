// The passes over memory of the host, each in one loop on all threads, with the bits of torch_passes.
//
// Compiled without fused multiply-adds: a product and a sum round twice, as in torch. No function throws or allocates.

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>

#if !defined(__x86_64__) || !defined(__GNUC__) || defined(__clang__)
#define VECTORIZED
#define FUSING
#elif __GNUC__ >= 12
#define VECTORIZED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define FUSING VECTORIZED
#else
// No levels yet; "avx2" cannot fuse, and "fma" has shorter vectors of integers.
#define VECTORIZED __attribute__((target_clones("avx512f", "avx2", "default")))
#define FUSING __attribute__((target_clones("avx512f", "fma", "default")))
#endif

namespace {

// Elements that a thread works on at a time, and takes when it has done others: not all cores get on equally fast. The
// larger ones are faster to read, once there are enough of them.
constexpr int64_t BLOCK = 1 << 14, LARGE = 4 * BLOCK, MANY = 64 * LARGE;

inline int64_t block_of(int64_t count) { return count < MANY ? BLOCK : LARGE; }

// Elements of which the memory is asked for at once, so many ahead: a page of fp32, whose end cores do not look beyond.
constexpr int64_t STEP = 64, AHEAD = 1024;

template <class T> inline void fetch(const T* x, int64_t count = STEP) {
    const char* ahead = reinterpret_cast<const char*>(x) + AHEAD * sizeof(T);
    for (size_t line = 0; line < count * sizeof(T); line += 64) __builtin_prefetch(ahead + line, 0, 2);
}

struct Half { uint16_t bits; };
struct BFloat16 { uint16_t bits; };

inline float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

inline float load(float x) { return x; }
inline float load(BFloat16 x) { return as_float(uint32_t(x.bits) << 16); }
inline float load(Half x) {
    // The exponent moves by 127 - 15; 31, of infinity and NaN, becomes 255.
    float magnitude = as_float(uint32_t(x.bits & 0x7fff) << 13) * 0x1p112f;
    uint32_t special = magnitude >= 65536.0f ? 0x7f800000u : 0u;
    return as_float(as_bits(magnitude) | special | uint32_t(x.bits & 0x8000) << 16);
}

inline void store(float x, float& goal) { goal = x; }
inline void store(float x, Half& goal) {
    uint32_t sign = as_bits(x) & 0x80000000u, bits = as_bits(x) ^ sign;
    // A sum with 0.5 rounds what is below the normal numbers of fp16.
    uint32_t small = as_bits(as_float(bits) + 0.5f) - as_bits(0.5f);
    uint32_t normal = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
    uint32_t special = bits > 0x7f800000u ? 0x7e00 : 0x7c00;
    goal.bits = (bits < 0x38800000u ? small : bits < 0x47800000u ? normal : special) | sign >> 16;
}
inline void store(float x, BFloat16& goal) {
    uint32_t bits = as_bits(x);
    goal.bits = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// A loop over `count` elements; the rest is its body. `first` asks for the memory of those from `start` on.
#define EACH(i, first, ...)                                                                    \
    for (int64_t start = 0; start < count; start += STEP) {                                    \
        first;                                                                                 \
        for (int64_t i = start, end = std::min(start + STEP, count); i < end; ++i) __VA_ARGS__ \
    }

// U goes to `u`, which may be `g` under the same name: two names for one memory would not be vectorized.
#define ADVANCE(T, name, g_type, u, ...)                                                                             \
    VECTORIZED void name(g_type __restrict g, T* __restrict m, int64_t count, float momentum, float rest, bool near, \
                         bool nesterov __VA_OPT__(,) __VA_ARGS__) {                                                  \
        EACH(i, (fetch(g + start), fetch(m + start)), {                                                              \
            float before = load(m[i]), step = g[i] - before;                                                         \
            float average = near ? g[i] - step * momentum : step * rest + before;                                    \
            store(average, m[i]);                                                                                    \
            u[i] = nesterov ? g[i] * rest + average * momentum : average;                                            \
        })                                                                                                           \
    }
ADVANCE(float, advance, float*, g)
ADVANCE(BFloat16, advance, float*, g)
ADVANCE(float, advance_into, const float*, u, float* __restrict u)
ADVANCE(BFloat16, advance_into, const float*, u, float* __restrict u)

// And what becomes of the weights, rounded, if they are to go anywhere.
#define APPLY(T, name, ...)                                                                                  \
    VECTORIZED void name(float* __restrict w, const T* __restrict o, int64_t count, float scale, float lr,   \
                         float keep __VA_OPT__(,) __VA_ARGS__) {                                             \
        EACH(i, (fetch(w + start), fetch(o + start)), {                                                      \
            float moved = w[i] * keep - load(o[i]) * scale * lr;                                             \
            w[i] = moved;                                                                                    \
            __VA_OPT__(store(moved, rounded[i]);)                                                            \
        })                                                                                                   \
    }
#define APPLY_ALL(T)                             \
    APPLY(T, apply)                              \
    APPLY(T, apply, float* __restrict rounded)   \
    APPLY(T, apply, Half* __restrict rounded)    \
    APPLY(T, apply, BFloat16* __restrict rounded)
APPLY_ALL(float)
APPLY_ALL(Half)
APPLY_ALL(BFloat16)

#define ROUND(T)                                                                                 \
    VECTORIZED void round_to(const float* __restrict w, T* __restrict rounded, int64_t count) {  \
        for (int64_t i = 0; i < count; ++i) store(w[i], rounded[i]);                             \
    }
ROUND(float)
ROUND(Half)
ROUND(BFloat16)

struct AdamW { float keep, rest1, beta2, rest2, root, eps, rate; };

FUSING void adamw(float* __restrict w, const float* __restrict g, float* __restrict m, float* __restrict v,
                      int64_t count, AdamW to) {
    EACH(i, (fetch(w + start), fetch(g + start), fetch(m + start), fetch(v + start)), {
        // Where torch fuses, so that the moments have its bits.
        float step = g[i] - m[i];
        m[i] = to.rest1 < 0.5f ? std::fma(to.rest1, step, m[i]) : std::fma(to.rest1 - 1, step, g[i]);
        v[i] = std::fma(to.rest2 * g[i], g[i], v[i] * to.beta2);
        w[i] = w[i] * to.keep - to.rate * m[i] / (std::sqrt(v[i]) / to.root + to.eps);
    })
}

VECTORIZED double squares(const float* x, int64_t count) {
    // So many sums, each in its own order whatever the length of vectors, hide the time of an addition.
    constexpr int LANES = 32;
    double sums[LANES] = {}, total = 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        fetch(x + i, LANES);
        for (int lane = 0; lane < LANES; ++lane) sums[lane] += double(x[i + lane]) * x[i + lane];
    }
    for (; i < count; ++i) total += double(x[i]) * x[i];
    for (double sum : sums) total += sum;
    return total;
}

template <class F> void in_blocks(int64_t count, F each) {
    const int64_t block = block_of(count);
    #pragma omp parallel for schedule(dynamic) if (count > 2 * block)
    for (int64_t start = 0; start < count; start += block) each(start, std::min(block, count - start));
}

// See lift.py.
struct Lift {
    char* slots;
    int64_t bytes, count;
    void** events;
    int (*copy)(void* to, const void* from, size_t bytes, void* stream);
    int (*record)(void* event, void* stream);
    int (*query)(void* event);
    void* stream;
    int64_t slot;
};
constexpr int64_t MOST_SLOTS = 16;
constexpr int NOT_READY = 600;  // CUDA's

// See lift.py. A loop reads and writes `x` and `y`, and writes to `goal`.
struct Load {
    float* x;
    void* y;
    void* goal;
    int64_t count;
    int64_t piece;  // the first: each goes up by itself, and fills a slot but at the end
    float scale;
    int32_t dtype;
};

// Let `write` fill slots with what goes to the goals, on all threads; none waits for the others, but for a free slot.
// The calling thread, whose device it is, queues the copies.
template <class T, class F> int lift_up(Lift& lift, Load* loads, int64_t n, F write) {
    const int64_t most = lift.bytes / sizeof(T);
    int64_t pieces = 0, count = 0;
    for (Load* load = loads; load < loads + n; ++load) {
        load->piece = pieces;
        pieces += (load->count + most - 1) / most;
        count += load->count;
    }
    const int64_t block = std::min(most, block_of(count)), of_piece = (most + block - 1) / block;
    std::atomic<int64_t> next{0}, opened{0}, written[MOST_SLOTS] = {};
    std::atomic<int> error{0};
    auto slot = [&](int64_t piece) { return (lift.slot + piece) % lift.count; };
    auto memory = [&](int64_t piece) { return reinterpret_cast<T*>(lift.slots + slot(piece) * lift.bytes); };
    // Calls back with a piece's load, and the first and the number of its elements.
    auto with_piece = [&](int64_t piece, auto run) {
        auto begins_later = [](int64_t number, const Load& load) { return number < load.piece; };
        const Load& load = std::upper_bound(loads, loads + n, piece, begins_later)[-1];
        const int64_t first = (piece - load.piece) * most;
        return run(load, first, std::min(most, load.count - first));
    };
    auto write_block = [&](int64_t number) {
        const int64_t piece = number / of_piece, start = number % of_piece * block;
        with_piece(piece, [&](const Load& load, int64_t first, int64_t size) {
            if (start < size) write(load, first + start, std::min(block, size - start), memory(piece) + start);
        });
        written[slot(piece)].fetch_add(1, std::memory_order_release);
    };
    auto send = [&](int64_t piece) {
        written[slot(piece)] = 0;
        return with_piece(piece, [&](const Load& load, int64_t first, int64_t size) -> int {
            T* goal = static_cast<T*>(load.goal) + first;
            if (lift.copy == nullptr) return std::memcpy(goal, memory(piece), size * sizeof(T)), 0;
            int failed = lift.copy(goal, memory(piece), size * sizeof(T), lift.stream);
            return failed ? failed : lift.record(lift.events[slot(piece)], lift.stream);
        });
    };
    #pragma omp parallel if (count > 2 * block)
    if (omp_get_thread_num() != 0) {
        for (int64_t number; (number = next++) < pieces * of_piece && !error;) {
            while (opened.load(std::memory_order_acquire) <= number / of_piece && !error) std::this_thread::yield();
            if (!error) write_block(number);
        }
    } else {
        for (int64_t sent = 0, open = 0; sent < pieces && !error;) {
            if (open < std::min(pieces, sent + lift.count)) {
                int state = lift.query ? lift.query(lift.events[slot(open)]) : 0;
                if (state == 0) opened.store(++open, std::memory_order_release);
                else if (state != NOT_READY) error = state;
            }
            int64_t number = next;
            if (sent < open && written[slot(sent)].load(std::memory_order_acquire) == of_piece) error = send(sent++);
            else if (number >= open * of_piece) std::this_thread::yield();
            else if (next.compare_exchange_strong(number, number + 1)) write_block(number);
        }
    }
    lift.slot = slot(pieces);
    return error;
}

// `write` writes to the loads' goals on all threads, through the lift if there is one.
template <class T, class F> int write_to(Lift* lift, Load* loads, int64_t n, F write) {
    if (lift) return lift_up<T>(*lift, loads, n, write);
    for (const Load* load = loads; load < loads + n; ++load) {
        T* goal = static_cast<T*>(load->goal);
        in_blocks(load->count, [=](int64_t i, int64_t size) { write(*load, i, size, goal + i); });
    }
    return 0;
}

// dtype: 0 for fp32, 1 for fp16, 2 for bf16, and -1 for nothing.
template <class F> void with_type(int dtype, void* memory, F run) {
    if (dtype == 0) run(static_cast<float*>(memory));
    if (dtype == 1) run(static_cast<Half*>(memory));
    if (dtype == 2) run(static_cast<BFloat16*>(memory));
}

}  // namespace

extern "C" {

// These two return what a function of `lift` has returned, other than 0.

// `x` is the gradient, `y` the momentum.
int ds_muon_advance(Load* loads, int64_t n, Lift* lift, float momentum, float rest, int near, int nesterov) {
    return write_to<float>(lift, loads, n, [=](const Load& load, int64_t i, int64_t size, float* u) {
        float* g = load.x + i;
        with_type(load.dtype, load.y, [=](auto* m) {
            if constexpr (!std::is_same_v<decltype(m), Half*>) {  // momentum is never that
                if (u == g) advance(g, m + i, size, momentum, rest, near, nesterov);
                else advance_into(g, m + i, size, momentum, rest, near, nesterov, u);
            }
        });
    });
}

// `x` are the weights, `y` is the update, and the dtype that of the goal, or -1 for nowhere.
int ds_muon_apply(Load* loads, int64_t n, Lift* lift, int dtype, float lr, float keep) {
    int error = 0;
    with_type(dtype, nullptr, [=, &error](auto* goal) {
        using T = std::remove_pointer_t<decltype(goal)>;
        error = write_to<T>(lift, loads, n, [=](const Load& load, int64_t i, int64_t size, T* to) {
            float* w = load.x + i;
            if (load.dtype < 0) round_to(w, to, size);
            with_type(load.dtype, load.y, [=](auto* o) { apply(w, o + i, size, load.scale, lr, keep, to); });
        });
    });
    if (dtype < 0)
        write_to<float>(nullptr, loads, n, [=](const Load& load, int64_t i, int64_t size, float*) {
            with_type(load.dtype, load.y, [=](auto* o) { apply(load.x + i, o + i, size, load.scale, lr, keep); });
        });
    return error;
}

// keep: of the weights, after decay; rest1, rest2: 1 - beta1, 1 - beta2; root: of the second bias correction; rate: the
// learning rate by the first one.
void ds_muon_adamw(float* w, const float* g, float* m, float* v, int64_t count, float keep, float rest1, float beta2,
                   float rest2, float root, float eps, float rate) {
    AdamW to = {keep, rest1, beta2, rest2, root, eps, rate};
    in_blocks(count, [=](int64_t i, int64_t n) { adamw(w + i, g + i, m + i, v + i, n, to); });
}

// The sums of squares of x[starts[i]] to before x[starts[i + 1]].
void ds_muon_squares(const float* x, const int64_t* starts, int64_t count, double* sums) {
    #pragma omp parallel for schedule(dynamic) if (count > 2)
    for (int64_t i = 0; i < count; ++i) sums[i] = squares(x + starts[i], starts[i + 1] - starts[i]);
}

// The sums of numbers[firsts[i]] to before numbers[firsts[i + 1]], in their order.
void ds_muon_sums(const double* numbers, const int64_t* firsts, int64_t count, double* sums) {
    for (int64_t i = 0; i < count; ++i) {
        sums[i] = 0;
        for (int64_t k = firsts[i]; k < firsts[i + 1]; ++k) sums[i] += numbers[k];
    }
}
}
