#include "dispatch.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <shared_mutex>
#include <unordered_map>

#include "call_key.h"
#include "kernels.h"
#include "timing.h"
#include "torch_abi.h"
#include "values.h"

namespace maya {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::TensorImpl;
using torch::jit::Stack;

std::atomic<int64_t> call_count{0}, distinct_count{0};
PythonSide* python = nullptr;  // not destroyed at exit, because the interpreter is gone by then

// ---- what a call does, computed once for each key ----
struct Output {
  enum Kind : uint8_t { SameAsInput, ViewOfInput, New, Undefined, Constant };
  Kind kind = New;
  int input = -1;
  at::DimVector sizes = {}, strides = {};
  int64_t offset = 0;  // of a view, relative to its input's
  at::ScalarType dtype = at::kFloat;
  IValue constant = {};
};
struct Return {
  bool list = false;
  std::vector<Output> outputs;
};
struct Resize {
  int input;
  at::DimVector sizes, strides;
};

struct Entry {
  std::vector<int64_t> key;
  std::vector<Return> returns;
  std::vector<Resize> resizes;
  Plan plan;
  NewTensors made;
  bool follows_unknown = false;
  std::atomic<bool> host_cannot{false};
};

class Entries {
 public:
  Entry* find(uint64_t hash, const std::vector<int64_t>& key) {
    std::shared_lock lock(mutex_);
    auto [first, last] = by_hash_.equal_range(hash);
    for (; first != last; ++first)
      if (first->second->key == key) return first->second.get();
    return nullptr;
  }
  Entry* insert(uint64_t hash, std::unique_ptr<Entry> entry) {
    std::unique_lock lock(mutex_);
    auto [first, last] = by_hash_.equal_range(hash);  // another thread may have inserted it first
    for (; first != last; ++first)
      if (first->second->key == entry->key) return first->second.get();
    distinct_count++;
    return by_hash_.emplace(hash, std::move(entry))->second.get();
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_multimap<uint64_t, std::unique_ptr<Entry>> by_hash_;
};

class RecordedCalls {  // calls through record_call instead of the dispatcher
 public:
  Entries* of(const std::string& name) {
    std::lock_guard lock(mutex_);
    auto& slot = by_name_[name];
    if (!slot) slot = std::make_unique<Entries>();
    return slot.get();
  }
  void clear() {
    std::lock_guard lock(mutex_);
    by_name_.clear();
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, std::unique_ptr<Entries>> by_name_;
};
RecordedCalls& recorded_calls() {
  static auto* instance = new RecordedCalls;
  return *instance;
}

// ---- calling the Meta kernel ----
struct MetaClones {  // meta tensors that share memory where the originals do
  std::unordered_map<const void*, c10::Storage> storages;
  std::vector<at::Tensor> clones;

  at::Tensor clone(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.layout() != at::kStrided) TORCH_CHECK_NOT_IMPLEMENTED(false, "sparse tensor");
    if (tensor.is_cpu() && tensor.dim() == 0) {
      clones.push_back(tensor);
      return tensor;
    }
    auto* impl = tensor.unsafeGetTensorImpl();
    const void* storage = impl->unsafe_storage().unsafeGetStorageImpl();
    auto [found, inserted] = storages.try_emplace(storage);
    if (inserted) {
      auto* memory = c10::GetAllocator(c10::DeviceType::Meta);
      const size_t bytes = impl->unsafe_storage().nbytes();
      found->second = c10::Storage(c10::Storage::use_byte_size_t(), bytes, memory->allocate(bytes), memory, true);
    }
    auto made = at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, c10::Storage(found->second),
                                                    DispatchKeySet(DispatchKey::Meta), impl->dtype());
    auto* meta = made.unsafeGetTensorImpl();
    meta->set_sizes_and_strides(impl->sizes(), impl->strides(), impl->storage_offset());
    if (impl->is_wrapped_number()) meta->set_wrapped_number(true);
    clones.push_back(made);
    return made;
  }

  IValue clone(const IValue& value) {
    if (value.isTensor()) return clone(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(clone(tensor));
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(c10::DeviceType::Meta);
    if (value.isGenerator()) return IValue();
    if (value.isList()) {
      bool tensors = false;
      for (const auto& item : value.toListRef()) tensors = tensors || item.isTensor();
      if (!tensors) return value;
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& item : value.toListRef())
        list.push_back(item.isNone() ? std::optional<at::Tensor>() : clone(item.toTensor()));
      return list;
    }
    return value;
  }

  Output describe(const at::Tensor& result) const {
    Output output;
    if (!result.defined()) {
      output.kind = Output::Undefined;
      return output;
    }
    for (size_t i = 0; i < clones.size(); i++)
      if (clones[i].unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) {
        output.kind = Output::SameAsInput;
        output.input = i;
        return output;
      }
    output.sizes = at::DimVector(result.sizes());
    output.strides = at::DimVector(result.strides());
    output.dtype = result.scalar_type();
    const auto* storage = result.storage().unsafeGetStorageImpl();
    for (size_t i = 0; i < clones.size(); i++) {
      if (!clones[i].is_meta() || clones[i].storage().unsafeGetStorageImpl() != storage) continue;
      output.kind = Output::ViewOfInput;
      output.input = i;
      output.offset = result.storage_offset() - clones[i].storage_offset();
      return output;
    }
    return output;
  }
};

// ---- switches of torch ----
struct Setting {
  const char* name;
  bool (*read)(const at::Context&);
};
bool products_use_tf32(const at::Context& context) {
  return context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) == at::Float32Precision::TF32;
}
constexpr Setting kSettings[] = {
    {"deterministic", [](const at::Context& c) { return c.deterministicAlgorithms(); }},
    {"tf32_products", &products_use_tf32},
    {"tf32_cudnn", &torch_abi::convolutions_use_tf32},
    {"half_reductions",
     [](const at::Context& c) {
       return c.allowFP16ReductionCuBLAS() != at::CuBLASReductionOption::DisallowReducedPrecisionAllowSplitK;
     }},
    {"bfloat_reductions",
     [](const at::Context& c) {
       return c.allowBF16ReductionCuBLAS() != at::CuBLASReductionOption::DisallowReducedPrecisionAllowSplitK;
     }},
    {"cudnn", [](const at::Context& c) { return c.userEnabledCuDNN(); }},
    {"benchmark", [](const at::Context& c) { return c.benchmarkCuDNN(); }},
    {"sdpa_cudnn_first", [](const at::Context&) { return !config().deprioritize_cudnn_attention; }},
    {"cudnn_deterministic", [](const at::Context& c) { return c.deterministicCuDNN(); }},
    {"sdpa_flash", [](const at::Context& c) { return c.userEnabledFlashSDP(); }},
    {"sdpa_efficient", [](const at::Context& c) { return c.userEnabledMemEfficientSDP(); }},
    {"sdpa_cudnn", [](const at::Context& c) { return c.userEnabledCuDNNSDP(); }},
    {"sdpa_math", [](const at::Context& c) { return c.userEnabledMathSDP(); }},
};
uint64_t default_settings = 0;

// Only ops that multiply depend on more than one switch, and reading all of them takes longer than looking up a call.
uint64_t settings_of(bool multiplies) {
  const auto& context = at::globalContext();
  if (!multiplies) return (default_settings & ~1ull) | uint64_t(kSettings[0].read(context));
  uint64_t bits = 0;
  for (size_t i = 0; i < std::size(kSettings); i++) bits |= uint64_t(kSettings[i].read(context)) << i;
  return bits;
}

// CUDA kernels reject tensors of different devices; torch's Meta kernels accept them.
void check_same_device(const c10::FunctionSchema& schema, const std::vector<TensorImpl*>& tensors) {
  if (op_values(schema.name()).mixes_devices) return;
  const TensorImpl* first = nullptr;
  for (const auto* tensor : tensors)
    if (tensor->is_cuda()) {
      first = tensor;
      break;
    }
  if (!first) return;
  for (const auto* tensor : tensors) {
    const bool scalar = tensor->is_cpu() && tensor->dim() == 0;
    TORCH_CHECK(scalar || tensor->device() == first->device(),
                "Expected all tensors to be on the same device, but found at least two devices, ", first->device(),
                " and ", tensor->device(), "!");
  }
}

[[noreturn]] void refuse(const std::string& op, const std::string& reason) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, python ? python->no_rule_message(op, reason) : "no rule for " + op);
}

std::string op_name(const c10::FunctionSchema& schema) {
  return schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name();
}

// In-place ops of one tensor (normal_, fill_ ...) do not change its metadata. Their Meta kernels are Python, and slow
// to load.
bool only_changes_self(const c10::FunctionSchema& schema, at::ArrayRef<IValue> arguments) {
  if (schema.returns().size() != 1 || !schema.returns()[0].alias_info() || !schema.returns()[0].alias_info()->isWrite())
    return false;
  if (arguments.empty() || !arguments[0].isTensor() || !schema.name().ends_with("_")) return false;
  for (size_t i = 1; i < arguments.size(); i++)
    if (arguments[i].isTensor() || arguments[i].isTensorList() || arguments[i].isList()) return false;
  return true;
}

std::unique_ptr<Entry> ask_meta(const c10::OperatorHandle& op, const std::string& name,
                                at::ArrayRef<IValue> arguments) {
  if (only_changes_self(op.schema(), arguments)) {
    auto entry = std::make_unique<Entry>();
    entry->returns.push_back({false, {{.kind = Output::SameAsInput, .input = 0}}});
    return entry;
  }
  MetaClones metas;
  Stack stack;
  stack.reserve(arguments.size());
  std::vector<std::pair<at::DimVector, at::DimVector>> before;
  try {
    for (const auto& argument : arguments) stack.push_back(metas.clone(argument));
    for (auto& clone : metas.clones) before.emplace_back(clone.sizes(), clone.strides());
    c10::impl::ExcludeDispatchKeyGuard exclude(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                               c10::autocast_dispatch_keyset);
    op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &stack);
  } catch (const c10::NotImplementedError& error) {
    refuse(name, error.what_without_backtrace());
  } catch (const std::exception&) {
    if (python)
      if (auto reason = python->not_implemented(std::current_exception())) refuse(name, *reason);
    throw;
  }
  auto entry = std::make_unique<Entry>();
  for (const auto& value : stack) {
    Return one;
    if (value.isTensor()) one.outputs.push_back(metas.describe(value.toTensor()));
    else if (value.isTensorList()) {
      one.list = true;
      for (const at::Tensor& tensor : value.toTensorList()) one.outputs.push_back(metas.describe(tensor));
    } else {
      one.outputs.push_back({.kind = Output::Constant, .constant = value});
    }
    for (const auto& output : one.outputs)
      if (output.kind == Output::New) {
        entry->made.elements += c10::multiply_integers(output.sizes);
        entry->made.integral = entry->made.integral || at::isIntegralType(output.dtype, true);
        entry->made.truth = entry->made.truth || output.dtype == at::kBool;
      }
    entry->returns.push_back(std::move(one));
  }
  for (size_t i = 0; i < metas.clones.size(); i++) {
    const auto& clone = metas.clones[i];
    if (clone.sizes() != c10::IntArrayRef(before[i].first))
      entry->resizes.push_back({int(i), at::DimVector(clone.sizes()), at::DimVector(clone.strides())});
  }
  return entry;
}

// ---- performing a call ----
at::Tensor build(const Output& output, const std::vector<TensorImpl*>& inputs) {
  switch (output.kind) {
    case Output::New: return new_tensor(output.sizes, output.strides, output.dtype);
    case Output::SameAsInput:
      return at::Tensor(c10::intrusive_ptr<TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(inputs[output.input]));
    case Output::ViewOfInput: {
      auto* input = inputs[output.input];
      auto view = at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, c10::Storage(input->unsafe_storage()),
                                                      input->key_set(), c10::scalarTypeToTypeMeta(output.dtype));
      view.unsafeGetTensorImpl()->set_sizes_and_strides(output.sizes, output.strides,
                                                        input->storage_offset() + output.offset);
      return view;
    }
    default: return {};
  }
}

// Makes an output whose storage has another size: ATen reduces into tensors that it allocated with the input's shape.
at::Tensor build_in(int64_t bytes, const Output& output) {
  const int64_t item = c10::elementSize(output.dtype);
  auto made = new_tensor({bytes / item}, {1}, output.dtype);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(output.sizes, output.strides);
  return made;
}

void apply_resizes(const Entry& entry, const std::vector<TensorImpl*>& inputs) {
  for (const auto& resize : entry.resizes) {
    auto* tensor = inputs[resize.input];
    const auto need = at::detail::computeStorageNbytes(resize.sizes, resize.strides, tensor->dtype().itemsize(),
                                                       tensor->storage_offset());
    auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
    if (storage->nbytes() < need) resize_storage(storage, need);
    tensor->set_sizes_and_strides(resize.sizes, resize.strides);
  }
}

// A kernel's temporaries. Those that it does not free itself are freed in reverse order, as C++ locals are.
struct Temporaries {
  std::vector<c10::DataPtr> held;
  void allocate(int64_t bytes) {
    AsTemporary temporary;
    held.push_back(device_allocator()->allocate(bytes));
  }
  void free(int64_t index) {
    AsTemporary temporary;
    if (index < int64_t(held.size())) held[index].clear();
  }
  ~Temporaries() {
    AsTemporary temporary;
    while (!held.empty()) held.pop_back();
  }
};

// Allocates the outputs in the order of the real kernel, with its temporaries in between.
void allocate_outputs(const Entry& entry, const std::vector<TensorImpl*>& inputs, Stack& results) {
  std::vector<at::Tensor> made;  // the New outputs, in the order of the returns
  Temporaries temporaries;
  if (entry.plan.has_program) {
    std::vector<const Output*> fresh;
    for (const auto& one : entry.returns)
      for (const auto& output : one.outputs)
        if (output.kind == Output::New) fresh.push_back(&output);
    made.resize(fresh.size());
    std::optional<int64_t> storage_bytes;  // of the next output
    for (auto [step, value] : entry.plan.program) {
      switch (step) {
        case Plan::Output:
          if (value < int64_t(fresh.size()) && !made[value].defined())
            made[value] = storage_bytes ? build_in(*storage_bytes, *fresh[value]) : build(*fresh[value], inputs);
          storage_bytes.reset();
          break;
        case Plan::Storage: storage_bytes = value; break;
        case Plan::Temporary: temporaries.allocate(value); break;
        case Plan::FreeTemporary: temporaries.free(value); break;
        case Plan::BlasWorkspace: ensure_blas_workspace(BlasLibrary::Blas, value); break;
        case Plan::LtWorkspace: ensure_blas_workspace(BlasLibrary::Lt, value); break;
        case Plan::HostOutput: {
          const Output& wanted = *fresh[value];
          made[value] = at::Tensor(at::detail::empty_strided_cpu(wanted.sizes, wanted.strides, wanted.dtype)).zero_();
          break;
        }
      }
    }
  }
  size_t next = 0;
  auto output_of = [&](const Output& output) {
    if (output.kind != Output::New) return build(output, inputs);
    if (next < made.size() && made[next].defined()) return made[next++];
    next++;
    return build(output, inputs);
  };
  for (const auto& one : entry.returns) {
    if (one.list) {
      c10::List<at::Tensor> list;
      list.reserve(one.outputs.size());
      for (const auto& output : one.outputs) list.push_back(output_of(output));
      results.push_back(std::move(list));
    } else if (one.outputs[0].kind == Output::Constant) {
      results.push_back(one.outputs[0].constant);
    } else {
      results.push_back(output_of(one.outputs[0]));
    }
  }
}

Made new_tensors(const Entry& entry, const Stack& results) {
  Made made;
  int slot = 0;
  for (size_t i = 0; i < entry.returns.size(); i++)
    for (size_t j = 0; j < entry.returns[i].outputs.size(); j++, slot++)
      if (entry.returns[i].outputs[j].kind == Output::New)
        made.emplace_back(slot, entry.returns[i].list ? results[i].toTensorList().get(j) : results[i].toTensor());
  return made;
}

int device_of(const Key& key, at::ArrayRef<IValue> arguments) {
  for (auto* tensor : key.tensors)
    if (tensor->is_cuda()) return tensor->device().index();
  for (const auto& argument : arguments)
    if (argument.isDevice() && argument.toDevice().is_cuda() && argument.toDevice().has_index())
      return argument.toDevice().index();
  return current_device();
}

void launch(const Plan& plan) {
  call_count++;
  const int device = current_device();
  const auto stream = current_stream(device);
  if (timing() && !capturing() && !aside()) time_call(device, stream, plan.call);
  recorder().add(EventKind::Op, device, stream, plan.call);
}

struct Kernel final : c10::OperatorKernel {
  std::once_flag prepared;
  std::string name;
  ValueTraits traits;
  bool python_rule = false, numbers_matter = true, takes_masks = false, puts_by_index = false, copies_lists = false;
  bool traced_in_parts = false;
  Entries entries;

  void prepare(const c10::OperatorHandle& op) {
    name = op_name(op.schema());
    traits = value_traits(op);
    python_rule = python && python->has_rule(name);
    const std::string& base = op.schema().name();
    puts_by_index = base == "aten::_index_put_impl_";
    copies_lists = name == "aten::_foreach_copy_";
    traced_in_parts = name == "aten::convolution";
    takes_masks = puts_by_index || name == "aten::index.Tensor" || name == "aten::index.Tensor_out";
    numbers_matter = !(op.hasTag(at::Tag::pointwise) || base.starts_with("aten::_foreach") ||
                       base.starts_with("aten::_fused_") || base.ends_with("_"));
  }

  void operator()(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
    std::call_once(prepared, [&] { prepare(op); });
    // torch.jit.trace does not take this op into its program, but what torch's own composition of it calls.
    if (traced_in_parts && torch_abi::tracing()) return op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
    const torch_abi::Untraced untraced;
    if (python_rule) {
      const OwnTime in_python;
      return python->call_rule(name, op.schema(), stack);
    }
    const size_t count = op.schema().arguments().size(), base = stack->size() - count;
    if (takes_masks) {
      IValue* given = stack->data() + base;
      if (puts_by_index && !given[3].toBool() && fill_by_mask(given[0].toTensor(), given[1], given[2].toTensor()))
        return stack->resize(base + 1);
      expand_masks(given[0].toTensor(), given[1]);
    }
    const at::ArrayRef<IValue> arguments(stack->data() + base, count);
    if (copies_lists && copy_between_devices(arguments[0], arguments[1], arguments[2].toBool()))
      return stack->resize(base);
    ScopedKey key;
    const uint64_t settings = settings_of(traits.heavy);
    key->words.push_back(settings);
    for (const auto& argument : arguments) key->add(argument, numbers_matter);
    OnDevice on(device_of(*key.key, arguments));
    const uint64_t hash = key->hash();
    Entry* entry = entries.find(hash, key->words);
    if (!entry) entry = entries.insert(hash, describe(op, *key.key, arguments, settings));

    apply_resizes(*entry, key->tensors);  // first, so that an empty out= tensor can be written on the host, too
    Foreseen foreseen;
    if (traits.computable && !entry->host_cannot.load(std::memory_order_relaxed) &&
        (entry->follows_unknown || !any_unknown(key->tensors)))
      foreseen = foresee(op, traits, arguments, entry->made);
    const Sample sample = foreseen.kind == Foreseen::Unknown ? outcome_sample(traits, arguments) : Sample::Any;
    Stack results;
    allocate_outputs(*entry, key->tensors, results);
    launch(entry->plan);
    if (foreseen.kind == Foreseen::Unknown) {
      assume_outcome(traits, arguments, results, sample, sample == Sample::Any ? Made() : new_tensors(*entry, results));
    } else if (const Made made = new_tensors(*entry, results); !remember_foreseen(foreseen, traits, arguments, made)) {
      entry->host_cannot = true;
      assume_outcome(traits, arguments, results, sample, made);
    }
    stack->resize(base);
    for (auto& result : results) stack->push_back(std::move(result));
  }

  std::unique_ptr<Entry> describe(const c10::OperatorHandle& op, const Key& key, at::ArrayRef<IValue> arguments,
                                  uint64_t settings) {
    check_same_device(op.schema(), key.tensors);
    const OwnTime planning;
    auto entry = ask_meta(op, name, arguments);
    entry->key = key.words;
    entry->follows_unknown = may_follow_unknown(traits, key.tensors, entry->made);
    Stack outputs;  // metadata for the planner: nothing is allocated yet
    for (const auto& one : entry->returns) {
      auto meta = [&](const Output& output) {
        if (output.kind == Output::New || output.kind == Output::ViewOfInput)
          return at::Tensor(at::detail::empty_strided_meta(output.sizes, output.strides, output.dtype));
        for (const auto& resize : entry->resizes)  // an out= tensor with its new size
          if (output.kind == Output::SameAsInput && resize.input == output.input)
            return at::Tensor(at::detail::empty_strided_meta(
                resize.sizes, resize.strides, c10::typeMetaToScalarType(key.tensors[resize.input]->dtype())));
        return output.kind == Output::SameAsInput ? build(output, key.tensors) : at::Tensor();
      };
      if (one.list) {
        c10::List<at::Tensor> list;
        for (const auto& output : one.outputs) list.push_back(meta(output));
        outputs.push_back(std::move(list));
      } else if (one.outputs[0].kind != Output::Constant) {
        outputs.push_back(meta(one.outputs[0]));
      }
    }
    if (python) entry->plan = python->plan(name, &op.schema(), arguments, outputs, settings);
    return entry;
  }
};

// Ops that only read or change metadata: torch's CPU kernel does that for any device.
struct MetadataKernel final : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  }
};
// Ops of other layouts whose implementation is one function for CPU and CUDA, built from dense ops.
template <DispatchKey OnCPU>
struct ComposedKernel final : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
    op.redispatchBoxed(DispatchKeySet(OnCPU), stack);
  }
};

// Ops of other libraries (torchvision, the user's own) that have no CUDA kernel here also run through their Meta
// kernel.
struct Fallback final : c10::OperatorKernel {
  std::mutex mutex;
  std::unordered_map<std::string, std::unique_ptr<Kernel>> kernels;
  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    Kernel* kernel;
    {
      std::lock_guard lock(mutex);
      auto& slot = kernels[op_name(op.schema())];
      if (!slot) slot = std::make_unique<Kernel>();
      kernel = slot.get();
    }
    (*kernel)(op, keys, stack);
  }
};

template <class Functor>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedKernel(c10::BoxedKernel::makeFromFunctor(std::make_unique<Functor>()));
}

auto& libraries = *new std::vector<std::unique_ptr<torch::Library>>;  // not destroyed at exit either

torch::Library& library(const char* name_space, DispatchKey key) {
  libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, name_space, key, __FILE__, __LINE__));
  return *libraries.back();
}

struct QuietWarnings : c10::WarningHandler {  // on a CUDA build each registration warns that it overrides torch's
  void process(const c10::Warning&) override {}
};

std::optional<c10::OperatorHandle> find_op(const std::string& full_name) {
  const auto dot = full_name.find('.');
  return c10::Dispatcher::singleton().findSchema(
      {full_name.substr(0, dot), dot == std::string::npos ? "" : full_name.substr(dot + 1)});
}

bool returns_view(const c10::FunctionSchema& schema) {
  for (const auto& one : schema.returns())
    if (one.alias_info() && !one.alias_info()->isWrite()) return true;
  return schema.name() == "aten::is_set_to";
}

}  // namespace

void set_python_side(std::unique_ptr<PythonSide> side) {
  delete python;
  python = side.release();
}
int64_t calls() { return call_count; }

std::vector<std::string> setting_names() {
  std::vector<std::string> names;
  for (const auto& setting : kSettings) names.emplace_back(setting.name);
  return names;
}
void set_default_settings(uint64_t bits) { default_settings = bits; }
int64_t distinct_calls() { return distinct_count; }

void register_kernels(const OpNames& ops) {
  QuietWarnings quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto& aten = library("aten", DispatchKey::CUDA);
  const auto by_hand = register_handwritten_kernels(aten);
  for (const auto& name : ops.cuda) {
    auto op = find_op("aten::" + name);
    if (!op || by_hand.count(name)) continue;
    aten.impl(name.c_str(), returns_view(op->schema()) ? boxed<MetadataKernel>() : boxed<Kernel>());
  }
  library("_", DispatchKey::CUDA).fallback(boxed<Fallback>());
  auto& sparse = library("aten", DispatchKey::SparseCUDA);
  for (const auto& name : ops.sparse)
    if (find_op("aten::" + name)) sparse.impl(name.c_str(), boxed<ComposedKernel<DispatchKey::SparseCPU>>());
  auto& nested = library("aten", DispatchKey::NestedTensorCUDA);
  for (const auto& name : ops.nested)
    if (find_op("aten::" + name)) nested.impl(name.c_str(), boxed<ComposedKernel<DispatchKey::NestedTensorCPU>>());
}

void unregister_kernels() {
  libraries.clear();
  recorded_calls().clear();
  restore_stubs();
}

namespace {
Entry* recorded_entry(const std::string& name, at::ArrayRef<IValue> arguments, at::ArrayRef<IValue> returns) {
  Entries* mine = recorded_calls().of(name);
  ScopedKey key;
  const uint64_t settings = settings_of(op_values(name).heavy);
  key->words.push_back(settings);
  for (const auto& argument : arguments) key->add(argument, true);
  for (const auto& value : returns) key->add(value, true);
  const uint64_t hash = key->hash();
  if (Entry* known = mine->find(hash, key->words)) return known;
  auto made = std::make_unique<Entry>();
  made->key = key->words;
  const auto op = find_op(name);
  const bool whole = op && op->schema().arguments().size() == arguments.size();  // all arguments, not only the tensors
  if (python) made->plan = python->plan(name, whole ? &op->schema() : nullptr, arguments, returns, settings);
  return mine->insert(hash, std::move(made));
}
}  // namespace

void note_call(const std::string& name, at::ArrayRef<IValue> arguments) {
  if (recorder().on()) recorded_entry(name, arguments, {});
}

void record_call(const std::string& name, at::ArrayRef<IValue> arguments, at::ArrayRef<IValue> returns) {
  Entry* entry = recorded_entry(name, arguments, returns);
  Temporaries temporaries;
  for (auto [step, value] : entry->plan.program) {
    if (step == Plan::Temporary) temporaries.allocate(value);
    else if (step == Plan::FreeTemporary) temporaries.free(value);
    else if (step == Plan::BlasWorkspace) ensure_blas_workspace(BlasLibrary::Blas, value);
    else if (step == Plan::LtWorkspace) ensure_blas_workspace(BlasLibrary::Lt, value);
  }
  launch(entry->plan);
  for (const auto& value : returns)
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) mark_written(value.toTensor());
}

}  // namespace maya
