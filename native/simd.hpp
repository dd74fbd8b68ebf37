// Sixteen lanes, three times: the vocabulary that every kernel is written in.
//
// F is sixteen float32, I sixteen int32, Q sixty-four unsigned bytes (sixteen lanes of four). AVX-512 holds each in one
// register, AVX2 in two, and the portable version in an array, beside one another so that a reader can check them. A
// kernel written in these words does the same operations in the same order on every machine.
//
// Included only by kernels.cpp, which is compiled once per instruction set; everything lives in a namespace of that
// name.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(TRICORN_avx512) || defined(TRICORN_avx2)
#include <immintrin.h>
#endif

namespace tricorn::TRICORN_ISA {

constexpr int lanes = 16;

#define TRICORN_INLINE inline __attribute__((always_inline))

template <class T>
TRICORN_INLINE T least(T a, T b) {
    return b < a ? b : a;
}
template <class T>
TRICORN_INLINE T greatest(T a, T b) {
    return a < b ? b : a;
}

TRICORN_INLINE float bits_to_float(uint32_t u) {
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
TRICORN_INLINE uint32_t float_to_bits(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    return u;
}
TRICORN_INLINE float bf16_to_float(uint16_t h) {
    return bits_to_float(uint32_t{h} << 16);
}
TRICORN_INLINE uint16_t float_to_bf16(float f) {  // round to nearest even; finite input
    uint32_t u = float_to_bits(f);
    return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

#if !defined(TRICORN_portable)
struct SpreadControls {
    alignas(64) uint8_t bytes[4 * 64];
};
constexpr SpreadControls spread_controls = [] {  // for the byte shuffles, which work within sixteen bytes
    SpreadControls c{};
    for (int b = 0; b < 4; ++b)
        for (int i = 0; i < 64; ++i) c.bytes[64 * b + i] = static_cast<uint8_t>((i % 16 & ~3) + b);
    return c;
}();
#endif

#if defined(TRICORN_avx512)

struct F {
    __m512 v;
};
struct I {
    __m512i v;
};
struct Q {
    __m512i v;
};
struct Mask {
    __mmask16 v;
};

TRICORN_INLINE F set(float x) {
    return {_mm512_set1_ps(x)};
}
TRICORN_INLINE F zero() {
    return {_mm512_setzero_ps()};
}
TRICORN_INLINE F load(const float* p) {
    return {_mm512_loadu_ps(p)};
}
TRICORN_INLINE void store(float* p, F a) {
    _mm512_storeu_ps(p, a.v);
}
TRICORN_INLINE F load_f16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
TRICORN_INLINE void store_f16(uint16_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
TRICORN_INLINE F load_bf16(const uint16_t* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
TRICORN_INLINE F operator+(F a, F b) {
    return {_mm512_add_ps(a.v, b.v)};
}
TRICORN_INLINE F operator-(F a, F b) {
    return {_mm512_sub_ps(a.v, b.v)};
}
TRICORN_INLINE F operator*(F a, F b) {
    return {_mm512_mul_ps(a.v, b.v)};
}
TRICORN_INLINE F operator/(F a, F b) {
    return {_mm512_div_ps(a.v, b.v)};
}
TRICORN_INLINE F fma(F a, F b, F c) {
    return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
TRICORN_INLINE F max(F a, F b) {
    return {_mm512_max_ps(a.v, b.v)};
}
TRICORN_INLINE F min(F a, F b) {
    return {_mm512_min_ps(a.v, b.v)};
}
TRICORN_INLINE F abs(F a) {
    return {_mm512_abs_ps(a.v)};
}
TRICORN_INLINE I round_to_int(F a) {
    return {_mm512_cvtps_epi32(a.v)};
}
TRICORN_INLINE F to_float(I a) {
    return {_mm512_cvtepi32_ps(a.v)};
}
TRICORN_INLINE F times_power_of_two(F a, I n) {  // a * 2^n, n in [-126, 127]
    return a * F{_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))};
}
TRICORN_INLINE Mask between(int first, int last) {  // lanes first .. last-1
    uint32_t below_last = last >= lanes ? 0xffffu : last <= 0 ? 0u : (1u << last) - 1;
    uint32_t below_first = first >= lanes ? 0xffffu : first <= 0 ? 0u : (1u << first) - 1;
    return {static_cast<__mmask16>(below_last & ~below_first)};
}
TRICORN_INLINE F select(Mask m, F yes, F no) {
    return {_mm512_mask_blend_ps(m.v, no.v, yes.v)};
}

TRICORN_INLINE I zero_int() {
    return {_mm512_setzero_si512()};
}
TRICORN_INLINE I set_int(int x) {
    return {_mm512_set1_epi32(x)};
}
TRICORN_INLINE I operator+(I a, I b) {
    return {_mm512_add_epi32(a.v, b.v)};
}
TRICORN_INLINE I operator*(I a, I b) {
    return {_mm512_mullo_epi32(a.v, b.v)};
}
TRICORN_INLINE I load_u8(const uint8_t* p) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
TRICORN_INLINE I load_s8(const uint8_t* p) {
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
TRICORN_INLINE void store_s8(int8_t* p, I a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a.v));
}

TRICORN_INLINE Q load_bytes(const uint8_t* p) {
    return {_mm512_loadu_si512(p)};
}
TRICORN_INLINE void store_bytes(uint8_t* p, Q a) {
    _mm512_storeu_si512(p, a.v);
}
TRICORN_INLINE Q set_bytes(int x) {
    return {_mm512_set1_epi8(static_cast<char>(x))};
}
TRICORN_INLINE Q spread_byte(Q a, int offset) {  // byte offset / 64 of each lane, four times
    return {_mm512_shuffle_epi8(a.v, _mm512_load_si512(spread_controls.bytes + offset))};
}
TRICORN_INLINE Q operator&(Q a, Q b) {
    return {_mm512_and_si512(a.v, b.v)};
}
TRICORN_INLINE Q operator|(Q a, Q b) {
    return {_mm512_or_si512(a.v, b.v)};
}
template <int n>
TRICORN_INLINE Q shift_right(Q a) {  // bits cross into the neighbour byte: mask afterwards
    if constexpr (n >= 0)
        return {_mm512_srli_epi16(a.v, n)};
    else
        return {_mm512_slli_epi16(a.v, -n)};
}
TRICORN_INLINE Q shift_right_by(Q a, int n) {
    return {_mm512_srl_epi16(a.v, _mm_cvtsi32_si128(n))};
}

// acc + the dot product, in each lane, of four unsigned bytes with the four signed bytes at `four` (the same for all
// lanes). Exact.
template <bool wide>  // wide: the weights use all eight bits
TRICORN_INLINE I dot_bytes(I acc, Q weights, const int8_t* four) {
    int32_t broadcast;
    std::memcpy(&broadcast, four, 4);
    return {_mm512_dpbusd_epi32(acc.v, weights.v, _mm512_set1_epi32(broadcast))};
}
// acc + the dot product, in each lane, of two bfloat16 weights with the two at `pair` (the same for all lanes).
TRICORN_INLINE F dot_bf16(F acc, const uint16_t* weights, const uint16_t* pair) {
    int32_t broadcast;
    std::memcpy(&broadcast, pair, 4);
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)_mm512_loadu_si512(weights), (__m512bh)_mm512_set1_epi32(broadcast))};
}
TRICORN_INLINE void prefetch(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}
TRICORN_INLINE __m256 upper(F a) {
    return _mm512_extractf32x8_ps(a.v, 1);
}
TRICORN_INLINE __m256 lower(F a) {
    return _mm512_castps512_ps256(a.v);
}
TRICORN_INLINE int first_at_least(F a, F b) {  // the first lane in which a >= b, or 16
    return __builtin_ctz(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ) | 0x10000u);
}

#elif defined(TRICORN_avx2)

struct F {
    __m256 lo, hi;
};
struct I {
    __m256i lo, hi;
};
struct Q {
    __m256i lo, hi;
};
struct Mask {
    __m256i lo, hi;
};

TRICORN_INLINE F set(float x) {
    return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
TRICORN_INLINE F zero() {
    return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}
TRICORN_INLINE F load(const float* p) {
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
TRICORN_INLINE void store(float* p, F a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
TRICORN_INLINE __m128i load_half(const void* p) {
    return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
TRICORN_INLINE F load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(load_half(p)), _mm256_cvtph_ps(load_half(p + 8))};
}
TRICORN_INLINE void store_f16(uint16_t* p, F a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
TRICORN_INLINE F load_bf16(const uint16_t* p) {
    __m256i lo = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(p)), 16);
    __m256i hi = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(p + 8)), 16);
    return {_mm256_castsi256_ps(lo), _mm256_castsi256_ps(hi)};
}
TRICORN_INLINE F operator+(F a, F b) {
    return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
TRICORN_INLINE F operator-(F a, F b) {
    return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
TRICORN_INLINE F operator*(F a, F b) {
    return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
TRICORN_INLINE F operator/(F a, F b) {
    return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
TRICORN_INLINE F fma(F a, F b, F c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
TRICORN_INLINE F max(F a, F b) {
    return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
TRICORN_INLINE F min(F a, F b) {
    return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
TRICORN_INLINE F abs(F a) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
TRICORN_INLINE I round_to_int(F a) {
    return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)};
}
TRICORN_INLINE F to_float(I a) {
    return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)};
}
TRICORN_INLINE F times_power_of_two(F a, I n) {
    __m256i bias = _mm256_set1_epi32(127);
    return a * F{_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.lo, bias), 23)),
                 _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.hi, bias), 23))};
}
TRICORN_INLINE Mask between(int first, int last) {
    __m256i lo = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), hi = _mm256_add_epi32(lo, _mm256_set1_epi32(8));
    __m256i before_first = _mm256_set1_epi32(first - 1), end = _mm256_set1_epi32(last);
    return {_mm256_and_si256(_mm256_cmpgt_epi32(lo, before_first), _mm256_cmpgt_epi32(end, lo)),
            _mm256_and_si256(_mm256_cmpgt_epi32(hi, before_first), _mm256_cmpgt_epi32(end, hi))};
}
TRICORN_INLINE F select(Mask m, F yes, F no) {
    return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_castsi256_ps(m.lo)),
            _mm256_blendv_ps(no.hi, yes.hi, _mm256_castsi256_ps(m.hi))};
}

TRICORN_INLINE I zero_int() {
    return {_mm256_setzero_si256(), _mm256_setzero_si256()};
}
TRICORN_INLINE I set_int(int x) {
    return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
TRICORN_INLINE I operator+(I a, I b) {
    return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
TRICORN_INLINE I operator*(I a, I b) {
    return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
}
TRICORN_INLINE I load_u8(const uint8_t* p) {
    __m128i bytes = load_half(p);
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
TRICORN_INLINE I load_s8(const uint8_t* p) {
    __m128i bytes = load_half(p);
    return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
TRICORN_INLINE void store_s8(int8_t* p, I a) {
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

TRICORN_INLINE Q load_bytes(const uint8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
TRICORN_INLINE void store_bytes(uint8_t* p, Q a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), a.hi);
}
TRICORN_INLINE Q set_bytes(int x) {
    return {_mm256_set1_epi8(static_cast<char>(x)), _mm256_set1_epi8(static_cast<char>(x))};
}
TRICORN_INLINE Q spread_byte(Q a, int offset) {
    __m256i control = _mm256_load_si256(reinterpret_cast<const __m256i*>(spread_controls.bytes + offset));
    return {_mm256_shuffle_epi8(a.lo, control), _mm256_shuffle_epi8(a.hi, control)};
}
TRICORN_INLINE Q operator&(Q a, Q b) {
    return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
TRICORN_INLINE Q operator|(Q a, Q b) {
    return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
template <int n>
TRICORN_INLINE Q shift_right(Q a) {
    if constexpr (n >= 0)
        return {_mm256_srli_epi16(a.lo, n), _mm256_srli_epi16(a.hi, n)};
    else
        return {_mm256_slli_epi16(a.lo, -n), _mm256_slli_epi16(a.hi, -n)};
}
TRICORN_INLINE Q shift_right_by(Q a, int n) {
    return {_mm256_srl_epi16(a.lo, _mm_cvtsi32_si128(n)), _mm256_srl_epi16(a.hi, _mm_cvtsi32_si128(n))};
}

template <bool wide>
TRICORN_INLINE __m256i dot_bytes_half(__m256i acc, __m256i weights, __m256i four) {
    if constexpr (!wide) {  // below seven bits the 16-bit sums of pairs cannot saturate
        __m256i pairs = _mm256_maddubs_epi16(weights, four);
        return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    } else {  // even and odd bytes apart, each product exact in 32 bits
        __m256i even = _mm256_madd_epi16(_mm256_and_si256(weights, _mm256_set1_epi16(0xff)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8));
        __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(weights, 8), _mm256_srai_epi16(four, 8));
        return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
    }
}
template <bool wide>
TRICORN_INLINE I dot_bytes(I acc, Q weights, const int8_t* four) {
    int32_t broadcast;
    std::memcpy(&broadcast, four, 4);
    __m256i f = _mm256_set1_epi32(broadcast);
    return {dot_bytes_half<wide>(acc.lo, weights.lo, f), dot_bytes_half<wide>(acc.hi, weights.hi, f)};
}
TRICORN_INLINE F dot_bf16(F acc, const uint16_t* weights, const uint16_t* pair) {
    auto half = [&](__m256 a, const uint16_t* w) {
        __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
        __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
        __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
        a = _mm256_fmadd_ps(even, _mm256_set1_ps(bf16_to_float(pair[0])), a);
        return _mm256_fmadd_ps(odd, _mm256_set1_ps(bf16_to_float(pair[1])), a);
    };
    return {half(acc.lo, weights), half(acc.hi, weights + 16)};
}
TRICORN_INLINE void prefetch(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}
TRICORN_INLINE __m256 upper(F a) {
    return a.hi;
}
TRICORN_INLINE __m256 lower(F a) {
    return a.lo;
}
TRICORN_INLINE int first_at_least(F a, F b) {
    int lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ)),
        hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ));
    return __builtin_ctz(static_cast<unsigned>(lo | hi << 8) | 0x10000u);
}

#else  // portable: the compiler's own vectors, lowered to whatever the machine has

template <class T, int n>
using Vector __attribute__((vector_size(sizeof(T) * n))) = T;

struct F {
    Vector<float, lanes> v;
};
struct I {
    Vector<int32_t, lanes> v;
};
struct Q {
    Vector<uint8_t, 4 * lanes> v;
};
struct Mask {
    Vector<int32_t, lanes> v;
};

inline float half_to_float(uint16_t h) {
    uint32_t sign = uint32_t{h} >> 15 << 31, exponent = (h >> 10) & 31, mantissa = h & 1023;
    if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24
        float f = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
        return bits_to_float(float_to_bits(f) | sign);
    }
    uint32_t e = exponent == 31 ? 255 : exponent + 112;
    return bits_to_float(sign | e << 23 | mantissa << 13);
}
inline uint16_t float_to_half(float f) {  // round to nearest even
    uint32_t u = float_to_bits(f), sign = u >> 31 << 15, rest = u & 0x7fffffff;
    if (rest > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (rest >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
    if (rest < 0x38800000) {  // subnormal: the float adder does the rounding
        float magic = bits_to_float(rest) + 0.5f;
        return static_cast<uint16_t>(sign | (float_to_bits(magic) - 0x3f000000));
    }
    rest += 0xc8000fff + ((rest >> 13) & 1);
    return static_cast<uint16_t>(sign | rest >> 13);
}
template <class T>
TRICORN_INLINE T copy_in(const void* p) {
    T t;
    std::memcpy(&t, p, sizeof t);
    return t;
}

TRICORN_INLINE F set(float x) {
    return {x - Vector<float, lanes>{}};
}
TRICORN_INLINE F zero() {
    return set(0);
}
TRICORN_INLINE F load(const float* p) {
    return copy_in<F>(p);
}
TRICORN_INLINE void store(float* p, F a) {
    std::memcpy(p, &a, sizeof a);
}
TRICORN_INLINE F load_f16(const uint16_t* p) {
    F r;
    for (int i = 0; i < lanes; ++i) r.v[i] = half_to_float(p[i]);
    return r;
}
TRICORN_INLINE void store_f16(uint16_t* p, F a) {
    for (int i = 0; i < lanes; ++i) p[i] = float_to_half(a.v[i]);
}
TRICORN_INLINE F load_bf16(const uint16_t* p) {
    F r;
    for (int i = 0; i < lanes; ++i) r.v[i] = bf16_to_float(p[i]);
    return r;
}
TRICORN_INLINE F operator+(F a, F b) {
    return {a.v + b.v};
}
TRICORN_INLINE F operator-(F a, F b) {
    return {a.v - b.v};
}
TRICORN_INLINE F operator*(F a, F b) {
    return {a.v * b.v};
}
TRICORN_INLINE F operator/(F a, F b) {
    return {a.v / b.v};
}
TRICORN_INLINE F fma(F a, F b, F c) {
    return {a.v * b.v + c.v};
}  // two roundings: a fused one is slow without the instruction
TRICORN_INLINE F max(F a, F b) {
    return {a.v > b.v ? a.v : b.v};
}
TRICORN_INLINE F min(F a, F b) {
    return {a.v < b.v ? a.v : b.v};
}
TRICORN_INLINE F abs(F a) {
    return {a.v < 0 ? -a.v : a.v};
}
TRICORN_INLINE I round_to_int(F a) {  // to nearest even, for |a| < 2^22: the adder does the rounding
    F big = set(12582912.0f);
    return {__builtin_convertvector((a + big - big).v, Vector<int32_t, lanes>)};
}
TRICORN_INLINE F to_float(I a) {
    return {__builtin_convertvector(a.v, Vector<float, lanes>)};
}
TRICORN_INLINE F times_power_of_two(F a, I n) {
    auto power = (n.v + 127) << 23;
    return a * copy_in<F>(&power);
}
TRICORN_INLINE Mask between(int first, int last) {
    Vector<int32_t, lanes> lane{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return {(lane >= first) & (lane < last)};
}
TRICORN_INLINE F select(Mask m, F yes, F no) {
    return {m.v ? yes.v : no.v};
}
TRICORN_INLINE I set_int(int x) {
    return {x - Vector<int32_t, lanes>{}};
}
TRICORN_INLINE I zero_int() {
    return set_int(0);
}
TRICORN_INLINE I operator+(I a, I b) {
    return {a.v + b.v};
}
TRICORN_INLINE I operator*(I a, I b) {
    return {a.v * b.v};
}
TRICORN_INLINE I load_u8(const uint8_t* p) {
    return {__builtin_convertvector((copy_in<Vector<uint8_t, lanes> >(p)), Vector<int32_t, lanes>)};
}
TRICORN_INLINE I load_s8(const uint8_t* p) {
    return {__builtin_convertvector((copy_in<Vector<int8_t, lanes> >(p)), Vector<int32_t, lanes>)};
}
TRICORN_INLINE void store_s8(int8_t* p, I a) {  // the values are within [-127, 127]
    auto bytes = __builtin_convertvector(a.v, Vector<int8_t, lanes>);
    std::memcpy(p, &bytes, sizeof bytes);
}
TRICORN_INLINE Q load_bytes(const uint8_t* p) {
    return copy_in<Q>(p);
}
TRICORN_INLINE void store_bytes(uint8_t* p, Q a) {
    std::memcpy(p, &a, sizeof a);
}
TRICORN_INLINE Q spread_byte(Q a, int offset) {
    auto spread = (copy_in<Vector<uint32_t, lanes> >(&a) >> (offset / 8) & 255) * 0x01010101u;
    return copy_in<Q>(&spread);
}
TRICORN_INLINE Q set_bytes(int x) {
    return {static_cast<uint8_t>(x) - Vector<uint8_t, 4 * lanes>{}};
}
TRICORN_INLINE Q operator&(Q a, Q b) {
    return {a.v & b.v};
}
TRICORN_INLINE Q operator|(Q a, Q b) {
    return {a.v | b.v};
}
template <int n>
TRICORN_INLINE Q shift_right(Q a) {
    if constexpr (n >= 0)
        return {a.v >> n};
    else
        return {a.v << -n};
}
TRICORN_INLINE Q shift_right_by(Q a, int n) {
    return {a.v >> static_cast<uint8_t>(n)};
}
template <bool wide>
TRICORN_INLINE I dot_bytes(I acc, Q weights, const int8_t* four) {
    auto w = copy_in<Vector<uint32_t, lanes> >(&weights);
    auto byte = [&](int shift) { return __builtin_convertvector((w >> shift) & 255, Vector<int32_t, lanes>); };
    return {acc.v + byte(0) * four[0] + byte(8) * four[1] + byte(16) * four[2] + byte(24) * four[3]};
}
TRICORN_INLINE F dot_bf16(F acc, const uint16_t* weights, const uint16_t* pair) {
    auto w = copy_in<Vector<uint32_t, lanes> >(weights);
    auto even = w << 16, odd = w & 0xffff0000u;
    acc = fma(copy_in<F>(&even), set(bf16_to_float(pair[0])), acc);
    return fma(copy_in<F>(&odd), set(bf16_to_float(pair[1])), acc);
}
TRICORN_INLINE void prefetch(const void*) {}
TRICORN_INLINE int first_at_least(F a, F b) {
    for (int i = 0; i < lanes; ++i)
        if (a.v[i] >= b.v[i]) return i;
    return lanes;
}

#endif

// Reductions over the lanes, by one fixed tree: i with i + 8, then + 4, + 2, + 1.
#if defined(TRICORN_portable)
template <class Function>
TRICORN_INLINE float reduce(F a, Function f) {
    for (int width = lanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) a.v[i] = f(a.v[i], a.v[i + width]);
    return a.v[0];
}
TRICORN_INLINE float sum_lanes(F a) {
    return reduce(a, [](float x, float y) { return x + y; });
}
TRICORN_INLINE float max_lanes(F a) {
    return reduce(a, [](float x, float y) { return greatest(x, y); });
}
#else
template <class Wide, class Narrow>
TRICORN_INLINE float reduce(F a, Wide wide, Narrow narrow) {
    __m256 eight = wide(lower(a), upper(a));
    __m128 four = narrow(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = narrow(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(narrow(two, _mm_movehdup_ps(two)));
}
TRICORN_INLINE float sum_lanes(F a) {
    return reduce(
        a, [](__m256 x, __m256 y) { return _mm256_add_ps(x, y); }, [](__m128 x, __m128 y) { return _mm_add_ps(x, y); });
}
TRICORN_INLINE float max_lanes(F a) {
    return reduce(
        a, [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); }, [](__m128 x, __m128 y) { return _mm_max_ps(x, y); });
}
#endif

// What follows is built of the words above and is the same for all.

// e^x to about 1 ulp for x in [-87, 88]; below -87 the result is that of -87 (1.6e-38), e^0 is exactly 1.
TRICORN_INLINE F exp(F x) {
    x = max(min(x, set(88.0f)), set(-87.0f));
    I n = round_to_int(x * set(1.44269504088896341f));
    F k = to_float(n);
    F r = fma(k, set(-0.693145751953125f), x);
    r = fma(k, set(-1.428606765330187e-06f), r);
    F p = set(1.9875691500e-4f);  // Cephes' expf polynomial
    p = fma(p, r, set(1.3981999507e-3f));
    p = fma(p, r, set(8.3334519073e-3f));
    p = fma(p, r, set(4.1665795894e-2f));
    p = fma(p, r, set(1.6666665459e-1f));
    p = fma(p, r, set(5.0000001201e-1f));
    p = fma(p, r * r, r + set(1.0f));
    return times_power_of_two(p, n);
}
TRICORN_INLINE F tanh(F x) {  // 1 - 2 / (e^2x + 1)
    x = max(min(x, set(20.0f)), set(-20.0f));
    return set(1.0f) - set(2.0f) / (exp(x + x) + set(1.0f));
}
TRICORN_INLINE F silu(F x) {
    return x / (set(1.0f) + exp(set(0.0f) - x));
}
TRICORN_INLINE F gelu_tanh(F x) {
    F inner = set(0.7978845608028654f) * fma(set(0.044715f) * x * x, x, x);
    return set(0.5f) * x * (set(1.0f) + tanh(inner));
}

}  // namespace tricorn::TRICORN_ISA
