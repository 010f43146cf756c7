// What torch's side of the stand-in shares: kernels.cpp has the ops, torch_device.cpp all else.
#pragma once
#include "device.h"

#include <ATen/ATen.h>
#include <ATen/core/Generator.h>

#include <deque>
#include <optional>

namespace standin {

c10::Allocator* allocator();
int index_of(c10::Device device);  // the current one's if it names none
void grow(const c10::Storage& storage, size_t bytes);

class DeviceScope {
 public:
  explicit DeviceScope(int device) : before_(current_device()) { set_current_device(device); }
  ~DeviceScope() { set_current_device(before_); }

 private:
  int before_;
};

// One number per random op: what the CPU's kernel is seeded with. The first one is the seed itself, so that
// it draws what the CPU draws after the same manual_seed().
uint64_t draw(const std::optional<at::Generator>& generator, int device);
at::Generator cpu_generator(const std::optional<at::Generator>& generator, int device);

// For the few kernels that take the CPU's default generator only.
class WithSeed {
 public:
  explicit WithSeed(uint64_t seed);
  ~WithSeed();

 private:
  at::Generator generator_;
  at::Tensor state_;
};

}  // namespace standin
