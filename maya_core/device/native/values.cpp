#include "values.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scalar_tensor.h>

#include <mutex>
#include <random>
#include <unordered_map>

namespace maya {
namespace {

using c10::IValue;

// Hides host arithmetic on shadows from autograd, autocast and any mode that the program has switched on.
struct OnHost {
  c10::impl::ExcludeDispatchKeyGuard guard{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet(
          {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher})};
};

bool exact(at::ScalarType dtype) { return at::isIntegralType(dtype, true); }

thread_local bool carrying_objects = false;

int64_t known_limit(at::ScalarType dtype) {
  if (carrying_objects && dtype == at::kByte) return kKnownObjects;
  return exact(dtype) ? kKnownIntegers : kKnownFloats;
}

bool covers_storage(const at::Tensor& tensor) {
  return tensor.storage_offset() == 0 && tensor.is_non_overlapping_and_dense() &&
         tensor.numel() * int64_t(tensor.element_size()) == int64_t(tensor.storage().nbytes());
}

at::Tensor view_of_bytes(char* bytes, const at::Tensor& like) {
  const auto options = at::TensorOptions().dtype(like.scalar_type());
  const int64_t elements = like.storage().nbytes() / like.element_size();
  auto view = at::from_blob(bytes, {elements}, options).as_strided(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) view = view._conj();
  if (like.is_neg()) view = view._neg_view();
  return view;
}

at::Tensor uniform_element(const Shadow& shadow) {
  return at::from_blob(shadow.bytes.get(), {}, at::TensorOptions().dtype(shadow.dtype));
}

// The tensor's values, for the host to change in place; makes a Uniform shadow Dense.
at::Tensor writable_value(const at::Tensor& tensor, Shadow& shadow) {
  if (shadow.kind == Shadow::Uniform) {
    const auto element = uniform_element(shadow).clone();
    shadow.bytes = std::make_unique<char[]>(tensor.storage().nbytes());
    shadow.kind = Shadow::Dense;
    const int64_t elements = tensor.storage().nbytes() / element.element_size();
    at::from_blob(shadow.bytes.get(), {elements}, element.options()).copy_(element.expand({elements}));
  }
  return view_of_bytes(shadow.bytes.get(), tensor);
}

Shadow* shadow_of(const at::Tensor& tensor) {
  auto* allocation = allocation_of(tensor.unsafeGetTensorImpl());
  return allocation ? &allocation->shadow : nullptr;
}

bool uniform_and_same_type(const Shadow& shadow, const at::Tensor& tensor) {
  return shadow.kind == Shadow::Uniform && shadow.dtype == tensor.scalar_type() && !tensor.is_conj() &&
         !tensor.is_neg();
}

// Host kernels rely on the strides of their arguments, so a uniform value gets the layout of its tensor.
at::Tensor laid_out(const at::Tensor& tensor, const at::Tensor& value) {
  if (value.strides() == tensor.strides() || tensor.numel() == 0) return value;
  const auto bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size());
  auto memory = at::empty({int64_t(bytes / tensor.element_size())}, value.options());
  return memory.copy_(value.flatten()[0].expand(memory.sizes())).as_strided(tensor.sizes(), tensor.strides(), 0);
}

template <class Visit>
bool each_tensor(const IValue& value, Visit visit) {  // stops at false
  if (value.isTensor()) return !value.toTensor().defined() || visit(value.toTensor());
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList())
      if (tensor.defined() && !visit(tensor)) return false;
  } else if (value.isList()) {
    for (const auto& item : value.toListRef())
      if (item.isTensor() && item.toTensor().defined() && !visit(item.toTensor())) return false;
  }
  return true;
}

// The arguments of the op with every device tensor replaced by the result of `map`.
template <class Map>
IValue map_tensors(const IValue& value, Map map) {
  auto one = [&](const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda() ? map(tensor) : tensor; };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorList()) mapped.push_back(one(tensor));
    return mapped;
  }
  if (value.isDevice()) return c10::Device(c10::DeviceType::CPU);
  if (value.isList()) {
    const auto& items = value.toListRef();
    bool any = false;
    for (const auto& item : items) any = any || item.isTensor();
    if (!any) return value;
    c10::List<std::optional<at::Tensor>> mapped;
    for (const auto& item : items) mapped.push_back(item.isNone() ? std::optional<at::Tensor>() : one(item.toTensor()));
    return mapped;
  }
  return value;
}

bool run(const c10::OperatorHandle& op, const ValueTraits& traits, torch::jit::Stack& stack) {
  if (traits.random) {
    for (size_t i = 0; i < stack.size(); i++) {
      const auto& type = op.schema().arguments()[i].type();
      const bool generator =
          type->kind() == c10::TypeKind::GeneratorType ||
          (type->kind() == c10::TypeKind::OptionalType &&
           type->castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType);
      if (!generator) continue;
      std::optional<at::Generator> given;
      if (stack[i].isGenerator()) given = stack[i].toGenerator();
      if (given && given->device().is_cpu()) continue;
      stack[i] = at::make_generator<at::CPUGeneratorImpl>(draw_seed(given));
    }
  }
  try {
    op.callBoxed(&stack);
    return true;
  } catch (const std::exception&) {
    return false;  // no host kernel for this dtype or op: the outcome is unknown, as it is for large tensors
  }
}

void fill_random_indices(const at::Tensor& indices, int64_t dim, int64_t choices) {
  if (indices.numel() == 0 || indices.numel() > kKnownIntegers || choices <= 0 || indices.scalar_type() != at::kLong)
    return forget(indices);
  auto host = at::empty(indices.sizes(), at::TensorOptions().dtype(at::kLong));
  const bool independent = dim < 0 || indices.dim() == 0;  // one index per row of the input
  auto rows =
      independent ? host.view({-1, 1}) : at::empty({host.numel() / host.size(dim), host.size(dim)}, host.options());
  const int64_t per_row = rows.size(1);
  std::mt19937_64 random(draw_seed(std::nullopt));
  std::vector<int64_t> deck;
  auto* out = rows.data_ptr<int64_t>();
  for (int64_t row = 0; row < rows.size(0); row++, out += per_row) {
    if (per_row == 1) {
      out[0] = random() % choices;
      continue;
    }
    if (per_row > choices) {
      for (int64_t j = 0; j < per_row; j++) out[j] = random() % choices;
      continue;
    }
    if (int64_t(deck.size()) != choices) {
      deck.resize(choices);
      for (int64_t j = 0; j < choices; j++) deck[j] = j;
    }
    for (int64_t j = 0; j < per_row; j++) {
      std::swap(deck[j], deck[j + random() % (choices - j)]);
      out[j] = deck[j];
    }
  }
  if (!independent) host.movedim(dim, -1).copy_(rows.view(host.movedim(dim, -1).sizes()));
  remember(indices, host);
}

std::unordered_map<std::string, OpValues>& values_by_op() {
  static auto* table = new std::unordered_map<std::string, OpValues>;
  return *table;
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// Host memory that was filled with plausible constants, while it is allocated.
struct MadeUp {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
  size_t sweep_at = 1024;

  void add(const c10::Storage& storage) {
    std::lock_guard lock(mutex);
    storages.insert_or_assign(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
    if (storages.size() < sweep_at) return;
    std::erase_if(storages, [](const auto& entry) { return entry.second.expired(); });
    sweep_at = 2 * storages.size() + 1024;
  }
  bool has(const c10::Storage& storage) {
    std::lock_guard lock(mutex);
    auto found = storages.find(storage.unsafeGetStorageImpl());
    return found != storages.end() && !found->second.expired();
  }
};
MadeUp& made_up() {
  static auto* instance = new MadeUp;
  return *instance;
}

}  // namespace

bool is_known(const at::Tensor& tensor) {
  if (!tensor.is_cuda() || tensor.numel() == 0) return true;
  const auto* shadow = shadow_of(tensor);
  return shadow && (shadow->kind == Shadow::Dense || uniform_and_same_type(*shadow, tensor));
}

std::optional<at::Tensor> host_value(const at::Tensor& tensor) {
  OnHost on_host;
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()));
  auto* shadow = shadow_of(tensor);
  if (!shadow) return std::nullopt;
  if (shadow->kind == Shadow::Dense) return view_of_bytes(shadow->bytes.get(), tensor);
  if (uniform_and_same_type(*shadow, tensor)) return uniform_element(*shadow).expand(tensor.sizes());
  return std::nullopt;
}

void forget(const at::Tensor& tensor) {
  if (auto* shadow = shadow_of(tensor)) *shadow = {};
}

void remember(const at::Tensor& tensor, const at::Tensor& host) {
  auto* shadow = shadow_of(tensor);
  if (!shadow) return;
  OnHost on_host;
  const bool whole = covers_storage(tensor);
  const int64_t elements = tensor.storage().nbytes() / tensor.element_size();
  if (elements > known_limit(tensor.scalar_type()) || (!whole && shadow->kind == Shadow::Unknown)) {
    *shadow = {};
    return;
  }
  if (whole || shadow->kind != Shadow::Dense) {
    if (shadow->kind == Shadow::Uniform && !whole) {
      if (!uniform_and_same_type(*shadow, tensor)) {
        *shadow = {};
        return;
      }
      writable_value(tensor, *shadow);
    } else if (shadow->kind != Shadow::Dense) {
      shadow->bytes = std::make_unique<char[]>(tensor.storage().nbytes());
      shadow->kind = Shadow::Dense;
    }
  }
  view_of_bytes(shadow->bytes.get(), tensor).copy_(host);
}

void remember_parts(const std::vector<at::Tensor>& parts, const std::vector<at::Tensor>& hosts) {
  auto* shadow = parts.empty() ? nullptr : shadow_of(parts[0]);
  int64_t bytes = 0;
  for (const auto& part : parts) bytes += shadow_of(part) == shadow ? int64_t(part.nbytes()) : 0;
  const bool covered = shadow && shadow->kind == Shadow::Unknown && bytes == int64_t(parts[0].storage().nbytes()) &&
                       bytes / int64_t(parts[0].element_size()) <= known_limit(parts[0].scalar_type());
  if (covered) {
    shadow->bytes = std::make_unique<char[]>(bytes);
    shadow->kind = Shadow::Dense;
  }
  for (size_t i = 0; i < parts.size(); i++) remember(parts[i], hosts[i]);
}

void carry_objects(bool carry) { carrying_objects = carry; }
int64_t exchange_limit(at::ScalarType dtype) { return exact(dtype) ? known_limit(dtype) : kExchangedFloats; }

void remember_uniform(const at::Tensor& tensor, const at::Scalar& value) {
  auto* shadow = shadow_of(tensor);
  if (!shadow) return;
  OnHost on_host;
  if (!covers_storage(tensor)) {
    if (shadow->kind == Shadow::Unknown) return;
    if (uniform_and_same_type(*shadow, tensor) &&
        uniform_element(*shadow).equal(at::scalar_tensor(value, tensor.scalar_type())))
      return;
    const int64_t elements = tensor.storage().nbytes() / tensor.element_size();
    if (elements > known_limit(tensor.scalar_type())) {
      *shadow = {};
      return;
    }
    if (shadow->kind == Shadow::Uniform && !uniform_and_same_type(*shadow, tensor)) {
      *shadow = {};
      return;
    }
    writable_value(tensor, *shadow).fill_(value);
    return;
  }
  shadow->kind = Shadow::Uniform;
  shadow->dtype = tensor.scalar_type();
  shadow->bytes = std::make_unique<char[]>(16);
  uniform_element(*shadow).fill_(value);
}

at::Scalar plausible(at::ScalarType dtype) {
  if (dtype == at::kBool) return false;
  if (at::isFloatingType(dtype) || at::isComplexType(dtype)) return 1.0;
  return 0;
}

void read_to_host(const at::Tensor& host, const at::Tensor& device) {
  OnHost on_host;
  if (auto value = host_value(device)) {
    host.copy_(*value);
    return;
  }
  host.fill_(plausible(host.scalar_type()));
  made_up().add(host.storage());
}

bool is_made_up(const c10::Storage& host) { return made_up().has(host); }

void set_op_values(std::unordered_map<std::string, OpValues> table) { values_by_op() = std::move(table); }

OpValues op_values(const std::string& name, const std::string& overload) {
  const auto& table = values_by_op();
  OpValues found;
  if (auto all = table.find(name); all != table.end()) found = all->second;
  if (overload.empty()) return found;
  if (auto one = table.find(name + "." + overload); one != table.end() && one->second.assume != Assume::Nothing)
    found.assume = one->second.assume;
  return found;
}

ValueTraits value_traits(const c10::OperatorHandle& op) {
  ValueTraits traits;
  const auto& schema = op.schema();
  const auto& full = schema.name();
  const OpValues declared = op_values(full, schema.overload_name());
  const std::string name = full.substr(full.rfind(':') + 1);
  traits.pointwise = op.hasTag(at::Tag::pointwise) || declared.keeps_uniform;
  traits.random = op.hasTag(at::Tag::nondeterministic_seeded);
  traits.heavy = declared.heavy;
  traits.assume = declared.assume;
  bool takes_generator = false;
  for (const auto& argument : schema.arguments()) {
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    traits.written.push_back(written);
    traits.only_written.push_back(argument.is_out() || (written && declared.only_writes));
    if (argument.name() == "dim") traits.dim_argument = int(traits.written.size()) - 1;
    takes_generator = takes_generator || contains(argument.type()->str(), "Generator");
  }
  // Without a generator of its own, a host kernel would advance the program's CPU generator.
  traits.computable = !(traits.random && !takes_generator) && full.starts_with("aten::") && !contains(name, "cudnn") &&
                      !contains(name, "_fused_");
  return traits;
}

HostRun compute_on_host(const c10::OperatorHandle& op, const ValueTraits& traits, at::ArrayRef<IValue> arguments,
                        int64_t new_elements, torch::jit::Stack& results) {
  int64_t elements = new_elements;
  bool floats = false, all_uniform = true;
  for (size_t i = 0; i < arguments.size(); i++) {
    const bool only_written = traits.only_written[i], written = traits.written[i];
    const bool all_known = each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (!tensor.is_cuda()) {
        elements += tensor.numel();
        return tensor.is_cpu();
      }
      if (tensor.layout() != at::kStrided) return false;
      if (!only_written && !is_known(tensor)) return false;
      if (only_written && !is_known(tensor) && !covers_storage(tensor)) return false;
      if (traits.heavy && tensor.scalar_type() != at::kFloat && tensor.scalar_type() != at::kDouble) return false;
      const auto* shadow = shadow_of(tensor);
      all_uniform =
          all_uniform && (only_written || tensor.numel() <= 1 || (shadow && uniform_and_same_type(*shadow, tensor)));
      floats = floats || !exact(tensor.scalar_type());
      // a tensor that is written in place is remembered as a whole storage
      elements +=
          written && tensor.has_storage() ? int64_t(tensor.storage().nbytes() / tensor.element_size()) : tensor.numel();
      return true;
    });
    if (!all_known) return HostRun::NotKnown;
  }
  OnHost on_host;
  const int64_t limit = traits.heavy ? 4096 : floats ? kKnownFloats : kKnownIntegers;
  torch::jit::Stack stack;
  stack.reserve(arguments.size());
  if (elements <= limit) {
    for (size_t i = 0; i < arguments.size(); i++) {
      stack.push_back(map_tensors(arguments[i], [&](const at::Tensor& tensor) {
        if (!traits.written[i] || tensor.numel() == 0) return laid_out(tensor, *host_value(tensor));
        auto& shadow = *shadow_of(tensor);
        if (shadow.kind == Shadow::Unknown) {
          shadow.bytes = std::make_unique<char[]>(tensor.storage().nbytes());
          shadow.kind = Shadow::Dense;
        }
        return writable_value(tensor, shadow);
      }));
    }
    if (!run(op, traits, stack)) return HostRun::Failed;
    results = std::move(stack);
    return HostRun::Exact;
  }
  if (traits.pointwise && all_uniform) {
    // One element of each represents all. Sizes of one keep the number of dimensions, on which type promotion depends.
    std::vector<std::pair<at::Tensor, at::Tensor>> changed;
    for (size_t i = 0; i < arguments.size(); i++) {
      stack.push_back(map_tensors(arguments[i], [&](const at::Tensor& tensor) {
        std::vector<int64_t> ones(tensor.dim(), 1);
        auto known = host_value(tensor);
        auto element = at::empty(ones, at::TensorOptions().dtype(tensor.scalar_type()));
        if (known && tensor.numel() > 0) element.copy_(known->as_strided(ones, std::vector<int64_t>(tensor.dim(), 0)));
        if (traits.written[i]) changed.emplace_back(tensor, element);
        return element;
      }));
    }
    if (!run(op, traits, stack)) return HostRun::Failed;
    for (auto& [tensor, element] : changed) {
      if (element.numel() != 1) return HostRun::NotKnown;
      remember_uniform(tensor, element.item());
    }
    results = std::move(stack);
    return HostRun::Uniform;
  }
  return HostRun::NotKnown;
}

void assume_outcome(const ValueTraits& traits, at::ArrayRef<IValue> arguments, at::ArrayRef<IValue> returns) {
  for (size_t i = 0; i < arguments.size(); i++) {
    if (!traits.written[i]) continue;
    if (traits.assume == Assume::AllFinite && i == 1)
      continue;  // found_inf keeps its value: training is assumed to go well
    each_tensor(arguments[i], [](const at::Tensor& tensor) {
      if (tensor.is_cuda()) forget(tensor);
      return true;
    });
  }
  if (traits.assume == Assume::Nothing || traits.assume == Assume::AllFinite || returns.empty() ||
      !returns[0].isTensor())
    return;
  const at::Tensor& result = returns.back().toTensor();
  if (!result.defined() || !result.is_cuda()) return;
  OnHost on_host;
  switch (traits.assume) {
    case Assume::True: remember_uniform(result, true); break;
    case Assume::False: remember_uniform(result, false); break;
    case Assume::SameIsEqual:        // x == x, x == inf
    case Assume::CompareInfinity: {  // x != inf
      const bool equal = traits.assume == Assume::SameIsEqual;
      const at::Tensor& self = arguments[0].toTensor();
      if (arguments[1].isTensor()) {
        if (arguments[1].toTensor().is_same(self)) remember_uniform(result, equal);
      } else if (arguments[1].isDouble() && !std::isfinite(arguments[1].toDouble())) {
        remember_uniform(result, !equal);
      }
      break;
    }
    case Assume::RandomIndices: {
      const at::Tensor& self = arguments[0].toTensor();
      int64_t dim = self.dim() - 1, choices = self.numel();
      const bool over_all = traits.dim_argument >= 0 && arguments[traits.dim_argument].isNone();
      if (traits.dim_argument >= 0 && !over_all) dim = arguments[traits.dim_argument].toInt();
      if (dim < 0) dim += self.dim();
      if (!over_all && self.dim() > 0) choices = self.size(dim);
      fill_random_indices(result, result.dim() == self.dim() ? dim : -1, choices);
      break;
    }
    default: break;
  }
}

}  // namespace maya
