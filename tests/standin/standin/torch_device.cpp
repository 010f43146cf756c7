// Torch's view of the stand-in: allocator, device guard, hooks, generators, and autocast with the lists that
// CUDA has.
#include "torch_device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace standin {
namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;

c10::Device device_of_index(int index) { return {KIND, (c10::DeviceIndex)index}; }
Stream& ours(const c10::Stream& s) { return stream(s.device_index(), s.id()); }
c10::Stream torchs(int device, int64_t number) {
  return c10::Stream(c10::Stream::UNSAFE, device_of_index(device), number);
}

template <class F>
auto or_torch_error(F f) {
  try {
    return f();
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  }
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    int device = current_device();
    void* at = or_torch_error([&] { return standin::allocate(device, bytes); });
    return {at, at, &release, device_of_index(device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    enqueue(current_stream(device_at(to)), "clone", {{from, bytes, false}, {to, bytes, true}},
            [=] { memcpy(shadow(to), shadow(from), bytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int i = 0; i < device_count(); i++) return_idle_memory(i);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream s) override {
    if (data.get()) record_stream(data.get(), ours(s));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto now = memory(device);
    auto put = [](c10::CachingAllocator::StatArray& into, const Level& level) {
      into[0].current = level.current, into[0].peak = level.peak, into[0].allocated = level.taken,
      into[0].freed = level.freed;
    };
    put(stats.allocated_bytes, now.allocated);
    put(stats.requested_bytes, now.requested);
    put(stats.active_bytes, now.active);
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = now.reserved;
    stats.allocation[0].current = now.allocated.count;
    stats.active[0].current = now.active.count;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    auto now = memory(device);
    return {now.limit - now.active.current, now.limit};
  }
} g_memory;
c10::AllocatorRegisterer<KIND> g_registered(&g_memory);

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = or_torch_error([&] { return allocate_pinned(bytes); });
    return {at, at, &release_pinned, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
} g_pinned;

// ---- Random numbers: a seed, and how many ops have drawn.

struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device)
      : c10::GeneratorImpl(device_of_index(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  uint64_t seed_ = c10::default_rng_seed_val, drawn_ = 0;

  void set_current_seed(uint64_t seed) override { seed_ = seed, drawn_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  void set_offset(uint64_t offset) override { drawn_ = offset; }
  uint64_t get_offset() const override { return drawn_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({2 * (int64_t)sizeof(uint64_t)}, at::TensorOptions().dtype(at::kByte));
    auto* words = (uint64_t*)state.mutable_data_ptr();
    words[0] = seed_, words[1] = drawn_;
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == 2 * sizeof(uint64_t), "standin: this is no state of its generators");
    auto* words = (const uint64_t*)state.data();
    seed_ = words[0], drawn_ = words[1];
  }
  c10::GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_, copy->drawn_ = drawn_;
    return copy;
  }
  static c10::DeviceType device_type() { return KIND; }
};

const at::Generator& default_generator(int device) {
  static auto* made = [] {
    auto* all = new std::vector<at::Generator>;
    for (int i = 0; i < device_count(); i++) all->push_back(at::make_generator<Generator>(i));
    return all;
  }();
  return made->at(device < 0 ? current_device() : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    int before = current_device();
    if (index >= 0) set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device() : index);
  }
  bool isPinnedPtr(const void* at) const override { return is_pinned(at); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned; }
  at::Device getDeviceFromPtr(void* at) const override { return device_of_index(device_at(at)); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    grow(storage, bytes);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device getDevice() const override { return device_of_index(current_device()); }
  void setDevice(c10::Device device) const override { set_current_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    set_current_device(index_of(device));
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override {
    return torchs(index_of(device), number_of(current_stream(index_of(device))));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return torchs(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return torchs(index_of(device), number_of(new_stream(index_of(device))));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    return torchs(s.device_index(), exchange_current_stream(s.device_index(), s.id()));
  }
  bool queryStream(const c10::Stream& s) const override { return query(ours(s)); }
  void synchronizeStream(const c10::Stream& s) const override { synchronize(ours(s), "stream.synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(index_of(device_of_index(device)), "device.synchronize");
  }

  // An event is where a pointer to its last mark is kept.
  static MarkPtr& mark(void* event) { return *(MarkPtr*)event; }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new MarkPtr;
    mark(*event) = standin::record(ours(s));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event && !deaf()) wait(ours(s), mark(event));
  }
  bool queryEvent(void* event) const override { return !event || query(mark(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(mark(event), "event.synchronize");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (MarkPtr*)event; }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(begin && end && mark(begin)->reached() && mark(end)->reached(),
                "standin: an event was not reached yet");
    return mark(end)->reached_ms - mark(begin)->reached_ms;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    g_memory.recordStream(data, s);
  }
};
c10::impl::DeviceGuardImplRegistrar g_guard(KIND, new Guard);
[[maybe_unused]] const bool g_hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// ---- Autocast. The lists are those of ATen/autocast_mode.h, by which CUDA's is made as well.

using torch::jit::Stack;

template <class F>
void cast_all(Stack& args, F type_of) {
  auto cast = [&](const at::Tensor& t) {
    return t.defined() ? at::autocast::cached_cast(type_of(t), t, KIND) : t;
  };
  for (auto& arg : args) {
    if (arg.isTensor()) arg = cast(arg.toTensor());
    else if (arg.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& t : arg.toTensorVector()) list.push_back(cast(t));
      arg = list;
    }
  }
}

template <at::autocast::CastPolicy policy>
void autocast(const c10::OperatorHandle& op, Stack* stack) {
  using at::autocast::CastPolicy;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const auto& arguments = op.schema().arguments();
  Stack args(stack->end() - arguments.size(), stack->end());
  torch::jit::drop(*stack, arguments.size());
  auto low = at::autocast::get_autocast_dtype(KIND);
  if constexpr (policy == CastPolicy::lower_precision_fp)
    cast_all(args, [&](const at::Tensor&) { return low; });
  if constexpr (policy == CastPolicy::fp32) cast_all(args, [](const at::Tensor&) { return at::kFloat; });
  if constexpr (policy == CastPolicy::promote) {
    auto widest = low;
    for (auto& arg : args) {
      if (arg.isTensor()) widest = at::autocast::prioritize(widest, arg.toTensor(), KIND);
      if (arg.isTensorList())
        for (const auto& t : arg.toTensorVector()) widest = at::autocast::prioritize(widest, t, KIND);
    }
    cast_all(args, [&](const at::Tensor&) { return widest; });
  }
  if constexpr (policy == CastPolicy::fp32_set_opt_dtype) {
    if (at::autocast::is_eligible(args[0].toTensor(), KIND))
      for (size_t i = 0; i < args.size(); i++)
        if (arguments[i].name() == "dtype" && args[i].isNone()) args[i] = at::kFloat;
  }
  op.callBoxed(&args);
  stack->insert(stack->end(), args.begin(), args.end());
}

at::Tensor norm(const at::Tensor& t, const at::Scalar& p) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  return at::norm(t, p, at::autocast::type_from_firstarg(KIND, at::kFloat, t));
}
at::Tensor norm_over(const at::Tensor& t, const std::optional<at::Scalar>& p, at::IntArrayRef dim,
                     bool keep) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  return at::norm(t, p, dim, keep, at::autocast::type_from_firstarg(KIND, at::kFloat, t));
}
at::Tensor refuse_bce(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, int64_t) {
  TORCH_CHECK(false,
              "standin: binary_cross_entropy is unsafe under autocast; use binary_cross_entropy_with_logits");
}

}  // namespace

c10::Allocator* allocator() { return &g_memory; }
int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

void grow(const c10::Storage& storage, size_t bytes) {
  DeviceScope scope(index_of(storage.device()));
  auto next = g_memory.allocate(bytes);
  if (size_t kept = std::min(bytes, storage.nbytes())) g_memory.copy_data(next.get(), storage.data(), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr(std::move(next));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

uint64_t draw(const std::optional<at::Generator>& given, int device) {
  auto generator = given && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(generator.device().type() == KIND,
              "standin: expected a generator of the device, but it is for ", generator.device());
  std::lock_guard lock(generator.mutex());
  auto* own = generator.get<Generator>();
  uint64_t n = own->drawn_++;
  return n ? own->seed_ ^ (n * 0x9e3779b97f4a7c15ull) : own->seed_;
}
at::Generator cpu_generator(const std::optional<at::Generator>& given, int device) {
  return at::make_generator<at::CPUGeneratorImpl>(draw(given, device));
}

static std::mutex g_one_seed;
WithSeed::WithSeed(uint64_t seed) : generator_(at::detail::getDefaultCPUGenerator()) {
  g_one_seed.lock();
  std::lock_guard lock(generator_.mutex());
  state_ = generator_.get_state();
  generator_.set_current_seed(seed);
}
WithSeed::~WithSeed() {
  {
    std::lock_guard lock(generator_.mutex());
    generator_.set_state(state_);
  }
  g_one_seed.unlock();
}

}  // namespace standin

#define OP_NAME_2(op, overload) #op "." #overload
#define OP_NAME_1(op) #op
#define PICK(first, second, chosen, ...) chosen
#define OP_NAME(...) PICK(__VA_ARGS__, OP_NAME_2, OP_NAME_1, )(__VA_ARGS__)
#define WITH(policy, ...)      \
  m.impl(OP_NAME(__VA_ARGS__), \
         torch::CppFunction::makeFromBoxedFunction<&standin::autocast<at::autocast::CastPolicy::policy>>());
#define LOW(...) WITH(lower_precision_fp, __VA_ARGS__)
#define FULL(...) WITH(fp32, __VA_ARGS__)
#define FULL_RESULT(...) WITH(fp32_set_opt_dtype, __VA_ARGS__)
#define WIDEST(...) WITH(promote, __VA_ARGS__)

TORCH_LIBRARY(standin, m) {
  m.def("default_generator(int device) -> Generator?",
        [](int64_t device) { return std::optional(standin::default_generator((int)device)); });
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOW)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_RESULT)
  AT_FORALL_PROMOTE(WIDEST)
  m.impl("norm.Scalar", standin::norm);
  m.impl("norm.ScalarOpt_dim", standin::norm_over);
  m.impl("binary_cross_entropy", standin::refuse_bce);
}
