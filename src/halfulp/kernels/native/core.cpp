// The library's entry points: choose a target, give ranges of tiles to threads.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <initializer_list>
#include <system_error>
#include <thread>
#include <vector>

#include "calls.h"

// torch's own OpenMP team, by the addresses of its entry points; zeros: plain threads.
struct Team {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
    int (*number)();
    int (*threads)();
};

// Targets, the best first.
#if defined(__x86_64__)
#define DECLARE(name, Call)                                                  \
    extern "C" void halfulp_v4_##name(const Call&, int64_t, int64_t); \
    extern "C" void halfulp_v3_##name(const Call&, int64_t, int64_t); \
    extern "C" void halfulp_v2_##name(const Call&, int64_t, int64_t);
#define TABLE(name, Call) \
    static void (*const name##_of[])(const Call&, int64_t, int64_t) = {halfulp_v4_##name, halfulp_v3_##name, halfulp_v2_##name};
static const char* const names[] = {"v4", "v3", "v2"};

// By cpuid and not by __builtin_cpu_supports, whose table not every linker lets a library reach.
static bool runs(int target) {
    unsigned a, b, c = 0, d, wide = 0, saved = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
    const unsigned basic = c;
    const auto has = [](unsigned word, std::initializer_list<int> bits) {
        for (int bit : bits)
            if (!(word >> bit & 1)) return false;
        return true;
    };
    if (target == 2) return has(basic, {20});  // SSE 4.2
    if (!has(basic, {12, 22, 27, 28, 29}) || !__get_cpuid_count(7, 0, &a, &wide, &c, &d)) return false;  // FMA, ..., F16C
    if (!has(wide, {3, 5, 8}) || !__get_cpuid(0x80000001, &a, &b, &c, &d) || !has(c, {5})) return false;  // BMI, AVX2, LZCNT
    __asm__("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));  // the registers that the system keeps
    if (target == 1) return has(saved, {1, 2});
    return has(wide, {16, 17, 28, 30, 31}) && has(saved, {1, 2, 5, 6, 7});  // AVX-512 F, DQ, CD, BW, VL
}
#else
#define DECLARE(name, Call) extern "C" void halfulp_base_##name(const Call&, int64_t, int64_t);
#define TABLE(name, Call) static void (*const name##_of[])(const Call&, int64_t, int64_t) = {halfulp_base_##name};
static const char* const names[] = {"base"};

static bool runs(int target) { return target == 0; }
#endif
KERNELS(DECLARE)
KERNELS(TABLE)

// work(a, b) over [first, last) in `ranges` parts, one a thread. Range i always goes to thread i: what it worked
// on in the last operation, torch's or ours, is in the caches of its core.
template <class Work> static void run(const Team& team, int64_t first, int64_t last, int64_t ranges, Work work) {
    struct Shared {
        const Team& team;
        int64_t first, count, ranges;
        Work& work;
        void part(int64_t i) { work(first + count * i / ranges, first + count * (i + 1) / ranges); }
    } shared = {team, first, last - first, ranges, work};
    if (ranges <= 1) return work(first, last);
    if (team.parallel) {
        const auto block = [](void* p) {
            Shared& s = *(Shared*)p;
            for (int64_t i = s.team.number(); i < s.ranges; i += s.team.threads()) s.part(i);
        };
        return team.parallel(block, &shared, (unsigned)ranges, 0);
    }
    std::vector<std::thread> others;
    for (int64_t i = 1; i < ranges; i++) try {
            others.emplace_back([&shared, i] { shared.part(i); });
        } catch (const std::system_error&) {  // no more threads: this one does it
            shared.part(i);
        }
    shared.part(0);
    for (auto& t : others) t.join();
}

// The name of the i-th target, or null behind the last; and whether it runs here.
PUBLIC const char* halfulp_target(int i) { return i < (int)(sizeof names / sizeof *names) ? names[i] : nullptr; }
PUBLIC int halfulp_runs(int i) { return runs(i); }

#define ENTRY(name, Call)                                                                                                     \
    PUBLIC void halfulp_##name(int target, const Team& team, int64_t first, int64_t last, int64_t ranges, const Call& call) { \
        run(team, first, last, ranges, [&](int64_t a, int64_t b) { name##_of[target](call, a, b); });                         \
    }
KERNELS(ENTRY)
