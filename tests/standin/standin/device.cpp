#include "device.h"

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <thread>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

// Of Python, whose headers need not be here; absent in a process without it.
extern "C" {
__attribute__((weak)) int PyGILState_Check();
__attribute__((weak)) void* PyEval_SaveThread();
__attribute__((weak)) void PyEval_RestoreThread(void*);
}

namespace standin {

class Stream {
 public:
  int device = 0;
  int64_t number = 0;
  size_t index = 0;  // of all streams of the process: its place in clocks
  std::string name;
  Clock clock;  // what it has been told to wait for, and its own last operation; under the core's lock

  void push(std::function<void()> work) {
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_all();
  }
  bool idle() {
    std::lock_guard lock(mutex_);
    return queue_.empty() && !busy_;
  }
  [[noreturn]] void run();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false;
};

namespace {

constexpr size_t PAGE = 4096, UNIT = 512;
constexpr int POISON = 0xff;  // NaN in every floating type
constexpr int MOST_STREAMS = 256;

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

// Whoever holds Python's lock must not wait: a kernel may need it.
class WithoutPython {
 public:
  WithoutPython() : state_(PyGILState_Check && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPython() {
    if (state_) PyEval_RestoreThread(state_);
  }

 private:
  void* state_;
};

// One operation of a stream, as its clock counts it.
struct Use {
  const Stream* stream = nullptr;
  uint64_t stamp = 0;
  const std::string* op = nullptr;
  bool before(const Clock& clock) const {
    return !stream || (stream->index < clock.size() && clock[stream->index] >= stamp);
  }
};

// Bytes of a block that were used alike: the last write, and reads since, none of which is ordered behind
// another.
struct Span {
  size_t end;
  Use write;
  std::vector<Use> reads;
};

// A copy that the host has not waited for keeps the host off the pages of its pinned memory.
struct Guarded {
  Use use;
  size_t begin, end;
  int protection;
};

struct Block {
  size_t size = 0, requested = 0;  // rounded up, and as asked for
  Stream* home = nullptr;  // nullptr: pinned memory of the host
  std::map<size_t, Span> spans;
  std::set<Stream*> users;  // of record_stream
  std::vector<Guarded> guarded;
  bool freed = false;
};

// One file in memory, mapped twice: tensors hold addresses of the one mapping, kernels use the other.
struct Arena {
  char *visible = nullptr, *shadow = nullptr;
  size_t size = 0;

  void map(size_t bytes, int protection) {
    int file = memfd_create("standin", 0);
    if (file < 0 || ftruncate(file, bytes)) throw std::runtime_error("standin: the system gives no memory");
    size = bytes;
    visible = (char*)mmap(nullptr, bytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    shadow = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (visible == MAP_FAILED || shadow == MAP_FAILED)
      throw std::runtime_error("standin: the system gives no memory");
  }
  bool has(const void* at) const { return at >= visible && at < visible + size; }
};

using Ranges = std::map<size_t, size_t>;  // begin -> size

void give(Ranges& ranges, size_t begin, size_t size) {
  auto next = ranges.lower_bound(begin);
  if (next != ranges.end() && begin + size == next->first) size += next->second, next = ranges.erase(next);
  if (next != ranges.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      previous->second += size;
      return;
    }
  }
  ranges[begin] = size;
}

// The smallest range that is large enough.
bool take(Ranges& ranges, size_t size, size_t& begin) {
  auto best = ranges.end();
  for (auto it = ranges.begin(); it != ranges.end(); ++it)
    if (it->second >= size && (best == ranges.end() || it->second < best->second)) best = it;
  if (best == ranges.end()) return false;
  begin = best->first;
  size_t rest = best->second - size;
  ranges.erase(best);
  if (rest) ranges[begin + size] = rest;
  return true;
}

struct Heap {
  Arena arena;
  size_t top = 0;
  std::map<size_t, Block> blocks;  // by where they begin
  std::map<Stream*, Ranges> idle;  // a pool per stream; of nullptr: for any
  std::vector<size_t> returned;    // freed under record_stream, and now no longer in use
  Memory memory;

  std::map<size_t, Block>::iterator find(const void* at) {
    size_t offset = (const char*)at - arena.visible;
    auto it = blocks.upper_bound(offset);
    if (it == blocks.begin() || offset >= std::prev(it)->first + std::prev(it)->second.size)
      throw std::runtime_error("standin: memory is used that nothing has taken, or that was freed");
    return std::prev(it);
  }
  bool place(Stream* pool, size_t size, size_t& begin) {
    if (take(idle[pool], size, begin) || take(idle[nullptr], size, begin)) return true;
    if (top + size > arena.size) return false;
    begin = top;
    top += size;
    memset(arena.shadow + begin, POISON, size);
    return true;
  }
};

struct Device {
  Heap heap;
  std::vector<std::unique_ptr<Stream>> streams;
  size_t next_stream = 1;
};

using Tell = void (*)(const char* kind, const char* text);

struct Core {
  std::mutex lock;
  std::vector<std::unique_ptr<Device>> devices;
  Heap pinned;
  std::vector<Stream*> streams;
  Clock host;  // of all its threads: they take turns, as under Python's lock
  std::set<std::string> ops;
  std::string failure;  // found where nobody could be told: told at the next call
  std::set<size_t> guarded;
  std::map<std::string, int64_t> hidden_waits;
  std::atomic<int> strict{1};
  std::atomic<Tell> tell{nullptr};
};

Core& core() {
  static Core* made = new Core;  // never destroyed: the threads of streams outlive main()
  return *made;
}

thread_local int t_device = 0;
thread_local bool t_deaf = false;
thread_local std::vector<int64_t> t_streams;

size_t setting(const char* name, size_t otherwise) {
  const char* text = getenv(name);
  return text ? std::stoull(text) : otherwise;
}

std::string label(const Stream& s) { return s.name + " of standin:" + std::to_string(s.device); }

Stream* open_stream(Device& device, int index, int64_t number) {
  auto& c = core();
  auto* s = new Stream;
  s->device = index;
  s->number = number;
  s->index = c.streams.size();
  s->name = "stream " + std::to_string(number);
  device.streams.emplace_back(s);
  c.streams.push_back(s);
  std::thread([s] { s->run(); }).detach();
  return s;
}

// ---- The CPU has touched what is not its: say so, then let the next handler print where.

struct sigaction g_before;

void say(const char* text) { (void)!write(2, text, strlen(text)); }

void touched(int signal, siginfo_t* info, void* context) {
  auto& c = core();
  for (auto& device : c.devices)
    if (device->heap.arena.has(info->si_addr)) say("standin: the CPU touched memory of the device\n");
  if (c.pinned.arena.has(info->si_addr))
    say("standin: the CPU touched pinned memory under a copy it has not waited for\n");
  if (g_before.sa_flags & SA_SIGINFO) g_before.sa_sigaction(signal, info, context);
  else if (g_before.sa_handler != SIG_DFL && g_before.sa_handler != SIG_IGN) g_before.sa_handler(signal);
  else {
    sigaction(signal, &g_before, nullptr);
    raise(signal);
  }
}

void start() {
  static std::once_flag once;
  std::call_once(once, [] {
    auto& c = core();
    size_t size = setting("STANDIN_BYTES", 8ull << 30);
    int count = (int)setting("STANDIN_DEVICES", 2);
    for (int i = 0; i < count; i++) {
      c.devices.emplace_back(new Device);
      auto& device = *c.devices.back();
      device.heap.arena.map(size, PROT_NONE);
      device.heap.memory.limit = size;
      open_stream(device, i, 0);
    }
    c.pinned.arena.map(size, PROT_READ | PROT_WRITE);
    struct sigaction action{};
    action.sa_sigaction = touched;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &g_before);
  });
}

Device& device(int index) {
  start();
  auto& devices = core().devices;
  if (index < 0 || index >= (int)devices.size())
    throw std::runtime_error("standin: there is no device " + std::to_string(index));
  return *devices[index];
}

// ---- Clocks. All below is called under the core's lock.

uint64_t tick(Stream& s) {
  auto& clock = s.clock;
  join(clock, core().host);
  if (clock.size() <= s.index) clock.resize(s.index + 1);
  return ++clock[s.index];
}

void split(std::map<size_t, Span>& spans, size_t at) {
  auto it = spans.upper_bound(at);
  if (it == spans.begin()) return;
  --it;
  if (it->first == at || it->second.end <= at) return;
  Span right = it->second;
  it->second.end = at;
  spans.emplace(at, std::move(right));
}

using Problems = std::vector<std::string>;

std::string race(const Use& use, bool write, size_t bytes, const Use& other, const char* does) {
  return "race: " + *use.op + " on " + label(*use.stream) + (write ? " writes " : " reads ") +
         std::to_string(bytes) + " bytes that " + *other.op + " on " + label(*other.stream) + " " + does +
         ", and nothing makes it wait";
}

void check(Block& block, size_t begin, size_t end, bool write, const Use& use, const Clock& clock,
           Problems& problems) {
  auto& spans = block.spans;
  split(spans, begin);
  split(spans, end);
  for (auto it = spans.lower_bound(begin); it != spans.end() && it->first < end; ++it) {
    Span& span = it->second;
    if (!span.write.before(clock)) problems.push_back(race(use, write, end - begin, span.write, "writes"));
    if (!write) continue;
    for (auto& read : span.reads)
      if (!read.before(clock)) problems.push_back(race(use, write, end - begin, read, "reads"));
  }
}

void keep(Block& block, size_t begin, size_t end, bool write, const Use& use, const Clock& clock) {
  auto& spans = block.spans;
  auto from = spans.lower_bound(begin), to = spans.lower_bound(end);
  if (write) {
    spans.erase(from, to);
    spans.emplace(begin, Span{end, use, {}});
    return;
  }
  for (auto it = from; it != to; ++it) {
    std::erase_if(it->second.reads, [&](const Use& read) { return read.before(clock); });
    it->second.reads.push_back(use);
  }
}

// The host may look at pinned memory again once it has waited for the copies. Only whole pages can be kept
// from it.
void protect(Heap& heap, size_t begin, Block& block) {
  mprotect(heap.arena.visible + begin, block.size, PROT_READ | PROT_WRITE);
  for (int protection : {PROT_READ, PROT_NONE})
    for (auto& g : block.guarded)
      if (g.protection == protection) mprotect(heap.arena.visible + g.begin, g.end - g.begin, protection);
  if (block.guarded.empty()) core().guarded.erase(begin);
  else core().guarded.insert(begin);
}

void host_waited(const Clock& clock) {
  auto& c = core();
  join(c.host, clock);
  for (size_t begin : std::set<size_t>(c.guarded)) {
    auto& block = c.pinned.blocks.at(begin);
    if (std::erase_if(block.guarded, [&](const Guarded& g) { return g.use.before(c.host); }))
      protect(c.pinned, begin, block);
  }
}

void guard(size_t begin, Block& block, size_t from, size_t to, bool write, const Use& use) {
  size_t last = begin + block.size;
  size_t low = (from + PAGE - 1) / PAGE * PAGE, high = to + UNIT > last ? last : to / PAGE * PAGE;
  if (low >= high) return;
  block.guarded.push_back({use, low, high, write ? PROT_NONE : PROT_READ});
  protect(core().pinned, begin, block);
}

// What a kernel touches, block by block; what is not ours, as pageable memory, has no block.
template <class F>
void each_block(const std::vector<Access>& accesses, F f) {
  auto& c = core();
  for (auto& access : accesses) {
    if (!access.bytes) continue;
    Heap* heap = &c.pinned;
    for (auto& d : c.devices)
      if (d->heap.arena.has(access.at)) heap = &d->heap;
    if (!heap->arena.has(access.at)) continue;
    size_t begin = (const char*)access.at - heap->arena.visible;
    auto it = heap->find(access.at);
    f(*heap, it->first, it->second, begin, begin + access.bytes, access.write);
  }
}

const std::string* kept(const std::string& op) { return &*core().ops.insert(op).first; }

// ---- Called without the lock: Python is told, which may need its own.

void tell(const char* kind, const std::string& text) {
  if (Tell told = core().tell) told(kind, text.c_str());
}

void raise_failure() {
  std::string failure;
  {
    std::lock_guard lock(core().lock);
    failure.swap(core().failure);
  }
  if (!failure.empty()) throw std::runtime_error("standin: " + failure);
}

void fail_later(const std::string& text) {
  std::lock_guard lock(core().lock);
  if (core().failure.empty()) core().failure = text;
}

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Idle memory of a heap goes back where any stream may take it, once all streams of the device are done.
void collect(Heap& heap) {
  for (size_t begin : heap.returned) {
    auto it = heap.blocks.find(begin);
    heap.memory.active.add(-(int64_t)it->second.size);
    give(heap.idle[it->second.home], begin, it->second.size);
    heap.blocks.erase(it);
  }
  heap.returned.clear();
}

void* taken(Heap& heap, size_t begin, size_t size, size_t requested, Stream* home) {
  auto& block = heap.blocks[begin];
  block.size = size;
  block.requested = requested;
  block.home = home;
  block.spans.emplace(begin, Span{begin + size, {}, {}});
  if (home) block.spans.at(begin).write = {home, tick(*home), kept("allocation")};
  heap.memory.allocated.add(size);
  heap.memory.requested.add(requested);
  heap.memory.active.add(size);
  heap.memory.reserved = heap.top;
  return heap.arena.visible + begin;
}

}  // namespace

void Level::add(int64_t bytes) {
  current += bytes;
  peak = std::max(peak, current);
  (bytes > 0 ? taken : freed) += std::abs(bytes);
  count += bytes > 0 ? 1 : -1;
}

void Mark::reach() {
  {
    std::lock_guard lock(mutex_);
    reached_ms = now_ms();
    reached_ = true;
  }
  changed_.notify_all();
}
void Mark::await() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return reached_; });
}
bool Mark::reached() {
  std::lock_guard lock(mutex_);
  return reached_;
}

void Stream::run() {
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock lock(mutex_);
      busy_ = false;
      changed_.wait(lock, [&] { return !queue_.empty(); });
      work = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
    }
    try {
      work();
    } catch (const std::exception& error) {
      fail_later("a kernel failed on " + label(*this) + ": " + error.what());
    }
  }
}

int device_count() {
  start();
  return (int)core().devices.size();
}
int current_device() { return t_device; }
void set_current_device(int index) {
  device(index);
  t_device = index;
}

Stream& stream(int index, int64_t number) {
  auto& d = device(index);
  std::lock_guard lock(core().lock);
  return *d.streams.at(number);
}
Stream& current_stream(int index) {
  return stream(index, index < (int)t_streams.size() ? t_streams[index] : 0);
}
int64_t exchange_current_stream(int index, int64_t number) {
  t_streams.resize(device_count());
  return std::exchange(t_streams.at(index), number);
}
Stream& new_stream(int index) {
  auto& d = device(index);
  std::lock_guard lock(core().lock);
  if (d.streams.size() < MOST_STREAMS) return *open_stream(d, index, d.streams.size());
  d.next_stream = d.next_stream % (MOST_STREAMS - 1) + 1;
  return *d.streams[d.next_stream];
}
int64_t number_of(const Stream& s) { return s.number; }
int device_of(const Stream& s) { return s.device; }
void name_stream(Stream& s, std::string name) { s.name = std::move(name); }

void enqueue(Stream& s, const std::string& op, const std::vector<Access>& accesses,
             std::function<void()> work) {
  raise_failure();
  Problems problems;
  bool strict = core().strict;
  {
    std::lock_guard lock(core().lock);
    Use use{&s, tick(s), kept(op)};
    each_block(accesses, [&](Heap&, size_t, Block& block, size_t from, size_t to, bool write) {
      check(block, from, to, write, use, s.clock, problems);
    });
    if (problems.empty() || !strict) {
      each_block(accesses, [&](Heap& heap, size_t begin, Block& block, size_t from, size_t to, bool write) {
        keep(block, from, to, write, use, s.clock);
        if (&heap == &core().pinned) guard(begin, block, from, to, write, use);
      });
      s.push(std::move(work));
    }
  }
  for (auto& problem : problems) tell("race", problem);
  if (!problems.empty() && strict) throw std::runtime_error("standin: " + problems[0]);
}

MarkPtr record(Stream& s) {
  auto mark = std::make_shared<Mark>();
  std::lock_guard lock(core().lock);
  join(s.clock, core().host);
  mark->clock = s.clock;
  s.push([mark] { mark->reach(); });
  return mark;
}
void wait(Stream& s, const MarkPtr& mark) {
  std::lock_guard lock(core().lock);
  join(s.clock, mark->clock);
  s.push([mark] { mark->await(); });
}
bool deaf() { return t_deaf; }
bool query(const MarkPtr& mark) {
  if (!mark->reached()) return false;
  std::lock_guard lock(core().lock);
  host_waited(mark->clock);
  return true;
}
bool query(Stream& s) {
  if (!s.idle()) return false;
  std::lock_guard lock(core().lock);
  if (!s.idle()) return false;
  host_waited(s.clock);
  return true;
}

void synchronize(const MarkPtr& mark, const char* what) {
  bool known;  // the host has waited for all of it before, so it does not wait again
  {
    std::lock_guard lock(core().lock);
    Clock both = core().host;
    join(both, mark->clock);
    known = both == core().host;
  }
  if (what && !known) tell("sync", what);
  {
    WithoutPython released;
    mark->await();
  }
  if (what) {
    std::lock_guard lock(core().lock);
    host_waited(mark->clock);
  }
  raise_failure();
}
void synchronize(Stream& s, const char* what) { synchronize(record(s), what); }
void synchronize_device(int index, const char* what) {
  if (what) tell("sync", what);
  std::vector<MarkPtr> marks;
  std::vector<Stream*> streams;
  {
    auto& d = device(index);
    std::lock_guard lock(core().lock);
    for (auto& s : d.streams) streams.push_back(s.get());
  }
  for (auto* s : streams) marks.push_back(record(*s));
  {
    WithoutPython released;
    for (auto& mark : marks) mark->await();
  }
  if (what) {
    std::lock_guard lock(core().lock);
    for (auto& mark : marks) host_waited(mark->clock);
  }
  raise_failure();
}

void* allocate(int index, size_t bytes) {
  auto& heap = device(index).heap;
  size_t size = (bytes + UNIT - 1) / UNIT * UNIT, begin;
  if (!size) return nullptr;
  Stream& home = current_stream(index);
  for (bool again : {false, true}) {
    {
      std::lock_guard lock(core().lock);
      collect(heap);
      if (heap.memory.active.current + (int64_t)size <= heap.memory.limit && heap.place(&home, size, begin))
        return taken(heap, begin, size, bytes, &home);
    }
    if (!again) return_idle_memory(index);
  }
  // As CUDA says it.
  throw OutOfMemory("standin:" + std::to_string(index) + " out of memory. Tried to allocate " +
                    std::to_string(bytes) + " bytes; " + std::to_string(heap.memory.active.current) + " of " +
                    std::to_string(heap.memory.limit) + " taken");
}

void release(void* at) noexcept {
  if (!at) return;
  auto& c = core();
  Problems problems;
  {
    std::lock_guard lock(c.lock);
    auto& heap = c.devices.at(device_at(at))->heap;
    auto it = heap.find(at);
    size_t begin = it->first, size = it->second.size;
    auto& block = it->second;
    Stream* home = block.home;
    join(home->clock, c.host);
    auto problem = [&](const Use& use, const char* does) {
      if (use.before(home->clock) || block.users.count(const_cast<Stream*>(use.stream))) return;
      problems.push_back("early free: " + std::to_string(size) + " bytes go back to " + label(*home) +
                         " while " + *use.op + " on " + label(*use.stream) + " may still " + does);
    };
    for (auto& [from, span] : block.spans) {
      problem(span.write, "write them");
      for (auto& read : span.reads) problem(read, "read them");
    }
    if (!problems.empty() && c.strict && c.failure.empty()) c.failure = problems[0];
    heap.memory.allocated.add(-(int64_t)size);
    heap.memory.requested.add(-(int64_t)block.requested);
    char* memory = heap.arena.shadow + begin;
    block.users.erase(home);
    if (block.users.empty()) {
      home->push([=] { memset(memory, POISON, size); });
      heap.memory.active.add(-(int64_t)size);
      heap.blocks.erase(it);
      give(heap.idle[home], begin, size);
    } else {
      auto left = std::make_shared<std::atomic<int>>((int)block.users.size() + 1);
      block.users.insert(home);
      block.freed = true;
      for (Stream* s : block.users)
        s->push([=, &heap] {
          if (--*left) return;
          memset(memory, POISON, size);
          std::lock_guard lock(core().lock);
          heap.returned.push_back(begin);
        });
    }
  }
  for (auto& p : problems) tell("early free", p);
}

void record_stream(const void* at, Stream& s) {
  std::lock_guard lock(core().lock);
  core().devices.at(device_at(at))->heap.find(at)->second.users.insert(&s);
}

void* allocate_pinned(size_t bytes) {
  start();
  auto& heap = core().pinned;
  std::lock_guard lock(core().lock);
  // Freed memory is taken again once its copies are done: as the cache of pinned memory does it on a GPU.
  for (auto it = heap.blocks.begin(); it != heap.blocks.end();) {
    auto& block = it->second;
    bool done = block.freed;
    for (auto& [from, span] : block.spans)
      for (auto* s : core().streams)
        done = done && ((span.write.stream != s && span.reads.empty()) || s->idle());
    if (!done) {
      ++it;
      continue;
    }
    size_t begin = it->first;
    block.guarded.clear();
    protect(heap, begin, block);
    give(heap.idle[nullptr], begin, block.size);
    heap.memory.active.add(-(int64_t)block.size);
    it = heap.blocks.erase(it);
  }
  size_t size = std::max((bytes + PAGE - 1) / PAGE * PAGE, PAGE), begin;
  if (!heap.place(nullptr, size, begin)) throw OutOfMemory("standin: no more memory can be pinned");
  return taken(heap, begin, size, bytes, nullptr);
}
void release_pinned(void* at) noexcept {
  std::lock_guard lock(core().lock);
  auto& block = core().pinned.find(at)->second;
  block.freed = true;
  core().pinned.memory.allocated.add(-(int64_t)block.size);
  core().pinned.memory.requested.add(-(int64_t)block.requested);
}
bool is_pinned(const void* at) { return core().pinned.arena.has(at); }

int device_at(const void* at) {
  auto& devices = core().devices;
  for (size_t i = 0; i < devices.size(); i++)
    if (devices[i]->heap.arena.has(at)) return (int)i;
  return -1;
}
void* shadow(const void* at) {
  auto& c = core();
  int index = device_at(at);
  auto& arena = index < 0 ? c.pinned.arena : c.devices[index]->heap.arena;
  return arena.has(at) ? arena.shadow + ((const char*)at - arena.visible) : const_cast<void*>(at);
}

void return_idle_memory(int index) {
  auto& d = device(index);
  std::vector<MarkPtr> marks;
  std::vector<Stream*> streams;
  {
    std::lock_guard lock(core().lock);
    for (auto& s : d.streams) streams.push_back(s.get());
  }
  for (auto* s : streams) marks.push_back(record(*s));
  {
    WithoutPython released;
    for (auto& mark : marks) mark->await();
  }
  std::lock_guard lock(core().lock);
  collect(d.heap);
  for (auto& [home, ranges] : d.heap.idle) {
    if (!home) continue;
    for (auto& [begin, size] : ranges) give(d.heap.idle[nullptr], begin, size);
    ranges.clear();
  }
}

Memory memory(int index) {
  auto& heap = device(index).heap;
  std::lock_guard lock(core().lock);
  collect(heap);
  return heap.memory;
}
void reset_peak(int index) {
  auto& heap = device(index).heap;
  std::lock_guard lock(core().lock);
  collect(heap);
  for (Level* level : {&heap.memory.allocated, &heap.memory.requested, &heap.memory.active}) level->peak = level->current;
}

void count_hidden_wait(const std::string& op) {
  std::lock_guard lock(core().lock);
  core().hidden_waits[op]++;
}

}  // namespace standin

// ---- What Python calls, by ctypes. A text that is returned says what went wrong.

using namespace standin;

extern "C" {
void standin_tell(Tell tell) { core().tell = tell; }
// Give the streams some time to end. What still waits for another process is left alone.
void standin_leave(int most_ms) {
  auto idle = [] {
    std::lock_guard lock(core().lock);
    for (auto* s : core().streams)
      if (!s->idle()) return false;
    return true;
  };
  for (int waited = 0; waited < most_ms && !idle(); waited += 5)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
}
void standin_deaf(int on) { t_deaf = on; }
void standin_strict(int on) { core().strict = on; }
void standin_limit(int index, int64_t bytes) {
  device(index).heap.memory.limit = std::min((size_t)bytes, device(index).heap.arena.size);
}
void* standin_shadow(void* at) { return shadow(at); }
void standin_fail(const char* text) { fail_later(text); }
void standin_name(int index, int64_t number, const char* name) { name_stream(stream(index, number), name); }

const char* standin_take_failure() {
  thread_local std::string text;
  text.clear();
  std::lock_guard lock(core().lock);
  text.swap(core().failure);
  return text.c_str();
}
const char* standin_hidden_waits() {
  thread_local std::string text;
  text.clear();
  std::lock_guard lock(core().lock);
  for (auto& [op, count] : core().hidden_waits) text += op + " " + std::to_string(count) + "\n";
  return text.c_str();
}
// A kernel written in Python: `work(id)` runs on the stream.
const char* standin_launch(int index, int64_t number, const char* op, int count, void** at, int64_t* bytes,
                           int* writes, void (*work)(int64_t), int64_t id) {
  thread_local std::string text;
  text.clear();
  std::vector<Access> accesses;
  for (int i = 0; i < count; i++) accesses.push_back({at[i], (size_t)bytes[i], writes[i] != 0});
  try {
    enqueue(stream(index, number), op, accesses, [=] { work(id); });
  } catch (const std::exception& error) {
    text = error.what();
  }
  return text.c_str();
}
}
