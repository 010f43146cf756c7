// The stand-in accelerator without torch: memory that the CPU cannot touch, streams that are threads, and a
// clock per stream that knows what is ordered behind what.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace standin {

// Of every stream: how many of its operations are known to be done before whatever carries this clock.
using Clock = std::vector<uint64_t>;

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A point in the order of a stream. An event of torch's is the mark that it recorded last.
class Mark {
 public:
  Clock clock;
  double reached_ms = 0;  // set before anyone sees it as reached
  void reach();
  void await();
  bool reached();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
};
using MarkPtr = std::shared_ptr<Mark>;

class Stream;

struct Access {
  const void* at;
  size_t bytes;
  bool write;
};

// Devices and their streams. A stream is known by its device and number; number 0 is the default one.
int device_count();
int current_device();
void set_current_device(int device);
Stream& stream(int device, int64_t number);
Stream& current_stream(int device);
Stream& new_stream(int device);
int64_t exchange_current_stream(int device, int64_t number);
int64_t number_of(const Stream& stream);
int device_of(const Stream& stream);
void name_stream(Stream& stream, std::string name);

// Enqueue work that touches memory. Throws, before it is enqueued, if an access is not ordered behind the
// last ones of other streams; also if an earlier kernel failed, or memory was freed too early.
void enqueue(Stream& stream, const std::string& op, const std::vector<Access>& accesses,
             std::function<void()> work);
MarkPtr record(Stream& stream);
void wait(Stream& stream, const MarkPtr& mark);
bool deaf();  // whether events are to hold up nothing that this thread tells to wait, to see whether that is
              // reported
bool query(const MarkPtr& mark);
bool query(Stream& stream);

// The host waits. `what` is counted, with the line of Python that asked; nullptr: this wait is the stand-in's
// own, so it is not counted and orders nothing.
void synchronize(const MarkPtr& mark, const char* what);
void synchronize(Stream& stream, const char* what);
void synchronize_device(int device, const char* what);

// Memory of a device is taken and freed in the order of the stream that was current when it was taken.
void* allocate(int device, size_t bytes);
void release(void* at) noexcept;
void record_stream(const void* at, Stream& stream);
void* allocate_pinned(size_t bytes);
void release_pinned(void* at) noexcept;
bool is_pinned(const void* at);
int device_at(const void* at);  // -1: not a device's
void* shadow(const void* at);   // the same memory, where kernels may touch it; for any other address itself
void return_idle_memory(int device);

struct Level {
  int64_t current = 0, peak = 0, taken = 0, freed = 0, count = 0;
  void add(int64_t bytes);
};
struct Memory {
  Level allocated, requested, active;  // requested: before rounding.  active: also what was freed, but another stream may still use (record_stream)
  int64_t reserved = 0, limit = 0;
};
Memory memory(int device);
void reset_peak(int device);

void count_hidden_wait(const std::string& op);

}  // namespace standin
