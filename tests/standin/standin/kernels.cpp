// Operations of the stand-in: results get the shapes that the op gives meta tensors; the CPU's kernel
// computes them later, on the stream, from plain addresses, so that nothing but the program keeps memory
// alive.
#include "torch_device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace standin {
namespace {

using torch::jit::Stack;

bool here(const at::Tensor& t) { return t.defined() && t.is_privateuseone(); }

// ---- What a kernel sees: the same bytes as a tensor of the CPU.

class Shadows {
 public:
  at::Tensor operator()(const at::Tensor& t) {
    auto& made = tensors_[t.unsafeGetTensorImpl()];
    if (made.defined()) return made;
    const auto& storage = t.storage();
    auto& bytes = storages_[storage.unsafeGetStorageImpl()];
    if (!bytes)
      bytes = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                           c10::DataPtr(shadow(storage.data()), c10::kCPU), nullptr, false);
    made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(bytes),
                                                    c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    return made;
  }

 private:
  std::unordered_map<c10::TensorImpl*, at::Tensor> tensors_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

Access access(const at::Tensor& t, bool write) {
  if (!t.numel()) return {nullptr, 0, write};
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
  return {t.const_data_ptr(), (size_t)(last + 1) * t.element_size(), write};
}

at::Tensor new_tensor(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype, int device) {
  DeviceScope scope(device);
  return at::detail::empty_strided_generic(size, stride, allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

// Of what an op says about shapes, such as a warning that it resizes, the program has no use.
static c10::WarningHandler* silent() {
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  static Silent handler;
  return &handler;
}

struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_python{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  at::NoGradGuard no_grad;
  c10::WarningUtils::WarningHandlerGuard quiet{silent()};
};

template <class F>
c10::IValue map_tensors(const c10::IValue& v, F f) {
  if (v.isTensor()) return v.toTensor().defined() ? c10::IValue(f(v.toTensor())) : v;
  if (v.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& t : v.toTensorVector()) list.push_back(f(t));
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> t : v.toOptionalTensorList())
      list.push_back(t && t->defined() ? std::optional<at::Tensor>(f(*t)) : std::nullopt);
    return list;
  }
  return v;
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), schema_(op.schema()) {
    size_t n = schema_.arguments().size();
    args_.assign(stack->end() - n, stack->end());
    torch::jit::drop(*stack, n);
    name_ = schema_.name().substr(schema_.name().find("::") + 2);
    for (const auto& result : schema_.returns())
      TORCH_CHECK(!result.alias_info() || result.alias_info()->isWrite(), "standin: ", name_,
                  " gives a view and is not known here");
    by_data_ = reads_data();
    find_device();
  }

  void run(Stack* results) {
    Stack shapes;
    bool known = !by_data_ && (!needs_shapes() || infer(shapes));
    prepare();
    if (known) run_later(shapes, results);
    else run_now(results);
  }

 private:
  bool writes(size_t i) const {
    auto* alias = schema_.arguments()[i].alias_info();
    return alias && alias->isWrite();
  }

  // Whether a GPU's host has to know numbers of the device: for the shape of the result, or as the result.
  bool reads_data() const {
    if (op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output)) return true;
    for (const auto& result : schema_.returns())
      if (!result.alias_info() && result.type()->str().find("Tensor") == std::string::npos) return true;
    for (size_t i = 0; i < args_.size(); i++) {
      if (!args_[i].isOptionalTensorList()) continue;
      if (args_.size() > 2 && args_[2].isTensor() && args_[2].toTensor().numel() == 1)
        continue;  // a masked fill
      for (const std::optional<at::Tensor> t : args_[i].toOptionalTensorList())
        if (t && t->defined() && t->scalar_type() == at::kBool) return true;
    }
    return false;
  }

  void find_device() {
    auto indices =
        name_ == "index" || name_ == "index_put_" || name_ == "_index_put_impl_" || name_ == "index_put";
    const at::Tensor* first = nullptr;
    for (size_t i = 0; i < args_.size(); i++) {
      if (args_[i].isDevice() && device_ < 0) device_ = index_of(args_[i].toDevice());
      map_tensors(args_[i], [&](const at::Tensor& t) {
        if (here(t)) {
          TORCH_CHECK(!first || t.device() == first->device(), "standin: expected all tensors of ", name_,
                      " to be on the same device, but found ", first->device(), " and ", t.device());
          if (!first) first = &keep_.emplace_back(t);
        } else {
          TORCH_CHECK((t.is_cpu() && t.dim() == 0) || (indices && !args_[i].isTensor()),
                      "standin: expected all tensors of ", name_, " to be on the device, but ",
                      schema_.arguments()[i].name(), " is on ", t.device());
        }
        return t;
      });
    }
    if (first) device_ = index_of(first->device());
    if (device_ < 0) device_ = current_device();
  }

  // An op that only writes its arguments in place needs no shapes; `out` may have to grow.
  bool needs_shapes() const {
    bool in_place = !name_.empty() && name_.back() == '_';
    return !schema_.returns().empty() && !in_place;
  }

  bool infer(Stack& shapes) {
    metas_.clear();
    BelowAutograd below;
    auto meta = [&](const at::Tensor& t) -> at::Tensor {
      if (t.unsafeGetTensorImpl()->is_wrapped_number()) return t;
      auto& m = metas_[t.unsafeGetTensorImpl()];
      if (!m.defined())
        m = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta).pinned_memory(false));
      return m;
    };
    try {
      for (auto& arg : args_)
        shapes.push_back(arg.isDevice()      ? c10::IValue(c10::Device(at::kMeta))
                         : arg.isGenerator() ? c10::IValue()
                                             : map_tensors(arg, meta));
      op_.callBoxed(&shapes);
    } catch (const std::exception&) {
      return false;  // either nobody has written its shapes down, or the call is wrong: the CPU's kernel says
                     // how
    }
    for (auto& shape : shapes)
      if (!shape.isNone() && !shape.isTensorList() &&
          !(shape.isTensor() && (!shape.toTensor().defined() || shape.toTensor().is_meta())))
        return false;
    for (size_t i = 0; i < args_.size(); i++)
      if (writes(i) && args_[i].isTensor() && here(args_[i].toTensor())) {
        const auto& t = args_[i].toTensor();
        const auto& m = metas_.at(t.unsafeGetTensorImpl());
        if (m.sizes() != t.sizes()) resize(t, m.sizes(), m.strides());
      }
    return true;
  }

  void prepare() {
    for (size_t i = 0; i < args_.size(); i++) {
      auto& arg = args_[i];
      if (arg.isGenerator() ||
          (arg.isNone() && schema_.arguments()[i].type()->str().find("Generator") != std::string::npos)) {
        cpu_.push_back(cpu_generator(
            arg.isNone() ? std::nullopt : std::optional<at::Generator>(arg.toGenerator()), device_));
        seeded_ = true;
        continue;
      }
      if (arg.isDevice()) {
        cpu_.push_back(c10::Device(at::kCPU));
        continue;
      }
      cpu_.push_back(map_tensors(arg, [&](const at::Tensor& t) -> at::Tensor {
        if (here(t)) {
          accesses_.push_back(access(t, writes(i)));
          return shadows_(t);
        }
        auto number = t.clone();
        number.unsafeGetTensorImpl()->set_wrapped_number(t.unsafeGetTensorImpl()->is_wrapped_number());
        return number;
      }));
    }
    if (!seeded_ && op_.hasTag(at::Tag::nondeterministic_seeded)) seed_ = draw(std::nullopt, device_);
  }

  std::function<Stack()> kernel() {
    return [op = op_, args = cpu_, seed = seed_, name = name_]() mutable {
      BelowAutograd below;
      try {
        if (!seed) {
          op.callBoxed(&args);
          return std::move(args);
        }
        WithSeed seeded(*seed);
        op.callBoxed(&args);
        return std::move(args);
      } catch (const std::exception& error) {
        throw std::runtime_error(name + ": " + error.what());
      }
    };
  }

  c10::IValue written(const c10::AliasInfo* alias) {
    for (size_t i = 0; i < args_.size(); i++) {
      auto* other = schema_.arguments()[i].alias_info();
      if (other && other->beforeSets() == alias->beforeSets()) return args_[i];
    }
    TORCH_CHECK(false, "standin: ", name_, " returns an argument that it does not have");
  }

  void run_later(const Stack& shapes, Stack* results) {
    std::vector<std::pair<size_t, std::vector<at::Tensor>>> outputs;
    auto fresh = [&](const at::Tensor& m) {
      auto t = new_tensor(m.sizes(), m.strides(), m.scalar_type(), device_);
      accesses_.push_back(access(t, true));
      outputs.back().second.push_back(shadows_(t));
      keep_.push_back(t);
      return t;
    };
    for (size_t i = 0; i < schema_.returns().size(); i++) {
      if (auto* alias = schema_.returns()[i].alias_info()) {
        results->push_back(written(alias));
        continue;
      }
      outputs.emplace_back(i, std::vector<at::Tensor>());
      results->push_back(map_tensors(shapes[i], fresh));
    }
    enqueue(current_stream(device_), name_, accesses_, [compute = kernel(), outputs]() mutable {
      auto computed = compute();
      BelowAutograd below;
      for (auto& [i, tensors] : outputs) {
        if (tensors.empty()) continue;
        if (computed[i].isTensor()) tensors[0].copy_(computed[i].toTensor());
        else
          for (size_t k = 0; k < tensors.size(); k++) tensors[k].copy_(computed[i].toTensorVector()[k]);
      }
    });
  }

  // Where a shape depends on data, a GPU makes the host wait, too: that is counted. Where only nobody has
  // written the shapes down, the wait is ours: it orders nothing.
  void run_now(Stack* results) {
    std::map<size_t, at::Tensor> grown;
    for (size_t i = 0; i < args_.size(); i++)
      if (writes(i) && args_[i].isTensor() && here(args_[i].toTensor()) && !args_[i].toTensor().numel()) {
        grown[i] = at::empty({0}, args_[i].toTensor().options().device(at::kCPU));
        cpu_[i] = grown[i];
      }
    auto computed = std::make_shared<Stack>();
    auto failed = std::make_shared<std::string>();
    Stream& s = current_stream(device_);
    enqueue(s, name_, accesses_, [compute = kernel(), computed, failed]() mutable {
      try {
        *computed = compute();
      } catch (const std::exception& error) {
        *failed = error.what();
      }
    });
    if (!by_data_) count_hidden_wait(name_);
    synchronize(s, by_data_ ? name_.c_str() : nullptr);
    TORCH_CHECK(failed->empty(), *failed);
    auto fresh = [&](const at::Tensor& t) {
      auto copy = new_tensor(t.sizes(), t.strides(), t.scalar_type(), device_);
      fill(s, copy, t);
      return copy;
    };
    for (auto& [i, t] : grown) {
      resize(args_[i].toTensor(), t.sizes(), std::nullopt);
      fill(s, args_[i].toTensor(), t);
    }
    for (size_t i = 0; i < computed->size(); i++) {
      auto* alias = schema_.returns()[i].alias_info();
      results->push_back(alias ? written(alias) : map_tensors((*computed)[i], fresh));
    }
  }

  void fill(Stream& s, const at::Tensor& to, const at::Tensor& from) {
    enqueue(s, name_, {access(to, true)}, [target = Shadows()(to), from]() mutable {
      BelowAutograd below;
      target.copy_(from);
    });
  }

 public:
  static void resize(const at::Tensor& t, at::IntArrayRef size, at::OptionalIntArrayRef stride) {
    auto* impl = t.unsafeGetTensorImpl();
    if (stride) impl->set_sizes_and_strides(size, *stride);
    else impl->set_sizes_contiguous(size);
    size_t bytes = t.numel() ? at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size(),
                                                                t.storage_offset())
                             : 0;
    if (bytes > t.storage().nbytes()) grow(t.storage(), bytes);
  }

 private:
  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  std::string name_;
  int device_ = -1;
  Stack args_, cpu_;
  std::vector<Access> accesses_;
  std::deque<at::Tensor> keep_;
  Shadows shadows_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> metas_;
  bool by_data_ = false, seeded_ = false;
  std::optional<uint64_t> seed_;
};

void any_op(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(stack); }

void convolution(const c10::OperatorHandle&, Stack* stack) {
  any_op(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", ""), stack);
}
void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  auto first =
      stack->end() - 10;  // grad_output, input, weight; then the sizes of the bias, which this op lacks
  stack->insert(first + 3, c10::IValue(c10::List<int64_t>({first->toTensor().size(1)})));
  any_op(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", ""), stack);
}

// ---- Tensors without a kernel: taking memory, and other views of it.

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  DeviceScope scope(index_of(device.value_or(at::Device(at::kPrivateUse1))));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  return new_tensor(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                    c10::dtype_or_default(dtype), index_of(device.value_or(at::Device(at::kPrivateUse1))));
}
at::Tensor as_strided(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}
at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef size) {
  return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor reshape_alias(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
const at::Tensor& resize_(const at::Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  Call::resize(t, C10_AS_INTARRAYREF_SLOW(size), std::nullopt);
  return t;
}
at::Tensor& set_to(at::Tensor& t, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                   c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(t, std::move(source), offset.guard_int(__FILE__, __LINE__),
                                      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor& set_to_all(at::Tensor& t, at::Storage source) {
  int64_t count = source.nbytes() / t.element_size();
  return at::native::set_storage_cpu_(t, std::move(source), 0, {count}, {});
}
at::Tensor& set_to_tensor(at::Tensor& t, const at::Tensor& source) {
  return at::native::set_storage_cpu_(t, source.storage(), source.storage_offset(), source.sizes(),
                                      source.strides());
}

// ---- Copies. Only those to and from pinned memory need not make the host wait.

void copy_here(const at::Tensor& from, const at::Tensor& to) {
  Stream& s = current_stream(from.get_device());
  bool two = from.device() != to.device();
  Stream& other = current_stream(to.get_device());
  if (two) wait(s, record(other));  // as CUDA does it: behind all that either device was given before
  Shadows shadows;
  enqueue(s, "copy_", {access(from, false), access(to, true)},
          [a = shadows(from), b = shadows(to)]() mutable {
            BelowAutograd below;
            b.copy_(a);
          });
  if (two) wait(other, record(s));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!from.numel()) return to;
  if (here(from) && here(to)) {
    copy_here(from, to);
    return to;
  }
  bool away = here(from);
  const at::Tensor& host = away ? to : from;
  TORCH_CHECK(host.is_cpu(), "standin: no copies between ", from.device(), " and ", to.device());
  bool dense = host.is_non_overlapping_and_dense() && (away || from.scalar_type() == to.scalar_type());
  bool async = non_blocking && dense && is_pinned(host.const_data_ptr());
  Shadows shadows;
  auto a = shadows(from), b = shadows(to);  // of pageable memory: the same address, and the host waits
  Stream& s = current_stream(away ? from.get_device() : to.get_device());
  enqueue(s, "copy_", {access(from, false), access(to, true)}, [a, b]() mutable {
    BelowAutograd below;
    b.copy_(a);
  });
  if (!async) synchronize(s, away ? "copy to the host" : "copy from pageable memory");
  return to;
}
at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar item(const at::Tensor& t) {
  Shadows shadows;
  auto value = shadows(t);
  auto number = std::make_shared<at::Scalar>();
  Stream& s = current_stream(t.get_device());
  enqueue(s, "item", {access(t, false)}, [value, number] {
    BelowAutograd below;
    *number = value.item();
  });
  synchronize(s, "item");
  return *number;
}
void record_stream_of(at::Tensor& t, c10::Stream s) {
  if (t.storage().data()) record_stream(t.storage().data(), stream(s.device_index(), s.id()));
}

// The CPU's has no argument for a generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& t, double p, std::optional<bool> train) {
  if (!t.numel() || (train.has_value() && !*train) || p == 0)
    return {t.clone(), at::ones_like(t, t.options().dtype(at::kBool))};
  double scale = p == 1 ? 0.0 : 1.0 / (1.0 - p);
  auto mask = at::empty_like(t, t.options().dtype(at::kBool));
  mask.bernoulli_(1 - p);
  return {t.mul(mask).mul_(scale), mask};
}
// The CPU's fused kernel, where the CPU takes it.
int64_t attention_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool grouped) {
  return at::native::_fused_sdp_choice_cpp(q, k, v, mask, dropout, causal, scale, grouped);
}

}  // namespace
}  // namespace standin

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &standin::attention_kernel)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&standin::any_op>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using namespace standin;
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", standin::view);
  m.impl("unfold", at::native::unfold);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_to);
  m.impl("set_.source_Storage", set_to_all);
  m.impl("set_.source_Tensor", set_to_tensor);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream_of);
  m.impl("native_dropout", native_dropout);
  m.impl("_fused_sdp_choice", attention_kernel);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&standin::convolution>());
  m.impl("convolution_backward_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&standin::convolution_backward>());
  // Of these torch has kernels for any device, made of other ops; they give other bits than the CPU's.
  for (auto* op : {"native_layer_norm", "native_layer_norm_backward", "native_group_norm",
                   "native_group_norm_backward", "native_batch_norm", "native_batch_norm_backward"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&standin::any_op>());
}
