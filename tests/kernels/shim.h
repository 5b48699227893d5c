// Lets g++ compile kernels/kvtier.cu for the CPU, for tests only:
//
//     g++ -shared -std=c++20 -include shim.h -x c++ kvtier.cu libshim.so
//
// Every CUDA thread is a fiber, every block a set of fibers. Here are the names that the device code uses; the
// fibers, the scheduler and the launch checks are in shim.cpp, which is compiled without instrumentation so that
// a sanitizer sees the accesses of the device code and nothing else. Stricter than a card: shared memory starts
// as NaN, threads that have left do not count at a barrier, a shuffle may only read lanes that take part.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

// Declared here since <cmath> takes longer to read than the device code takes to compile.
extern "C" {
float expf(float) noexcept;
float logf(float) noexcept;
float fabsf(float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
float nearbyintf(float) noexcept;
}

#define KVT_CPU 1
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint3 {
    unsigned x, y, z;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

#define KVT_RUNTIME __attribute__((visibility("default")))

namespace kvt {

KVT_RUNTIME const uint3& thread_idx();
KVT_RUNTIME const uint3& block_idx();
KVT_RUNTIME const uint3& block_dim();
KVT_RUNTIME const uint3& grid_dim();
KVT_RUNTIME unsigned char* shared_memory();
KVT_RUNTIME void block_barrier(int line);
KVT_RUNTIME void warp_barrier(unsigned mask, int line);

enum class Source { LANE, XOR, DOWN, UP };
KVT_RUNTIME uint64_t shuffle(unsigned mask, uint64_t value, Source source, unsigned operand, int line);

template <class T>
T shuffle(unsigned mask, T value, Source source, unsigned operand, int line) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    bits = shuffle(mask, bits, source, operand, line);
    memcpy(&value, &bits, sizeof(T));
    return value;
}

// What a launch may be checked against: size, kind ('p'ointer, 'i'nteger, 'f'loat), and for a pointer the size
// and kind of what it points to ('v' for the structs of 16-bit floats).
struct Argument {
    unsigned size;
    char kind;
    unsigned item_size;
    char item_kind;
};

template <class T>
constexpr char kind_of() {
    return std::is_pointer_v<T> ? 'p' : std::is_floating_point_v<T> ? 'f' : std::is_integral_v<T> ? 'i' : 'v';
}

template <class T>
constexpr Argument argument_of() {
    using Item = std::remove_cv_t<std::remove_pointer_t<T>>;
    return {sizeof(T), kind_of<T>(), sizeof(Item), kind_of<Item>()};
}

struct KernelInfo {
    const char* name;
    unsigned max_threads;
    void (*call)(void**);
    const Argument* arguments;
    unsigned count;
    const KernelInfo* next;
};

// The kernels of this library, of which there may be several in a process.
static const KernelInfo* first_kernel = nullptr;

template <size_t... I>
struct Indexes {};

template <auto Function>
struct Entry;

template <class... A, void (*Function)(A...)>
struct Entry<Function> {
    static constexpr Argument arguments[] = {argument_of<A>()...};
    KernelInfo info;
    template <size_t... I>
    static void spread(void** values, Indexes<I...>) {
        Function(*static_cast<A*>(values[I])...);
    }
    static void call(void** values) { spread(values, Indexes<__integer_pack(sizeof...(A))...>{}); }
    Entry(const char* name, unsigned max_threads) : info{name, max_threads, call, arguments, sizeof...(A), first_kernel} {
        first_kernel = &info;
    }
};

inline float half_to_float(uint16_t bits) {
    _Float16 half;
    memcpy(&half, &bits, 2);
    return static_cast<float>(half);
}
inline uint16_t float_to_half(float x) {
    const _Float16 half = static_cast<_Float16>(x);
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}

}  // namespace kvt

extern "C" __attribute__((used, visibility("default"))) inline const kvt::KernelInfo* kvt_kernels() { return kvt::first_kernel; }

#define KVT_SHARED(T, name) T* name = reinterpret_cast<T*>(kvt::shared_memory())
#define KVT_EXPORT(name, threads) static const kvt::Entry<&name> kvt_entry_##name(#name, threads);

#define threadIdx (kvt::thread_idx())
#define blockIdx (kvt::block_idx())
#define blockDim (kvt::block_dim())
#define gridDim (kvt::grid_dim())
#define __syncthreads() kvt::block_barrier(__LINE__)
#define __syncwarp() kvt::warp_barrier(0xffffffffu, __LINE__)
#define __shfl_sync(mask, value, lane) kvt::shuffle(mask, value, kvt::Source::LANE, lane, __LINE__)
#define __shfl_xor_sync(mask, value, lanes) kvt::shuffle(mask, value, kvt::Source::XOR, lanes, __LINE__)
#define __shfl_down_sync(mask, value, lanes) kvt::shuffle(mask, value, kvt::Source::DOWN, lanes, __LINE__)
#define __shfl_up_sync(mask, value, lanes) kvt::shuffle(mask, value, kvt::Source::UP, lanes, __LINE__)

inline int max(int a, int b) { return a < b ? b : a; }
inline int min(int a, int b) { return b < a ? b : a; }
inline unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }

inline float __uint_as_float(unsigned u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
inline unsigned __float_as_uint(float f) {
    unsigned u;
    memcpy(&u, &f, 4);
    return u;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline int __float2int_rn(float x) {  // saturates, and NaN is 0, as on a card
    if (!(x == x)) return 0;
    if (x >= 2147483648.0f) return 2147483647;
    if (x <= -2147483648.0f) return -2147483647 - 1;
    return static_cast<int>(nearbyintf(x));
}
template <class T>
inline T __ldcs(const T* p) {
    return *p;
}
template <class T>
inline T __ldg(const T* p) {
    return *p;
}
template <class T>
inline void __stcs(T* p, T value) {
    *p = value;
}

// Relaxed atomics: on a fiber they never tear, and ThreadSanitizer takes them for what they are.
inline float atomicAdd(float* p, float value) {
    unsigned seen = __atomic_load_n(reinterpret_cast<unsigned*>(p), __ATOMIC_RELAXED), next;
    do next = __float_as_uint(__uint_as_float(seen) + value);
    while (!__atomic_compare_exchange_n(reinterpret_cast<unsigned*>(p), &seen, next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return __uint_as_float(seen);
}
inline unsigned atomicMax(unsigned* p, unsigned value) {
    unsigned seen = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (seen < value && !__atomic_compare_exchange_n(p, &seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return seen;
}
