// The passes over memory of the host, each in one loop on all threads, with the bits of torch_passes.
//
// Compiled without fused multiply-adds: a product and a sum round twice, as in torch. No function throws or allocates.

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORIZED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTORIZED
#endif

namespace {

// Elements that a thread works on at a time.
constexpr int64_t BLOCK = 1 << 14;

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
inline void store(float x, BFloat16& goal) {
    uint32_t bits = as_bits(x);
    goal.bits = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

#define ADVANCE(name, T)                                                                                            \
    VECTORIZED void name(float* __restrict g, T* __restrict m, int64_t count, float momentum, float rest, bool near, \
                         bool nesterov) {                                                                            \
        for (int64_t i = 0; i < count; ++i) {                                                                        \
            float before = load(m[i]), step = g[i] - before;                                                         \
            float average = near ? g[i] - step * momentum : step * rest + before;                                    \
            store(average, m[i]);                                                                                    \
            g[i] = nesterov ? g[i] * rest + average * momentum : average;                                            \
        }                                                                                                            \
    }
ADVANCE(advance, float)
ADVANCE(advance, BFloat16)

#define APPLY(name, T)                                                                                             \
    VECTORIZED void name(float* __restrict w, const T* __restrict o, int64_t count, float scale, float lr,          \
                         float keep) {                                                                              \
        for (int64_t i = 0; i < count; ++i) w[i] = w[i] * keep - load(o[i]) * scale * lr;                           \
    }
APPLY(apply, float)
APPLY(apply, Half)
APPLY(apply, BFloat16)

struct AdamW { float keep, rest1, beta2, rest2, root, eps, rate; };

VECTORIZED void adamw(float* __restrict w, const float* __restrict g, float* __restrict m, float* __restrict v,
                      int64_t count, AdamW to) {
    for (int64_t i = 0; i < count; ++i) {
        // Where torch fuses, so that the moments have its bits.
        float step = g[i] - m[i];
        m[i] = to.rest1 < 0.5f ? std::fma(to.rest1, step, m[i]) : std::fma(to.rest1 - 1, step, g[i]);
        v[i] = std::fma(to.rest2 * g[i], g[i], v[i] * to.beta2);
        w[i] = w[i] * to.keep - to.rate * m[i] / (std::sqrt(v[i]) / to.root + to.eps);
    }
}

VECTORIZED double squares(const float* x, int64_t count) {
    // Eight sums, so that the order of additions is the same with vectors of any length.
    double sums[8] = {}, total = 0;
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        for (int lane = 0; lane < 8; ++lane) sums[lane] += double(x[i + lane]) * x[i + lane];
    for (; i < count; ++i) total += double(x[i]) * x[i];
    for (double sum : sums) total += sum;
    return total;
}

template <class F> void in_blocks(int64_t count, F each) {
    #pragma omp parallel for schedule(static) if (count > 2 * BLOCK)
    for (int64_t start = 0; start < count; start += BLOCK) each(start, count - start < BLOCK ? count - start : BLOCK);
}

template <class T> void advance_all(float* g, T* m, int64_t count, float momentum, float rest, bool near, bool nesterov) {
    in_blocks(count, [=](int64_t i, int64_t n) { advance(g + i, m + i, n, momentum, rest, near, nesterov); });
}

template <class T> void apply_all(float* w, const T* o, int64_t count, float scale, float lr, float keep) {
    in_blocks(count, [=](int64_t i, int64_t n) { apply(w + i, o + i, n, scale, lr, keep); });
}

}  // namespace

extern "C" {

void ds_muon_advance(float* g, void* m, int bf16, int64_t count, float momentum, float rest, int near, int nesterov) {
    if (bf16) advance_all(g, static_cast<BFloat16*>(m), count, momentum, rest, near, nesterov);
    else advance_all(g, static_cast<float*>(m), count, momentum, rest, near, nesterov);
}

// dtype: 0 for fp32, 1 for fp16, 2 for bf16.
void ds_muon_apply(float* w, const void* o, int dtype, int64_t count, float scale, float lr, float keep) {
    if (dtype == 0) apply_all(w, static_cast<const float*>(o), count, scale, lr, keep);
    if (dtype == 1) apply_all(w, static_cast<const Half*>(o), count, scale, lr, keep);
    if (dtype == 2) apply_all(w, static_cast<const BFloat16*>(o), count, scale, lr, keep);
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
    #pragma omp parallel for schedule(static) if (count > 2)
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
