// Runs a launch of a kernel that was compiled with shim.h: checks it, then runs block after block, each a set of
// fibers that give way only at barriers and shuffles, in forward, reverse or seeded random order.
//
// Compiled to libshim.so once for each kind of build, never instrumented: -DKVT_TSAN and -DKVT_ASAN tell it which sanitizer has
// to hear of the switches. Under ThreadSanitizer a switch orders nothing, a barrier orders all its fibers, and
// blocks are not ordered at all: what they share without an atomic is reported.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "shim.h"

#ifdef KVT_TSAN
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* token);
void __tsan_release(void* token);
}
constexpr unsigned ORDERS_NOTHING = 1;
#endif
#ifdef KVT_ASAN
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom_old, size_t* size_old);
void __asan_poison_memory_region(const volatile void* address, size_t size);
void __asan_unpoison_memory_region(const volatile void* address, size_t size);
}
#endif

namespace kvt {
namespace {

constexpr size_t STACK_BYTES = 64 << 10;
constexpr size_t CANARY_BYTES = 256;
constexpr unsigned char POISON = 0xff;  // a NaN in every float type, -1 in every integer
constexpr unsigned char CANARY = 0xa5;
constexpr unsigned WARP = 32;

// Limits of every card from sm_75 on, without opting in to more.
constexpr unsigned MAX_THREADS = 1024;
constexpr unsigned MAX_SHARED_BYTES = 48 << 10;
constexpr uint64_t MAX_GRID_X = 2147483647, MAX_GRID_YZ = 65535;

enum class State { RUNS, AT_BLOCK_BARRIER, AT_WARP_BARRIER, DONE };

struct Fiber {
    ucontext_t context;
    jmp_buf jump;
    bool started = false;
    State state = State::RUNS;
    int line = 0;
    unsigned mask = 0;
    unsigned linear = 0;
    unsigned warp_steps = 0, block_steps = 0;
    uint64_t sent[2] = {0, 0};  // double-buffered: a lane may send again before its neighbour has read
    uint3 index{};
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    char gates[2];  // of its warp, if it is lane 0
#ifdef KVT_TSAN
    void* tsan = nullptr;
    ~Fiber() {
        if (tsan) __tsan_destroy_fiber(tsan);
    }
#endif
};

struct Block {
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::unique_ptr<unsigned char[]> shared;
    char gates[2];
};

// Fibers between launches; making one is costly under a sanitizer.
std::vector<std::unique_ptr<Fiber>> idle;

// The launch in progress; one at a time in a process.
Block* block;
Fiber* running;
uint3 block_index, block_size, grid_size;
unsigned shared_bytes;
void (*entry)(void**);
void** entry_arguments;
std::string fault;
jmp_buf scheduler_jump;
#if defined(KVT_TSAN) || defined(KVT_ASAN)
ucontext_t scheduler_context;
#endif
#ifdef KVT_TSAN
void* scheduler_fiber;
char launched, finished;
#endif
#ifdef KVT_ASAN
const void* scheduler_stack;
size_t scheduler_stack_bytes;
#endif

// setjmp keeps a switch out of the kernel; sanitizers need the whole context.
#if defined(KVT_TSAN) || defined(KVT_ASAN)
void leave(bool for_good) {
    Fiber* me = running;
#ifdef KVT_TSAN
    __tsan_switch_to_fiber(scheduler_fiber, ORDERS_NOTHING);
    swapcontext(&me->context, &scheduler_context);
#else
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fake, scheduler_stack, scheduler_stack_bytes);
    swapcontext(&me->context, &scheduler_context);
    __sanitizer_finish_switch_fiber(fake, &scheduler_stack, &scheduler_stack_bytes);
#endif
}
void resume(Fiber& fiber) {
    running = &fiber;
    fiber.started = true;
#ifdef KVT_TSAN
    __tsan_switch_to_fiber(fiber.tsan, ORDERS_NOTHING);
    swapcontext(&scheduler_context, &fiber.context);
#else
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fiber.stack.get(), STACK_BYTES);
    swapcontext(&scheduler_context, &fiber.context);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}
#else
void leave(bool) {
    if (!_setjmp(running->jump)) _longjmp(scheduler_jump, 1);
}
void resume(Fiber& fiber) {
    running = &fiber;
    if (_setjmp(scheduler_jump)) return;
    if (fiber.started) _longjmp(fiber.jump, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}
#endif

void give_way(State state, int line, unsigned mask, char* gate) {
    running->state = state, running->line = line, running->mask = mask;
#ifdef KVT_TSAN
    __tsan_release(gate);
    leave(false);
    __tsan_acquire(gate);
#else
    (void)gate;
    leave(false);
#endif
}

void thread_main() {
#ifdef KVT_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
    for (;;) {  // where fibers are used again, for the next block
#ifdef KVT_TSAN
        __tsan_acquire(&launched);
#endif
        entry(entry_arguments);
#ifdef KVT_TSAN
        __tsan_release(&finished);
#endif
        running->state = State::DONE;
        leave(true);
    }
}

Fiber& lane_of(const Fiber& fiber, unsigned lane) { return *block->fibers[fiber.linear / WARP * WARP + lane]; }

void fail(std::string message) {
    if (fault.empty()) fault = std::move(message);
}

// Whether all lanes that the fiber waits for wait with it; if so, let them go.
bool open_warp_barrier(Fiber& fiber) {
    const unsigned first = fiber.linear / WARP * WARP, lanes = std::min<unsigned>(WARP, block->fibers.size() - first);
    const unsigned mask = lanes == WARP ? fiber.mask : fiber.mask & ((1u << lanes) - 1);
    for (unsigned rest = mask; rest; rest &= rest - 1) {
        const Fiber& other = lane_of(fiber, __builtin_ctz(rest));
        if (other.state != State::AT_WARP_BARRIER || other.mask != fiber.mask || other.line != fiber.line) return false;
    }
    for (unsigned rest = mask; rest; rest &= rest - 1) lane_of(fiber, __builtin_ctz(rest)).state = State::RUNS;
    return true;
}

std::string where_they_are() {
    std::map<std::string, unsigned> places;
    for (auto& fiber : block->fibers) {
        if (fiber->state == State::DONE) places["have left"]++;
        if (fiber->state == State::AT_BLOCK_BARRIER) places["wait at the barrier in line " + std::to_string(fiber->line)]++;
        if (fiber->state == State::AT_WARP_BARRIER) places["wait at the warp operation in line " + std::to_string(fiber->line)]++;
    }
    std::string text;
    for (auto& [place, count] : places) text += (text.empty() ? "" : ", ") + std::to_string(count) + " threads " + place;
    return text;
}

std::unique_ptr<Fiber> take_fiber() {
    if (idle.empty()) return std::make_unique<Fiber>();
    std::unique_ptr<Fiber> fiber = std::move(idle.back());
    idle.pop_back();
    return fiber;
}

// Fibers that were stopped half-way cannot be used again.
void give_back(Block& done) {
#ifdef KVT_TSAN
    // What they did before they stopped comes before whatever the host does next.
    for (char& gate : done.gates) __tsan_acquire(&gate);
    for (auto& fiber : done.fibers)
        for (char& gate : fiber->gates) __tsan_acquire(&gate);
#endif
    for (auto& fiber : done.fibers)
        if (fiber->state == State::DONE) idle.push_back(std::move(fiber));
    done.fibers.clear();
#ifdef KVT_ASAN
    __asan_unpoison_memory_region(done.shared.get() + shared_bytes, CANARY_BYTES);
#endif
}

void prepare_block() {
    const unsigned threads = block_size.x * block_size.y * block_size.z;
    block->fibers.resize(threads);
    block->shared.reset(new unsigned char[shared_bytes + CANARY_BYTES]);
    std::fill_n(block->shared.get(), shared_bytes, POISON);
    std::fill_n(block->shared.get() + shared_bytes, CANARY_BYTES, CANARY);
#ifdef KVT_ASAN
    __asan_poison_memory_region(block->shared.get() + shared_bytes, CANARY_BYTES);  // reads are found as well
#endif
    for (unsigned i = 0; i < threads; i++) {
        Fiber& fiber = *(block->fibers[i] = take_fiber());
        fiber.state = State::RUNS, fiber.linear = i, fiber.warp_steps = fiber.block_steps = 0;
        fiber.index = {i % block_size.x, i / block_size.x % block_size.y, i / (block_size.x * block_size.y)};
        if (fiber.started) continue;
#ifdef KVT_TSAN
        fiber.tsan = __tsan_create_fiber(0);
#endif
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, thread_main, 0);
    }
#ifdef KVT_TSAN
    __tsan_release(&launched);
#endif
}

void run_block(int order, std::mt19937_64& random) {
    prepare_block();
    std::vector<Fiber*> turn;
    for (auto& fiber : block->fibers) turn.push_back(fiber.get());
    if (order == 1) std::reverse(turn.begin(), turn.end());
    for (;;) {
        if (order == 2) std::shuffle(turn.begin(), turn.end(), random);
        bool ran = false;
        for (Fiber* fiber : turn)
            if (fiber->state == State::RUNS) {
                resume(*fiber);
                ran = true;
                if (!fault.empty()) return;
            }
        if (ran) continue;
        bool opened = false, live = false, same = true;
        for (Fiber* fiber : turn)
            if (fiber->state == State::AT_WARP_BARRIER) opened |= open_warp_barrier(*fiber);
        if (opened) continue;
        for (Fiber* fiber : turn) {
            live |= fiber->state != State::DONE;
            same &= fiber->state == State::AT_BLOCK_BARRIER && fiber->line == turn[0]->line;
        }
        if (!live) break;
        if (!same) return fail("threads of a block wait for each other at different places: " + where_they_are());
        for (Fiber* fiber : turn) fiber->state = State::RUNS;
    }
#ifdef KVT_ASAN
    __asan_unpoison_memory_region(block->shared.get() + shared_bytes, CANARY_BYTES);
#endif
    for (unsigned i = 0; i < CANARY_BYTES; i++)
        if (block->shared[shared_bytes + i] != CANARY)
            return fail("wrote past the end of its " + std::to_string(shared_bytes) + " bytes of shared memory");
}

std::string described(unsigned size, char kind, unsigned item_size, char item_kind) {
    const auto plain = [](unsigned bytes, char what) {
        return std::to_string(bytes * 8) + "-bit " + (what == 'f' ? "float" : what == 'i' ? "integer" : "value");
    };
    return kind == 'p' ? "pointer to " + plain(item_size, item_kind) : plain(size, kind);
}

std::string check(const KernelInfo& kernel, const uint64_t* grid, const uint64_t* threads, uint64_t shared,
                  const Argument* given, unsigned count, void** values) {
    if (count != kernel.count)
        return "takes " + std::to_string(kernel.count) + " arguments, got " + std::to_string(count);
    for (unsigned i = 0; i < count; i++) {
        const Argument &want = kernel.arguments[i], &got = given[i];
        bool fits = want.size == got.size && want.kind == got.kind;
        if (fits && want.kind == 'p') {
            fits = want.item_size == got.item_size && (want.item_kind == 'v' || want.item_kind == got.item_kind);
            uint64_t address;
            std::memcpy(&address, values[i], 8);
            if (address % want.item_size) return "argument " + std::to_string(i) + " is not aligned to its items";
        }
        if (!fits)
            return "argument " + std::to_string(i) + " is a " + described(want.size, want.kind, want.item_size, want.item_kind) +
                   ", got a " + described(got.size, got.kind, got.item_size, got.item_kind);
    }
    if (!grid[0] || grid[0] > MAX_GRID_X || !grid[1] || grid[1] > MAX_GRID_YZ || !grid[2] || grid[2] > MAX_GRID_YZ)
        return "grid out of range";
    const uint64_t total = threads[0] * threads[1] * threads[2];
    if (!total || threads[0] > MAX_THREADS || threads[1] > MAX_THREADS || threads[2] > 64 || total > MAX_THREADS)
        return "block out of range";
    if (total > kernel.max_threads)
        return "block of " + std::to_string(total) + " threads is over its launch bounds of " + std::to_string(kernel.max_threads);
    if (shared > MAX_SHARED_BYTES) return std::to_string(shared) + " bytes of shared memory are over " + std::to_string(MAX_SHARED_BYTES);
    return "";
}

}  // namespace

const uint3& thread_idx() { return running->index; }
const uint3& block_idx() { return block_index; }
const uint3& block_dim() { return block_size; }
const uint3& grid_dim() { return grid_size; }
unsigned char* shared_memory() { return block->shared.get(); }

void block_barrier(int line) { give_way(State::AT_BLOCK_BARRIER, line, 0, &block->gates[running->block_steps++ & 1]); }

void warp_barrier(unsigned mask, int line) {
    if (!(mask >> (running->linear % WARP) & 1)) fail("warp operation in line " + std::to_string(line) + " by a lane outside its mask");
    give_way(State::AT_WARP_BARRIER, line, mask, &lane_of(*running, 0).gates[running->warp_steps++ & 1]);
}

uint64_t shuffle(unsigned mask, uint64_t value, Source source, unsigned operand, int line) {
    const unsigned lane = running->linear % WARP, slot = running->warp_steps & 1;
    running->sent[slot] = value;
    warp_barrier(mask, line);
    const unsigned from = source == Source::LANE   ? operand % WARP
                          : source == Source::XOR  ? lane ^ operand
                          : source == Source::DOWN ? lane + operand
                                                   : lane - operand;
    if (from >= WARP) return value;
    if (!(mask >> from & 1) || running->linear - lane + from >= block->fibers.size()) {
        fail("shuffle in line " + std::to_string(line) + " reads lane " + std::to_string(from) + ", which takes no part");
        return value;
    }
    return lane_of(*running, from).sent[slot];
}

}  // namespace kvt

// 0, or 1 and a message. `kernel` is the first of a library's.
extern "C" KVT_RUNTIME int kvt_launch(const kvt::KernelInfo* kernel, const char* name, const uint64_t* grid, const uint64_t* threads,
                                      uint64_t shared, const kvt::Argument* given, void** values, unsigned count, int order,
                                      uint64_t seed, char* message, unsigned message_bytes) {
    using namespace kvt;
    const auto refuse = [&](const std::string& why) {
        std::snprintf(message, message_bytes, "%s: %s", name, why.c_str());
        return 1;
    };
    while (kernel && std::strcmp(kernel->name, name)) kernel = kernel->next;
    if (!kernel) return refuse("no such kernel");
    const std::string wrong = check(*kernel, grid, threads, shared, given, count, values);
    if (!wrong.empty()) return refuse(wrong);

    grid_size = {unsigned(grid[0]), unsigned(grid[1]), unsigned(grid[2])};
    block_size = {unsigned(threads[0]), unsigned(threads[1]), unsigned(threads[2])};
    shared_bytes = shared, entry = kernel->call, entry_arguments = values, fault.clear();
    std::mt19937_64 random(seed);
    std::vector<uint64_t> turn(grid[0] * grid[1] * grid[2]);
    for (uint64_t i = 0; i < turn.size(); i++) turn[i] = i;
    if (order == 1) std::reverse(turn.begin(), turn.end());
    if (order == 2) std::shuffle(turn.begin(), turn.end(), random);

    std::vector<std::unique_ptr<Block>> blocks;
#ifdef KVT_TSAN
    scheduler_fiber = __tsan_get_current_fiber();
#endif
    for (uint64_t i : turn) {
        block_index = {unsigned(i % grid[0]), unsigned(i / grid[0] % grid[1]), unsigned(i / (grid[0] * grid[1]))};
        blocks.push_back(std::make_unique<Block>());
        block = blocks.back().get();
        run_block(order, random);
        if (!fault.empty()) break;
#ifndef KVT_TSAN
        // What a fiber did in one block would come before what it does in the next: launches are ordered, blocks are not.
        give_back(*block);
        blocks.clear();
#endif
    }
    for (auto& done : blocks) give_back(*done);
#ifdef KVT_TSAN
    __tsan_acquire(&finished);
#endif
    return fault.empty() ? 0 : refuse(fault);
}
