// Device code of kvtier. It has no #include, so that NVRTC alone compiles it on any machine with a driver.
//
// Conventions
//  * A page is found through `pages`, one 64-bit address a page, so pages may lie in any slabs.
//  * A part of a page (the K or V of one layer) is token-major: [page_tokens, heads, dim].
//  * One kernel, one launch shape; the wrapper beside each reference computes it and checks the arguments.
//  * Sums are in float32. What ends as an integer, fp8 or bf16 is bit for bit what the torch reference gives:
//    divisions are not turned into multiplications, products and sums of a decode are not contracted.
//  * The subset used: grid-stride loops, full-mask shuffles, block barriers, atomics. Tests run this file on
//    the CPU, where those four have exact meanings; nothing beyond them would be tested without a GPU.

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

#ifndef KVT_CPU
extern __shared__ __align__(16) u8 kvt_shared[];
#define KVT_SHARED(T, name) T* name = reinterpret_cast<T*>(kvt_shared)
#define KVT_EXPORT(name, threads)
#endif
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define DEVICE __device__ __forceinline__

constexpr int THREADS = 256;
constexpr int WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;
#define INF __uint_as_float(0x7f800000u)

// ------------------------------------------------------------------------------------------ numbers

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

template <class T>
DEVICE T from_float(float x);

template <>
DEVICE float from_float<float>(float x) {
    return x;
}

template <>
DEVICE bf16 from_float<bf16>(float x) {  // to nearest, ties to even
    const u32 u = __float_as_uint(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {(u16)0x7fff};
    return {(u16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

#ifdef KVT_CPU
DEVICE float to_float(f16 x) { return kvt::half_to_float(x.bits); }
template <>
DEVICE f16 from_float<f16>(float x) {
    return {kvt::float_to_half(x)};
}
#else
DEVICE float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
template <>
DEVICE f16 from_float<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
#endif

// fp8 e4m3 in integer code: cards before sm_89 have no instruction for it. To nearest, ties to even;
// beyond 448 it saturates.
DEVICE u32 to_e4m3(float x) {
    const u32 u = __float_as_uint(x), sign = (u >> 24) & 0x80u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return sign | 0x7fu;
    if (a >= 0x43e80000u) return sign | 0x7eu;                                                       // >= 464
    if (a < 0x3c800000u) return sign | (u32)__float2int_rn(__uint_as_float(a) * 512.0f);             // < 2^-6
    return sign | (((a + 0x7ffffu + ((a >> 20) & 1u)) >> 20) - ((127u - 7u) << 3));
}

DEVICE float from_e4m3(u32 code) {
    const u32 exponent = (code >> 3) & 15u, mantissa = code & 7u;
    float a = exponent ? __uint_as_float(((exponent + 120u) << 23) | (mantissa << 20)) : (float)mantissa * (1.0f / 512.0f);
    if ((code & 0x7fu) == 0x7fu) a = __uint_as_float(0x7fc00000u);
    return code & 0x80u ? -a : a;
}

// N values in one load or store. Through a plain word: the compiler splits the load of a struct.
template <int BYTES>
struct Word;
template <>
struct Word<1> {
    using type = u8;
};
template <>
struct Word<2> {
    using type = u16;
};
template <>
struct Word<4> {
    using type = u32;
};
template <>
struct Word<8> {
    using type = uint2;
};
template <>
struct Word<16> {
    using type = uint4;
};

template <class T, int N>
struct Pack {
    T at[N];
};

template <class T, int N>
union Packed {
    typename Word<sizeof(T) * N>::type word;
    Pack<T, N> values;
};

template <class T, int N>
DEVICE Pack<T, N> load(const T* p) {
    Packed<T, N> packed;
    packed.word = *reinterpret_cast<const typename Word<sizeof(T) * N>::type*>(p);
    return packed.values;
}

// From memory that nothing writes meanwhile. Addresses from a table are just numbers: without this the compiler
// could not know that they are in global memory.
template <class T, int N>
DEVICE Pack<T, N> load_global(const T* p) {
    Packed<T, N> packed;
    packed.word = __ldg(reinterpret_cast<const typename Word<sizeof(T) * N>::type*>(p));
    return packed.values;
}

template <class T, int N>
DEVICE void store(T* p, Pack<T, N> values) {
    Packed<T, N> packed;
    packed.values = values;
    *reinterpret_cast<typename Word<sizeof(T) * N>::type*>(p) = packed.word;
}

DEVICE float warp_max(float x) {
    for (int step = WARP / 2; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

DEVICE u32 warp_max(u32 x) {
    for (int step = WARP / 2; step; step >>= 1) x = max(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

DEVICE float warp_sum(float x) {
    for (int step = WARP / 2; step; step >>= 1) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// ------------------------------------------------------------------------------------- gather, scatter

// `nbytes` in words of W, which both addresses are multiples of, and a ragged tail; the blocks of a row share it.
template <class W>
DEVICE void copy_bytes(u8* to, const u8* from, i64 nbytes) {
    constexpr int AT_ONCE = 4;  // loads in flight before the first store
    const i64 words = nbytes / (i64)sizeof(W), step = (i64)gridDim.x * blockDim.x;
    const W* source = reinterpret_cast<const W*>(from);
    W* target = reinterpret_cast<W*>(to);
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += AT_ONCE * step) {
        W held[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
            if (i + n * step < words) held[n] = __ldcs(source + i + n * step);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
            if (i + n * step < words) __stcs(target + i + n * step, held[n]);
    }
    const i64 rest = words * (i64)sizeof(W) + threadIdx.x;
    if (blockIdx.x == 0 && rest < nbytes) to[rest] = from[rest];
}

// `nbytes` from byte `start` of each page, to or from row `i` of `packed`, which begins at `i * stride`.
// W is the widest word that start, stride and all addresses are multiples of. Grid (x, pages).
template <class W, bool SCATTER>
DEVICE void move_pages(const u64* pages, int n_pages, i64 start, i64 nbytes, u8* packed, i64 stride) {
    for (int page = blockIdx.y; page < n_pages; page += gridDim.y) {
        u8* in_page = reinterpret_cast<u8*>(pages[page]) + start;
        u8* in_row = packed + page * stride;
        copy_bytes<W>(SCATTER ? in_page : in_row, SCATTER ? in_row : in_page, nbytes);
    }
}

#define MOVE(name, W, SCATTER)                                                                                      \
    KERNEL(THREADS) name(const u64* pages, int n_pages, i64 start, i64 nbytes, u8* packed, i64 stride) {            \
        move_pages<W, SCATTER>(pages, n_pages, start, nbytes, packed, stride);                                      \
    }                                                                                                               \
    KVT_EXPORT(name, THREADS)

MOVE(gather_pages_16, uint4, false)
MOVE(gather_pages_4, u32, false)
MOVE(gather_pages_1, u8, false)
MOVE(scatter_pages_16, uint4, true)
MOVE(scatter_pages_4, u32, true)
MOVE(scatter_pages_1, u8, true)

// sizes[i] bytes from sources[i] to destinations[i], in VRAM or pinned host memory; no piece meets another.
// The word is chosen a piece, for one odd address must not slow down all. Grid (x, pieces).
KERNEL(THREADS)
move_pieces(const u64* destinations, const u64* sources, const i64* sizes, int n_pieces) {
    for (int piece = blockIdx.y; piece < n_pieces; piece += gridDim.y) {
        const u64 both = destinations[piece] | sources[piece];
        u8* to = reinterpret_cast<u8*>(destinations[piece]);
        const u8* from = reinterpret_cast<const u8*>(sources[piece]);
        if (both % 16 == 0)
            copy_bytes<uint4>(to, from, sizes[piece]);
        else if (both % 4 == 0)
            copy_bytes<u32>(to, from, sizes[piece]);
        else
            copy_bytes<u8>(to, from, sizes[piece]);
    }
}
KVT_EXPORT(move_pieces, THREADS)

// ------------------------------------------------------------------------------------------- summary

// Of each page's keys, for each KV head and channel: least, largest, mean, and mean distance from the middle
// of least and largest. Output [n_pages, 4, channels], channels = heads * dim. A thread owns N channels and
// walks the tokens in order, so the sums are the reference's to the last bit. Grid (channels, pages).
template <class T, int N>
DEVICE void summarise(const u64* pages, const int* tokens, int n_pages, i64 start, int channels, T* out) {
    for (int page = blockIdx.y; page < n_pages; page += gridDim.y) {
        const T* keys = reinterpret_cast<const T*>(pages[page] + start);
        const int count = tokens[page];
        for (int at = (blockIdx.x * blockDim.x + threadIdx.x) * N; at < channels; at += gridDim.x * blockDim.x * N) {
            float low[N], high[N], sum[N], spread[N];
#pragma unroll
            for (int n = 0; n < N; n++) low[n] = INF, high[n] = -INF, sum[n] = 0.0f, spread[n] = 0.0f;
            for (int t = 0; t < count; t++) {
                const Pack<T, N> row = load_global<T, N>(keys + (i64)t * channels + at);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const float k = to_float(row.at[n]);
                    low[n] = fminf(low[n], k), high[n] = fmaxf(high[n], k), sum[n] += k;
                }
            }
            for (int t = 0; t < count; t++) {
                const Pack<T, N> row = load_global<T, N>(keys + (i64)t * channels + at);
#pragma unroll
                for (int n = 0; n < N; n++) spread[n] += fabsf(to_float(row.at[n]) - (low[n] + high[n]) * 0.5f);
            }
            Pack<T, N> least, largest, mean, deviation;
#pragma unroll
            for (int n = 0; n < N; n++) {
                least.at[n] = from_float<T>(low[n]), largest.at[n] = from_float<T>(high[n]);
                mean.at[n] = from_float<T>(sum[n] / (float)count);
                deviation.at[n] = from_float<T>(spread[n] / (float)count);
            }
            T* row = out + (i64)page * 4 * channels + at;
            store<T, N>(row, least);
            store<T, N>(row + channels, largest);
            store<T, N>(row + 2 * (i64)channels, mean);
            store<T, N>(row + 3 * (i64)channels, deviation);
        }
    }
}

#define SUMMARISE(name, T, N)                                                                                       \
    KERNEL(THREADS) name(const u64* pages, const int* tokens, int n_pages, i64 start, int channels, T* out) {       \
        summarise<T, N>(pages, tokens, n_pages, start, channels, out);                                              \
    }                                                                                                               \
    KVT_EXPORT(name, THREADS)

SUMMARISE(summarise_16_f32, float, 4)
SUMMARISE(summarise_16_f16, f16, 8)
SUMMARISE(summarise_16_bf16, bf16, 8)
SUMMARISE(summarise_1_f32, float, 1)
SUMMARISE(summarise_1_f16, f16, 1)
SUMMARISE(summarise_1_bf16, bf16, 1)

// -------------------------------------------------------------------------------------------- scores

// What the keys of a page may score against each query head, from the summary alone, at `start` of each of `pages`; out
// [heads, n_pages].
// Quest: sum of max(q * least, q * largest), a bound. ArkBox: q * middle + |q| * deviation, an estimate.
// A warp takes one page of one KV head and all query heads of its group. Grid (pages, KV heads).
template <class T, bool ARKBOX>
DEVICE void score_pages(const T* q, const u64* pages, i64 start, float* out, int n_pages, int kv_heads, int group, int dim) {
    constexpr int A_LANE = 16;  // channels a lane holds, so dim <= 512
    const int lane = threadIdx.x % WARP, head = blockIdx.y;
    const int page = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (page >= n_pages) return;
    const i64 row = (i64)kv_heads * dim;
    const T* least = reinterpret_cast<const T*>(pages[page] + start) + (i64)head * dim;
    float first[A_LANE], second[A_LANE];
#pragma unroll
    for (int n = 0; n < A_LANE; n++) {
        const int c = lane + n * WARP;
        first[n] = second[n] = 0.0f;
        if (c < dim) {
            const float low = to_float(least[c]), high = to_float(least[row + c]);
            first[n] = ARKBOX ? (low + high) * 0.5f : low;
            second[n] = ARKBOX ? to_float(least[3 * row + c]) : high;
        }
    }
    for (int j = 0; j < group; j++) {
        const T* query = q + ((i64)head * group + j) * dim;
        float score = 0.0f;
#pragma unroll
        for (int n = 0; n < A_LANE; n++) {
            const int c = lane + n * WARP;
            if (c < dim) {
                const float x = to_float(query[c]);
                score += ARKBOX ? x * first[n] + fabsf(x) * second[n] : fmaxf(x * first[n], x * second[n]);
            }
        }
        score = warp_sum(score);
        if (lane == 0) out[((i64)head * group + j) * n_pages + page] = score;
    }
}

#define SCORES(name, T, ARKBOX)                                                                                                \
    KERNEL(THREADS) name(const T* q, const u64* pages, i64 start, float* out, int n_pages, int kv_heads, int group, int dim) { \
        score_pages<T, ARKBOX>(q, pages, start, out, n_pages, kv_heads, group, dim);                                           \
    }                                                                                                                          \
    KVT_EXPORT(name, THREADS)

SCORES(quest_scores_f32, float, false)
SCORES(quest_scores_f16, f16, false)
SCORES(quest_scores_bf16, bf16, false)
SCORES(arkbox_scores_f32, float, true)
SCORES(arkbox_scores_f16, f16, true)
SCORES(arkbox_scores_bf16, bf16, true)

// ---------------------------------------------------------------------------------------------- mass

// mass[rows[j]] += weight * sum over heads of exp(page_lse[head, j] - lse[head]). Several j may share a row.
// A block takes 32 pages; its warps share the heads. Shared memory: 32 floats a warp. Grid (pages / 32).
KERNEL(THREADS)
add_page_mass(const float* page_lse, const float* lse, const int* rows, float* mass, int heads, int n_pages, float weight) {
    KVT_SHARED(float, sums);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int page = blockIdx.x * WARP + lane;
    float sum = 0.0f;
    if (page < n_pages)
        for (int head = warp; head < heads; head += warps) {
            const float part = page_lse[(i64)head * n_pages + page];
            if (part != -INF) sum += expf(part - lse[head]);
        }
    sums[warp * WARP + lane] = sum;
    __syncthreads();
    if (warp == 0 && page < n_pages) {
        float total = 0.0f;
        for (int n = 0; n < warps; n++) total += sums[n * WARP + lane];
        atomicAdd(mass + rows[page], total * weight);
    }
}
KVT_EXPORT(add_page_mass, THREADS)

// ----------------------------------------------------------------------------------------- attention

// Copy `rows` rows of one head of a part into shared memory.
template <class T>
DEVICE void load_tile(T* tile, int padded, const T* part, int rows, int heads, int dim, bool wide) {
    constexpr int N = 16 / sizeof(T);
    if (wide) {
        const int packs = dim / N;
        for (int i = threadIdx.x; i < rows * packs; i += blockDim.x) {
            const int t = i / packs, c = i % packs * N;
            store<T, N>(tile + t * padded + c, load_global<T, N>(part + (i64)t * heads * dim + c));
        }
    } else {
        for (int i = threadIdx.x; i < rows * dim; i += blockDim.x)
            store<T, 1>(tile + i / dim * padded + i % dim, load_global<T, 1>(part + (i64)(i / dim) * heads * dim + i % dim));
    }
}

// Attention of one decode step over the listed pages, split into runs of `pages_a_split` pages.
//   out [splits, heads, v_dim] and lse [splits, heads]: of each split, to be merged;
//   page_lse [heads, n_pages]: natural log of the sum of exp(scale * q.k) over the tokens of a page.
// A block takes one KV head, one split and as many query heads of the group as it has warps. Each tile of at
// most 32 tokens goes through shared memory once for all of them: a lane scores one token, then owns every
// 32nd channel of the output. Grid (KV heads, splits, groups / warps).
// Shared memory: warps * k_dim floats, then `tile` rows of K and of V, `k_padded` and `v_padded` values each.
template <class T, int A_LANE>
DEVICE void attend(const T* q, const u64* pages, const int* tokens, float* out, float* lse, float* page_lse, int n_pages,
                   int pages_a_split, i64 k_start, i64 v_start, int kv_heads, int group, int k_dim, int v_dim, int tile,
                   int k_padded, int v_padded, int wide, float scale) {
    KVT_SHARED(float, queries);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int member = blockIdx.z * warps + warp;
    const bool live = member < group;
    const i64 heads = (i64)kv_heads * group, head = (i64)blockIdx.x * group + (live ? member : 0);
    float* query = queries + warp * k_dim;
    T* k_tile = reinterpret_cast<T*>(queries + warps * k_dim);
    T* v_tile = k_tile + tile * k_padded;
    for (int c = lane; c < k_dim; c += WARP) query[c] = to_float(q[head * k_dim + c]) * scale;

    float peak = -INF, total = 0.0f, acc[A_LANE];
#pragma unroll
    for (int n = 0; n < A_LANE; n++) acc[n] = 0.0f;
    const int begin = blockIdx.y * pages_a_split, end = min(n_pages, begin + pages_a_split);
    for (int page = begin; page < end; page++) {
        const T* k = reinterpret_cast<const T*>(pages[page] + k_start) + (i64)blockIdx.x * k_dim;
        const T* v = reinterpret_cast<const T*>(pages[page] + v_start) + (i64)blockIdx.x * v_dim;
        const int count = tokens[page];
        float page_peak = -INF, page_total = 0.0f;
        for (int first = 0; first < count; first += tile) {
            const int rows = min(tile, count - first);
            __syncthreads();  // the tile before has been read
            load_tile(k_tile, k_padded, k + (i64)first * kv_heads * k_dim, rows, kv_heads, k_dim, wide);
            load_tile(v_tile, v_padded, v + (i64)first * kv_heads * v_dim, rows, kv_heads, v_dim, wide);
            __syncthreads();
            float score = -INF;
            if (lane < rows) {
                const T* row = k_tile + lane * k_padded;
                constexpr int N = 16 / sizeof(T);
                score = 0.0f;
                if (wide)
                    for (int c = 0; c < k_dim; c += N) {
                        const Pack<T, N> key = load<T, N>(row + c);
#pragma unroll
                        for (int n = 0; n < N; n++) score += query[c + n] * to_float(key.at[n]);
                    }
                else
                    for (int c = 0; c < k_dim; c++) score += query[c] * to_float(row[c]);
            }
            const float tile_peak = warp_max(score);
            const float page_before = page_peak, before = peak;
            page_peak = fmaxf(page_peak, tile_peak);
            page_total = page_total * expf(page_before - page_peak) + warp_sum(expf(score - page_peak));
            peak = fmaxf(peak, tile_peak);
            const float fade = expf(before - peak), p = expf(score - peak);
            total = total * fade + warp_sum(p);
#pragma unroll
            for (int n = 0; n < A_LANE; n++) acc[n] *= fade;
            for (int t = 0; t < rows; t++) {
                const float weight = __shfl_sync(ALL_LANES, p, t);
#pragma unroll
                for (int n = 0; n < A_LANE; n++) {
                    const int c = lane + n * WARP;
                    if (c < v_dim) acc[n] += weight * to_float(v_tile[t * v_padded + c]);
                }
            }
        }
        if (live && lane == 0) page_lse[head * n_pages + page] = page_peak + logf(page_total);
    }
    if (!live) return;
#pragma unroll
    for (int n = 0; n < A_LANE; n++) {
        const int c = lane + n * WARP;
        if (c < v_dim) out[(blockIdx.y * heads + head) * v_dim + c] = acc[n] / total;
    }
    if (lane == 0) lse[blockIdx.y * heads + head] = peak + logf(total);
}

#define ATTEND(name, T, A_LANE)                                                                                     \
    KERNEL(THREADS) name(const T* q, const u64* pages, const int* tokens, float* out, float* lse, float* page_lse,  \
                         int n_pages, int pages_a_split, i64 k_start, i64 v_start, int kv_heads, int group,         \
                         int k_dim, int v_dim, int tile, int k_padded, int v_padded, int wide, float scale) {       \
        attend<T, A_LANE>(q, pages, tokens, out, lse, page_lse, n_pages, pages_a_split, k_start, v_start, kv_heads, \
                          group, k_dim, v_dim, tile, k_padded, v_padded, wide, scale);                              \
    }                                                                                                               \
    KVT_EXPORT(name, THREADS)

ATTEND(attend_128_f32, float, 4)
ATTEND(attend_128_f16, f16, 4)
ATTEND(attend_128_bf16, bf16, 4)
ATTEND(attend_512_f32, float, 16)
ATTEND(attend_512_f16, f16, 16)
ATTEND(attend_512_bf16, bf16, 16)

// Merge attention over disjoint sets of tokens: outs [parts, heads, dim], lses [parts, heads]. A part without
// tokens has lse -inf and its output is not read. A block a head. Grid (heads).
KERNEL(THREADS) merge_partials(const float* outs, const float* lses, float* out, float* lse, int parts, int heads, int dim) {
    const int head = blockIdx.x;
    float peak = -INF, total = 0.0f;
    for (int n = 0; n < parts; n++) peak = fmaxf(peak, lses[(i64)n * heads + head]);
    for (int n = 0; n < parts; n++)
        if (lses[(i64)n * heads + head] != -INF) total += expf(lses[(i64)n * heads + head] - peak);
    for (int c = threadIdx.x; c < dim; c += blockDim.x) {
        float sum = 0.0f;
        for (int n = 0; n < parts; n++) {
            const float part = lses[(i64)n * heads + head];
            if (part != -INF) sum += expf(part - peak) * outs[((i64)n * heads + head) * dim + c];
        }
        out[(i64)head * dim + c] = peak == -INF ? 0.0f : sum / total;
    }
    if (threadIdx.x == 0) lse[head] = peak == -INF ? -INF : peak + logf(total);
}
KVT_EXPORT(merge_partials, THREADS)

// -------------------------------------------------------------------------------------- quantisation

constexpr int E4M3 = 0, INT8 = 1, INT4 = 2;

// A code c stands for zero + scale * value(c). Only int4 has a zero other than 0.
struct Steps {
    float scale, zero;
};

DEVICE Steps steps_of(int format, float low, float high) {
    const float width = format == INT4 ? high - low : fmaxf(high, -low);
    const float scale = width / (format == INT4 ? 15.0f : format == INT8 ? 127.0f : 448.0f);
    return {scale > 0.0f ? scale : 1.0f, format == INT4 ? low : 0.0f};
}

DEVICE u32 encode(int format, Steps steps, float x) {
    const float y = (x - steps.zero) / steps.scale;
    if (format == E4M3) return to_e4m3(y);
    if (format == INT8) return (u8)max(-127, min(127, __float2int_rn(y)));
    return (u32)max(0, min(15, __float2int_rn(y)));
}

DEVICE float decode(int format, Steps steps, u32 code) {
    const float value = format == INT4 ? (float)code : format == INT8 ? (float)(i8)code : from_e4m3(code);
    return __fadd_rn(__fmul_rn(value, steps.scale), steps.zero);
}

// Encode two neighbours, write their codes and add up how far what will be read back is from `x`.
template <class T>
DEVICE void encode_pair(int format, Pack<T, 2> x, const Steps* steps, u8* codes, i64 pair, u32& worst, float& squares, float& energy) {
    u32 code[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const float value = to_float(x.at[n]);
        code[n] = encode(format, steps[n], value);
        const float error = fabsf(value - to_float(from_float<T>(decode(format, steps[n], code[n]))));
        worst = max(worst, __float_as_uint(error));  // as integers, so that a NaN wins
        squares += error * error, energy += value * value;
    }
    if (format == INT4)
        codes[pair] = (u8)(code[0] | code[1] << 4);
    else
        store<u8, 2>(codes + 2 * pair, {{(u8)code[0], (u8)code[1]}});
}

DEVICE void add_errors(u32* worst_of, float* sums, int page, u32 worst, float squares, float energy) {
    worst = warp_max(worst), squares = warp_sum(squares), energy = warp_sum(energy);
    if (threadIdx.x % WARP == 0) {
        atomicMax(worst_of + page, worst);
        atomicAdd(sums + 2 * page, squares);
        atomicAdd(sums + 2 * page + 1, energy);
    }
}

// One scale a channel and page. x [n_pages, tokens, channels]; scale, zero [n_pages, channels].
// worst [n_pages]: largest error, as float bits; sums [n_pages, 2]: of error^2 and x^2. A thread takes two
// channels. Grid (channels / 2, pages).
template <class T>
DEVICE void quantise_channels(const T* x, u8* codes, float* scale, float* zero, u32* worst_of, float* sums, int n_pages,
                              int tokens, int channels, int format) {
    const int pairs = channels / 2, pair = blockIdx.x * blockDim.x + threadIdx.x;
    for (int page = blockIdx.y; page < n_pages; page += gridDim.y) {
        u32 worst = 0;
        float squares = 0.0f, energy = 0.0f;
        if (pair < pairs) {
            const i64 first = (i64)page * tokens * pairs + pair;
            float low[2] = {INF, INF}, high[2] = {-INF, -INF};
            for (int t = 0; t < tokens; t++) {
                const Pack<T, 2> row = load_global<T, 2>(x + 2 * (first + (i64)t * pairs));
#pragma unroll
                for (int n = 0; n < 2; n++) low[n] = fminf(low[n], to_float(row.at[n])), high[n] = fmaxf(high[n], to_float(row.at[n]));
            }
            const Steps steps[2] = {steps_of(format, low[0], high[0]), steps_of(format, low[1], high[1])};
            for (int t = 0; t < tokens; t++) {
                const i64 at = first + (i64)t * pairs;
                encode_pair<T>(format, load_global<T, 2>(x + 2 * at), steps, codes, at, worst, squares, energy);
            }
            const i64 at = (i64)page * channels + 2 * pair;
            store<float, 2>(scale + at, {{steps[0].scale, steps[1].scale}});
            if (format == INT4) store<float, 2>(zero + at, {{steps[0].zero, steps[1].zero}});
        }
        add_errors(worst_of, sums, page, worst, squares, energy);
    }
}

// One scale a token and `width` neighbouring channels. x [n_pages * tokens, channels]; scale, zero
// [n_pages * tokens, channels / width]. A warp takes one token. Grid (tokens).
template <class T>
DEVICE void quantise_groups(const T* x, u8* codes, float* scale, float* zero, u32* worst_of, float* sums, int n_pages, int tokens,
                            int channels, int width, int format) {
    const int lane = threadIdx.x % WARP, groups = channels / width;
    const i64 token = (i64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (token >= (i64)n_pages * tokens) return;
    u32 worst = 0;
    float squares = 0.0f, energy = 0.0f;
    for (int g = 0; g < groups; g++) {
        const i64 first = (token * channels + (i64)g * width) / 2;
        float low = INF, high = -INF;
        for (int i = lane; i < width / 2; i += WARP) {
            const Pack<T, 2> row = load_global<T, 2>(x + 2 * (first + i));
#pragma unroll
            for (int n = 0; n < 2; n++) low = fminf(low, to_float(row.at[n])), high = fmaxf(high, to_float(row.at[n]));
        }
        low = -warp_max(-low), high = warp_max(high);
        const Steps one = steps_of(format, low, high), steps[2] = {one, one};
        for (int i = lane; i < width / 2; i += WARP)
            encode_pair<T>(format, load_global<T, 2>(x + 2 * (first + i)), steps, codes, first + i, worst, squares, energy);
        if (lane == 0) {
            scale[token * groups + g] = one.scale;
            if (format == INT4) zero[token * groups + g] = one.zero;
        }
    }
    add_errors(worst_of, sums, (int)(token / tokens), worst, squares, energy);
}

// The inverse of both; `width` 0 means one scale a channel and page. Grid (channels / 2, tokens).
template <class T>
DEVICE void dequantise(const u8* codes, const float* scale, const float* zero, T* x, int n_pages, int tokens, int channels, int width,
                       int format) {
    const int pairs = channels / 2;
    for (i64 token = blockIdx.y; token < (i64)n_pages * tokens; token += gridDim.y)
        for (int pair = blockIdx.x * blockDim.x + threadIdx.x; pair < pairs; pair += gridDim.x * blockDim.x) {
            const i64 at = token * pairs + pair;
            Pack<T, 2> values;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const int c = 2 * pair + n;
                const i64 s = width ? token * (channels / width) + c / width : token / tokens * channels + c;
                const u32 code = format == INT4 ? (codes[at] >> (4 * n)) & 15u : codes[2 * at + n];
                values.at[n] = from_float<T>(decode(format, {scale[s], format == INT4 ? zero[s] : 0.0f}, code));
            }
            store<T, 2>(x + 2 * at, values);
        }
}

#define QUANTISE(suffix, T)                                                                                              \
    KERNEL(THREADS) quantise_channels_##suffix(const T* x, u8* codes, float* scale, float* zero, u32* worst, float* sums, \
                                               int n_pages, int tokens, int channels, int format) {                       \
        quantise_channels<T>(x, codes, scale, zero, worst, sums, n_pages, tokens, channels, format);                      \
    }                                                                                                                    \
    KERNEL(THREADS) quantise_groups_##suffix(const T* x, u8* codes, float* scale, float* zero, u32* worst, float* sums,   \
                                             int n_pages, int tokens, int channels, int width, int format) {              \
        quantise_groups<T>(x, codes, scale, zero, worst, sums, n_pages, tokens, channels, width, format);                 \
    }                                                                                                                    \
    KERNEL(THREADS) dequantise_##suffix(const u8* codes, const float* scale, const float* zero, T* x, int n_pages,        \
                                        int tokens, int channels, int width, int format) {                                \
        dequantise<T>(codes, scale, zero, x, n_pages, tokens, channels, width, format);                                   \
    }                                                                                                                    \
    KVT_EXPORT(quantise_channels_##suffix, THREADS)                                                                      \
    KVT_EXPORT(quantise_groups_##suffix, THREADS)                                                                        \
    KVT_EXPORT(dequantise_##suffix, THREADS)

QUANTISE(f32, float)
QUANTISE(f16, f16)
QUANTISE(bf16, bf16)
