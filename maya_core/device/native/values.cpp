#include "values.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <mutex>
#include <unordered_map>

namespace maya {
namespace {

using c10::IValue;

// Elements. What rests on unknown data is followed where programs look at it: booleans and integers, reductions, and
// anything small. The rest of it is one new unknown after another, so that it costs nothing.
constexpr int64_t kAtOnce = 1 << 12, kSmall = 1 << 15, kReduced = 1 << 20, kCompared = 1 << 28, kSearched = 1 << 25;
constexpr int64_t kMostHostArgument = 1 << 20;
constexpr int kDeepestMadeUp = 32;

bool exact(at::ScalarType dtype) { return at::isIntegralType(dtype, true); }

thread_local bool carrying_objects = false;

bool covers_storage(const at::Tensor& tensor) {
  return tensor.storage_offset() == 0 && tensor.is_non_overlapping_and_dense() &&
         tensor.numel() * int64_t(tensor.element_size()) == int64_t(tensor.storage().nbytes());
}

Shadow* shadow_of(const at::Tensor& tensor) {
  auto* allocation = allocation_of(tensor.unsafeGetTensorImpl());
  return allocation ? &allocation->shadow : nullptr;
}

void set(Shadow& shadow, ValueRef value) { shadow = {Shadow::Valued, Sample::Any, std::move(value)}; }

// The value of the tensor's storage. Unknown data get a sample, which they keep.
const ValueRef& value_of(const at::Tensor& tensor, Shadow& shadow) {
  if (shadow.kind == Shadow::Fresh) set(shadow, uniform_value(tensor.scalar_type(), 0));
  if (shadow.kind == Shadow::Unknown) set(shadow, sampled_value(tensor.scalar_type(), shadow.sample));
  return shadow.value;
}

bool is_uniform(const Shadow& shadow, const at::Tensor& tensor) {
  if (shadow.kind != Shadow::Valued || tensor.is_conj() || tensor.is_neg()) return false;
  const auto* uniform = shadow.value->uniform();
  return uniform && uniform->dtype == tensor.scalar_type();
}

bool unknown(const Shadow& shadow) {
  return shadow.kind == Shadow::Unknown || (shadow.kind == Shadow::Valued && shadow.value->made_up);
}

// A parameter, also one that belongs to no module, or something computed from one.
bool is_weight(const at::Tensor& tensor) { return tensor.requires_grad(); }
bool is_large_weight(const at::Tensor& tensor) {
  return is_weight(tensor) && tensor.numel() > kAtOnce && tensor.is_leaf();
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

// The arguments of the op on the host, with every tensor replaced by the result of `map`.
template <class Map>
IValue map_tensors(const IValue& value, Map map) {
  auto one = [&](const at::Tensor& tensor) { return tensor.defined() ? map(tensor) : tensor; };
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

OnUnknown& on_unknown() {
  static auto* callback = new OnUnknown;
  return *callback;
}

// The copy of `from` into a part of a storage. Layouts of host tensors begin where their data do.
void copy_into_part(const at::Tensor& to, Shadow& shadow, ValueRef from, Layout layout) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  auto recipe = c10::make_intrusive<Recipe>(op);
  recipe->arguments = {operand_place(), operand_place(), false};
  recipe->operands.push_back({value_of(to, shadow), Layout(to), true});
  recipe->operands.push_back({std::move(from), std::move(layout), false});
  recipe->cost = double(to.storage().nbytes() / to.element_size());
  for (const auto& operand : recipe->operands) note_origin(*recipe, *operand.value);
  auto value = result_of(recipe, ~0);
  if (value->depth > kDeepest && !compute(*recipe)) return forget(to);
  if (recipe->cost <= kAtOnce && recipe->operands[0].value->ready() && compute(*recipe)) value = result_of(recipe, ~0);
  set(shadow, std::move(value));
}

struct Inputs {
  int64_t elements = 0;
  double product = 1;
  bool all_known = true, integral_unknown = false, numbers = false, uncertain = false;
  bool all_uniform = true, ready = true, usable = true;
};

void add(Inputs& found, const at::Tensor& tensor, const ValueTraits& traits, size_t argument) {
  const bool written = traits.written[argument], only_written = traits.only_written[argument];
  if (!tensor.is_cuda()) {
    found.usable = tensor.is_cpu() && !written;
    found.elements += tensor.numel();
    found.all_uniform = found.all_uniform && tensor.numel() <= 1;
    return;
  }
  if (tensor.layout() != at::kStrided ||
      (traits.heavy && tensor.scalar_type() != at::kFloat && tensor.scalar_type() != at::kDouble)) {
    found.usable = false;
    return;
  }
  found.product *= double(std::max<int64_t>(1, tensor.numel()));
  found.numbers = found.numbers || tensor.scalar_type() != at::kBool;
  // a tensor that is written is remembered as a whole storage
  found.elements += written ? int64_t(tensor.storage().nbytes() / tensor.element_size()) : tensor.numel();
  if (tensor.numel() == 0) return;
  const auto* shadow = shadow_of(tensor);
  if (!shadow) {
    found.usable = false;
    return;
  }
  if (only_written && covers_storage(tensor)) return;
  found.all_uniform =
      found.all_uniform && (shadow->kind == Shadow::Fresh || is_uniform(*shadow, tensor)) && !unknown(*shadow);
  if (shadow->kind == Shadow::Valued && !shadow->value->ready()) found.ready = false;
  found.uncertain = found.uncertain || unknown(*shadow) || is_weight(tensor) ||
                    (shadow->kind == Shadow::Valued && shadow->value->of_weights);
  if (unknown(*shadow) || is_large_weight(tensor)) {
    found.all_known = false;
    found.integral_unknown = found.integral_unknown || exact(tensor.scalar_type());
  }
}

bool follows_nothing(const ValueTraits& traits) {
  return traits.random || traits.heavy || traits.lists || traits.assume == Assume::True ||
         traits.assume == Assume::False || traits.assume == Assume::AllFinite;
}

// Whether a result that rests on unknown data is followed, by its number of elements together with its inputs'.
bool is_followed(const ValueTraits& traits, int64_t inputs, bool integral, NewTensors made) {
  const int64_t elements = inputs + made.elements;
  if (traits.assume == Assume::RandomIndices) return elements <= kSearched;
  if (made.integral || integral) return elements <= kCompared;
  return elements <= (made.elements && made.elements * 16 <= inputs ? kReduced : kSmall);
}

// x == x and x == inf of unknown data need no sample, and training is assumed to go well.
std::optional<bool> assumed_comparison(const ValueTraits& traits, at::ArrayRef<IValue> arguments) {
  if (traits.assume != Assume::SameIsEqual && traits.assume != Assume::CompareInfinity) return std::nullopt;
  const bool equal = traits.assume == Assume::SameIsEqual;
  const at::Tensor& self = arguments[0].toTensor();
  if (exact(self.scalar_type())) return std::nullopt;
  if (arguments[1].isTensor()) {
    if (arguments[1].toTensor().is_same(self)) return equal;
  } else if (arguments[1].isDouble() && !std::isfinite(arguments[1].toDouble())) {
    return !equal;
  }
  return std::nullopt;
}

// One element of each argument stands for all. Sizes of one keep the number of dimensions, on which type promotion
// depends.
bool compute_one_element(const c10::OperatorHandle& op, const ValueTraits& traits, at::ArrayRef<IValue> arguments,
                         std::vector<at::Tensor>& results) {
  OnHost on_host;
  std::vector<std::pair<at::Tensor, at::Tensor>> changed;
  torch::jit::Stack stack;
  for (size_t i = 0; i < arguments.size(); i++)
    stack.push_back(map_tensors(arguments[i], [&](const at::Tensor& tensor) {
      if (!tensor.is_cuda()) return tensor;
      auto element = at::empty(std::vector<int64_t>(tensor.dim(), 1), at::TensorOptions().dtype(tensor.scalar_type()));
      const auto* shadow = tensor.numel() ? shadow_of(tensor) : nullptr;
      const auto* uniform = shadow && shadow->kind == Shadow::Valued ? shadow->value->uniform() : nullptr;
      if (uniform) memcpy(element.mutable_data_ptr(), uniform->element.data(), element.element_size());
      else element.zero_();
      if (traits.written[i]) changed.emplace_back(tensor, element);
      return element;
    }));
  try {
    op.callBoxed(&stack);
  } catch (const std::exception&) {
    return false;  // the host has no kernel for this call
  }
  for (auto& [tensor, element] : changed) {
    if (element.numel() != 1) return false;
    remember_uniform(tensor, element.item());
  }
  results = flat(stack);
  return true;
}

c10::intrusive_ptr<Recipe> write_recipe(const c10::OperatorHandle& op, const ValueTraits& traits,
                                        at::ArrayRef<IValue> arguments) {
  auto recipe = c10::make_intrusive<Recipe>(op);
  recipe->heavy = traits.heavy;
  bool usable = true;
  std::vector<const Shadow*> written;
  OnHost on_host;
  auto host = [&](const at::Tensor& tensor) {  // the program may change a host tensor before the value is read
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number() || tensor.numel() == 0) return tensor;
    usable = usable && tensor.numel() <= kMostHostArgument;
    return usable ? tensor.clone() : tensor;
  };
  for (size_t i = 0; i < arguments.size(); i++)
    recipe->arguments.push_back(map_tensors(arguments[i], [&](const at::Tensor& tensor) {
      if (!tensor.is_cuda()) return host(tensor);
      auto* shadow = shadow_of(tensor);
      const bool read = shadow && !(traits.only_written[i] && covers_storage(tensor));
      auto value = read ? value_of(tensor, *shadow) : uniform_value(tensor.scalar_type(), 0);
      if (traits.written[i] && shadow) {  // two views of one storage would each miss what the other one writes
        usable = usable && std::find(written.begin(), written.end(), shadow) == written.end();
        written.push_back(shadow);
      }
      note_origin(*recipe, *value);
      if (read && is_weight(tensor)) recipe->of_weights = recipe->of_numbers = true;
      recipe->operands.push_back({std::move(value), Layout(tensor), bool(traits.written[i])});
      return operand_place();
    }));
  return usable ? recipe : c10::intrusive_ptr<Recipe>();
}

std::optional<at::Generator> generator_among(at::ArrayRef<IValue> arguments) {
  for (const auto& argument : arguments)
    if (argument.isGenerator()) return argument.toGenerator();
  return std::nullopt;
}

bool at_least_zero(const at::Scalar& number) { return !number.isComplex() && number.toDouble() >= 0; }

// What stands for the numbers of a tensor.
Sample sample_of(const at::Tensor& tensor) {
  if (at::isComplexType(tensor.scalar_type())) return Sample::Any;
  if (!tensor.is_cuda()) {
    OnHost on_host;
    return tensor.numel() == 1 && at_least_zero(tensor.item()) ? Sample::Positive : Sample::Any;
  }
  const auto* shadow = shadow_of(tensor);
  if (!shadow || shadow->kind == Shadow::Fresh) return Sample::Positive;
  if (shadow->kind == Shadow::Unknown) return shadow->sample;
  if (const auto* sampled = shadow->value->sampled()) return sampled->sample;
  if (!is_uniform(*shadow, tensor)) return Sample::Any;
  OnHost on_host;
  return at_least_zero(read(tensor)->value.flatten()[0].item()) ? Sample::Positive : Sample::Any;
}

// Of an op whose result is above zero if its inputs are.
Sample sample_from(const ValueTraits& traits, at::ArrayRef<IValue> arguments) {
  const bool plain = traits.second == ValueTraits::Other || traits.second == ValueTraits::Number;
  if (plain && arguments[0].isTensor() && !exact(arguments[0].toTensor().scalar_type()) &&
      sample_of(arguments[0].toTensor()) == Sample::Any)
    return Sample::Any;
  bool positive = true, within_one = traits.keeps_uniform;
  const IValue& second = arguments.size() > 1 ? arguments[1] : arguments[0];
  if (traits.second == ValueTraits::Exponent && second.isInt() && second.toInt() % 2 == 0) return Sample::Positive;
  if (traits.second == ValueTraits::Least && second.isScalar() && at_least_zero(second.toScalar()))
    return Sample::Positive;
  if (second.isTensor() && arguments[0].isTensor() && second.toTensor().is_same(arguments[0].toTensor()) &&
      traits.second == ValueTraits::Factor)
    return Sample::Positive;
  for (size_t i = 0; i < arguments.size(); i++) {
    if (i == 1 && traits.second != ValueTraits::Other && second.isScalar())
      positive &= at_least_zero(second.toScalar());
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (exact(tensor.scalar_type())) return true;
      const Sample sample = sample_of(tensor);
      positive &= sample == Sample::Positive || sample == Sample::Unit;
      within_one &= sample == Sample::Unit;
      return true;
    });
  }
  return within_one ? Sample::Unit : positive ? Sample::Positive : Sample::Any;
}

// Unknown routing is spread evenly over its choices.
void assume_indices(const ValueTraits& traits, at::ArrayRef<IValue> arguments, const at::Tensor& indices) {
  auto* shadow = shadow_of(indices);
  if (!shadow || indices.scalar_type() != at::kLong || !covers_storage(indices) || !indices.is_contiguous()) return;
  const at::Tensor& self = arguments[0].toTensor();
  int64_t dim = self.dim() - 1, choices = self.numel();
  const bool over_all = traits.dim_argument >= 0 && arguments[traits.dim_argument].isNone();
  if (traits.dim_argument >= 0 && !over_all) dim = arguments[traits.dim_argument].toInt();
  if (dim < 0) dim += self.dim();
  if (!over_all && self.dim() > 0) choices = self.size(dim);
  if (choices <= 0) return;
  const bool rows = indices.dim() == self.dim() && indices.dim() > 0;  // otherwise there is one index for each row
  set(*shadow, sampled_indices(choices, rows ? indices.size(dim) : 1, rows ? indices.stride(dim) : 1, traits.routes));
}

}  // namespace

bool is_known(const at::Tensor& tensor) {
  if (!tensor.is_cuda() || tensor.numel() == 0) return true;
  const auto* shadow = shadow_of(tensor);
  return shadow && shadow->kind == Shadow::Valued && !shadow->value->made_up;
}

std::optional<Reading> read(const at::Tensor& tensor) {
  OnHost on_host;
  if (tensor.numel() == 0)
    return Reading{at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type())), false, false, false};
  auto* shadow = shadow_of(tensor);
  if (!shadow) return std::nullopt;
  const int64_t elements = tensor.storage().nbytes() / tensor.element_size();
  const bool wide = elements > kMostElements || (shadow->kind == Shadow::Unknown && elements > kMostSampled);
  if (wide && !(shadow->kind == Shadow::Fresh || is_uniform(*shadow, tensor))) return std::nullopt;
  const ValueRef value = value_of(tensor, *shadow);
  auto host = read_value(value, Layout(tensor));
  return Reading{std::move(host), value->made_up, (value->made_up || value->of_weights) && value->routed,
                 value->made_up || value->of_weights};
}

std::optional<at::Tensor> host_value(const at::Tensor& tensor) {
  if (tensor.numel() > 0 && !is_known(tensor)) return std::nullopt;
  auto reading = read(tensor);
  if (!reading || reading->made_up) return std::nullopt;
  return reading->value;
}

void forget(const at::Tensor& tensor, Sample sample) {
  if (auto* shadow = shadow_of(tensor)) {
    if (shadow->kind == Shadow::Valued) shadow->value.reset();
    shadow->kind = Shadow::Unknown;
    shadow->sample = covers_storage(tensor) ? sample : Sample::Any;
  }
}

void mark_fresh(const at::Tensor& tensor) {
  if (auto* shadow = shadow_of(tensor)) shadow->kind = Shadow::Fresh;
}

void mark_weights(const at::Tensor& tensor) {
  auto* shadow = shadow_of(tensor);
  if (!shadow || tensor.numel() == 0 || unknown(*shadow)) return;
  if (shadow->kind == Shadow::Valued && shadow->value->of_weights) return;
  const bool small = int64_t(tensor.storage().nbytes() / tensor.element_size()) <= kAtOnce;
  set(*shadow, small ? as_weights(value_of(tensor, *shadow)) : sampled_value(tensor.scalar_type(), Sample::Any));
}

void mark_written(const at::Tensor& tensor) {
  if (auto* shadow = shadow_of(tensor); shadow && shadow->kind == Shadow::Fresh) shadow->kind = Shadow::Unknown;
}

void remember(const at::Tensor& tensor, const at::Tensor& host, bool made_up) {
  auto* shadow = shadow_of(tensor);
  if (!shadow || tensor.numel() == 0) return;
  OnHost on_host;
  auto matching = host.to(tensor.scalar_type()).expand(tensor.sizes());
  if (covers_storage(tensor)) {
    if (matching.strides() != tensor.strides() || matching.is_conj() || matching.is_neg())
      matching = at::empty_strided(tensor.sizes(), tensor.strides(), matching.options()).copy_(matching);
    return set(*shadow, host_data(matching, made_up));
  }
  if (unknown(*shadow) && !exact(tensor.scalar_type()) && tensor.numel() > kSmall) return forget(tensor);
  matching = matching.contiguous();
  Layout layout(matching);
  layout.offset = 0;
  layout.bytes = matching.nbytes();
  copy_into_part(tensor, *shadow, host_data(matching, made_up), std::move(layout));
}

void remember_parts(const std::vector<at::Tensor>& parts, const std::vector<at::Tensor>& hosts, bool made_up) {
  auto* shadow = parts.empty() ? nullptr : shadow_of(parts[0]);
  int64_t bytes = 0;
  for (const auto& part : parts) bytes += shadow_of(part) == shadow ? int64_t(part.nbytes()) : 0;
  if (shadow && bytes == int64_t(parts[0].storage().nbytes())) *shadow = {Shadow::Fresh};
  for (size_t i = 0; i < parts.size(); i++) remember(parts[i], hosts[i], made_up);
}

void carry_objects(bool carry) { carrying_objects = carry; }
int64_t exchange_limit(at::ScalarType dtype) {
  if (carrying_objects && dtype == at::kByte) return kExchangedObjects;
  return exact(dtype) ? kExchangedIntegers : kExchangedFloats;
}

void remember_uniform(const at::Tensor& tensor, const at::Scalar& value) {
  auto* shadow = shadow_of(tensor);
  if (!shadow) return;
  OnHost on_host;
  auto everywhere = uniform_value(tensor.scalar_type(), value);
  if (covers_storage(tensor)) return set(*shadow, std::move(everywhere));
  if (is_uniform(*shadow, tensor) && shadow->value->uniform()->element == everywhere->uniform()->element) return;
  if (unknown(*shadow) && !exact(tensor.scalar_type()) && tensor.numel() > kSmall) return forget(tensor);
  Layout layout;
  layout.sizes = tensor.sizes();
  layout.strides.resize(tensor.dim(), 0);
  layout.bytes = tensor.element_size();
  layout.dtype = tensor.scalar_type();
  copy_into_part(tensor, *shadow, std::move(everywhere), std::move(layout));
}

void copy_value(const at::Tensor& to, const at::Tensor& from) {
  auto* shadow = shadow_of(to);
  if (!shadow || to.numel() == 0) return;
  if (from.is_cpu()) {
    const bool made_up = is_made_up(from.storage());
    if (made_up && !exact(from.scalar_type()) && from.numel() > kSmall) return forget(to);
    if (to.scalar_type() == from.scalar_type() && to.strides() == from.strides() && covers_storage(to))
      return set(*shadow, host_data(from, made_up));
    return remember(to, from, made_up);
  }
  auto* source = shadow_of(from);
  if (!source) return forget(to);
  const bool whole = covers_storage(to);
  if (is_uniform(*source, from) && to.scalar_type() == from.scalar_type())
    return whole ? set(*shadow, source->value) : remember_uniform(to, read(from)->value.flatten()[0].item());
  const bool followed = exact(to.scalar_type()) || exact(from.scalar_type()) || to.numel() <= kSmall;
  if (unknown(*source) && (!followed || to.numel() > kCompared)) return forget(to, source->sample);
  if (!whole && unknown(*shadow) && !followed) return forget(to);
  if (whole && covers_storage(from) && to.scalar_type() == from.scalar_type() && to.strides() == from.strides() &&
      !to.is_conj() && !from.is_conj() && !to.is_neg() && !from.is_neg()) {
    const ValueRef same = value_of(from, *source);
    return set(*shadow, same);
  }
  if (whole && shadow->kind != Shadow::Fresh) *shadow = {Shadow::Fresh};
  const ValueRef value = value_of(from, *source);
  copy_into_part(to, *shadow, value, Layout(from));
}

Shadow resized(Shadow shadow, int64_t had, int64_t bytes) {
  if (had == 0) return {Shadow::Fresh};
  if (shadow.kind != Shadow::Valued) return shadow;
  if (bytes <= had && shadow.value->uniform()) return shadow;
  if (bytes > 8 * exchange_limit(at::kByte)) return {Shadow::Unknown};
  Layout layout;  // the contents of the new part are arbitrary
  layout.sizes = {had};
  layout.strides = {1};
  layout.bytes = had;
  auto value = read_value(shadow.value, layout);
  OnHost on_host;
  auto grown = at::zeros({bytes}, value.options());
  grown.narrow(0, 0, std::min(had, bytes)).copy_(value.narrow(0, 0, std::min(had, bytes)));
  return {Shadow::Valued, Sample::Any, host_data(grown, shadow.value->made_up)};
}

void set_on_unknown(OnUnknown callback) { on_unknown() = std::move(callback); }

at::Scalar read_item(const at::Tensor& tensor) {
  auto reading = read(tensor);
  if (!reading) return 0;
  auto item = reading->value.item();
  if (!reading->unknown || !on_unknown()) return item;
  if (auto other = on_unknown()(reading->routed ? "item routed" : "item", tensor, reading->value)) {
    remember(tensor, at::scalar_tensor(*other, at::TensorOptions().dtype(tensor.scalar_type())), true);
    return read(tensor)->value.item();
  }
  return item;
}

bool has_equal_value(const at::Tensor& one, const at::Tensor& other) {
  const bool unknown_numbers = !exact(one.scalar_type()) && !(is_known(one) && is_known(other));
  if (unknown_numbers && one.numel() > kSmall) return true;
  const auto mine = read(one), theirs = read(other);
  return !mine || !theirs || mine->value.equal(theirs->value);
}

void read_to_host(const at::Tensor& host, const at::Tensor& device) {
  auto reading = read(device);
  OnHost on_host;
  if (reading) host.copy_(reading->value);
  else host.zero_();
  if (reading && !reading->unknown) return;
  if (!reading || reading->made_up) mark_made_up(host.storage());
  if (reading && on_unknown()) on_unknown()(reading->routed ? "copy routed" : "copy", device, reading->value);
}

bool is_made_up(const c10::Storage& host) { return made_up().has(host); }
void mark_made_up(const c10::Storage& host) { made_up().add(host); }

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
  traits.keeps_uniform = declared.keeps_uniform;
  traits.routes = name == "topk";
  traits.random = op.hasTag(at::Tag::nondeterministic_seeded);
  traits.heavy = declared.heavy;
  traits.assume = declared.assume;
  traits.sample = declared.sample;
  traits.lists = name.starts_with("_foreach_");
  bool takes_generator = false;
  for (const auto& argument : schema.arguments()) {
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    traits.written.push_back(written);
    traits.only_written.push_back(argument.is_out() || (written && declared.only_writes));
    if (traits.written.size() == 2)
      traits.second = name.starts_with("pow")                                    ? ValueTraits::Exponent
                      : name.starts_with("clamp")                                ? ValueTraits::Least
                      : name.starts_with("mul")                                  ? ValueTraits::Factor
                      : argument.name() == "other" || argument.name() == "value" ? ValueTraits::Number
                                                                                 : ValueTraits::Other;
    if (argument.name() == "dim") traits.dim_argument = int(traits.written.size()) - 1;
    takes_generator = takes_generator || contains(argument.type()->str(), "Generator");
  }
  // Without a generator of its own, a host kernel would advance the program's CPU generator.
  const bool on_host = op.hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
                       op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
                       op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
                       op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  traits.computable = on_host && !(traits.random && !takes_generator) && full.starts_with("aten::") &&
                      !contains(name, "cudnn") && !contains(name, "_fused_");
  return traits;
}

bool may_follow_unknown(const ValueTraits& traits, const std::vector<c10::TensorImpl*>& inputs, NewTensors made) {
  if (follows_nothing(traits)) return false;
  for (size_t i = 0; i < traits.only_written.size(); i++)
    if (traits.only_written[i]) return true;  // what it held before does not matter
  int64_t elements = 0;
  bool integral = false;
  for (const auto* tensor : inputs) {
    elements += tensor->numel();
    integral = integral || at::isIntegralType(c10::typeMetaToScalarType(tensor->dtype()), true);
  }
  return is_followed(traits, elements, integral, made);
}

bool any_unknown(const std::vector<c10::TensorImpl*>& inputs) {
  for (auto* tensor : inputs) {
    if (!tensor->is_cuda() || !tensor->has_storage()) continue;
    const auto* allocation = allocation_of(tensor);
    if (allocation && unknown(allocation->shadow)) return true;
  }
  return false;
}

Foreseen foresee(const c10::OperatorHandle& op, const ValueTraits& traits, at::ArrayRef<IValue> arguments,
                 NewTensors made) {
  Inputs inputs;
  for (size_t i = 0; i < arguments.size(); i++) {
    const bool going_on = each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      add(inputs, tensor, traits, i);
      return inputs.usable && (inputs.all_known || !(traits.lists || traits.heavy));
    });
    if (!going_on) return {};
  }
  // Masks are uniform at an extreme. A single truth value decides where the program goes on, which stays the same.
  if (extreme() && traits.pointwise && made.truth && made.elements > 1 && inputs.numbers && inputs.uncertain) return {};
  Foreseen foreseen;
  if (inputs.all_known) {
    if (traits.pointwise && inputs.all_uniform && !traits.random) {
      if (compute_one_element(op, traits, arguments, foreseen.elements)) foreseen.kind = Foreseen::Everywhere;
      return foreseen;
    }
    if (inputs.elements + made.elements > kMostElements) return {};
  } else if (follows_nothing(traits) || !is_followed(traits, inputs.elements, inputs.integral_unknown, made) ||
             assumed_comparison(traits, arguments)) {
    return {};
  }
  const double cost = traits.heavy ? cost_of_product(inputs.product * std::max<int64_t>(1, made.elements))
                                   : double(inputs.elements + made.elements) * (traits.random ? 8 : 1);
  if (cost > kMostCost) return {};
  foreseen.recipe = write_recipe(op, traits, arguments);
  if (!foreseen.recipe) return {};
  auto& recipe = *foreseen.recipe;
  recipe.cost = cost;
  recipe.routes = traits.routes;
  if (traits.random) recipe.seed = draw_seed(generator_among(arguments));
  int depth = 0;
  double below = 0;
  for (const auto& operand : recipe.operands) {
    depth = std::max(depth, operand.value->depth);
    below = std::max(below, operand.value->cost);
  }
  if (below + cost > kMostCost) return {};
  const bool too_deep = depth >= (recipe.made_up ? kDeepestMadeUp : kDeepest);
  if (too_deep && recipe.made_up && !(made.integral || inputs.integral_unknown)) return {};
  foreseen.at_once = too_deep || (inputs.ready && inputs.all_known && inputs.elements + made.elements <= kAtOnce);
  foreseen.kind = Foreseen::ByRecipe;
  return foreseen;
}

bool remember_foreseen(Foreseen& foreseen, const ValueTraits& traits, at::ArrayRef<IValue> arguments,
                       const Made& made) {
  if (foreseen.kind == Foreseen::Everywhere) {
    for (const auto& [slot, tensor] : made) {
      const auto& value = foreseen.elements.at(slot);
      if (value.defined() && value.numel() == 1 && tensor.numel() > 0) remember_uniform(tensor, value.item());
    }
    return true;
  }
  auto& recipe = foreseen.recipe;
  for (const auto& [slot, tensor] : made)
    if (tensor.numel() > 0) recipe->results.emplace_back(slot, Layout(tensor));
  if (foreseen.at_once && !compute(*recipe)) return false;
  for (const auto& [slot, tensor] : made)
    if (auto* shadow = tensor.numel() > 0 ? shadow_of(tensor) : nullptr) set(*shadow, result_of(recipe, slot));
  int operand = 0;
  for (size_t i = 0; i < arguments.size(); i++)
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (!tensor.is_cuda()) return true;
      const int slot = ~operand++;
      if (!traits.written[i]) return true;
      if (auto* shadow = tensor.numel() > 0 ? shadow_of(tensor) : nullptr) set(*shadow, result_of(recipe, slot));
      return true;
    });
  return true;
}

Sample outcome_sample(const ValueTraits& traits, at::ArrayRef<IValue> arguments) {
  return traits.sample == Sample::AsInputs ? sample_from(traits, arguments) : traits.sample;
}

void assume_outcome(const ValueTraits& traits, at::ArrayRef<IValue> arguments, at::ArrayRef<IValue> returns,
                    Sample sample, const Made& made) {
  for (size_t i = 0; i < arguments.size(); i++) {
    if (!traits.written[i]) continue;
    if (traits.assume == Assume::AllFinite && i == 1)
      continue;  // found_inf keeps its value: training is assumed to go well
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (tensor.is_cuda()) forget(tensor, sample);
      return true;
    });
  }
  if (sample != Sample::Any)
    for (const auto& [slot, tensor] : made)  // also if it lies in a larger storage, as some losses do
      if (auto* shadow = shadow_of(tensor)) *shadow = {Shadow::Unknown, sample};
  if (traits.assume == Assume::Nothing || traits.assume == Assume::AllFinite || returns.empty() ||
      !returns[0].isTensor())
    return;
  const at::Tensor& result = returns.back().toTensor();
  if (!result.defined() || !result.is_cuda() || result.numel() == 0) return;
  switch (traits.assume) {
    case Assume::True: return remember_uniform(result, true);
    case Assume::False: return remember_uniform(result, false);
    case Assume::RandomIndices: return assume_indices(traits, arguments, result);
    default:
      if (auto outcome = assumed_comparison(traits, arguments)) remember_uniform(result, *outcome);
  }
}

void follow(const c10::OperatorHandle& op, at::ArrayRef<IValue> arguments, const std::vector<at::Tensor>& outputs) {
  Foreseen foreseen{.kind = Foreseen::ByRecipe, .recipe = write_recipe(op, value_traits(op), arguments)};
  if (!foreseen.recipe) return;
  Made made;
  for (const auto& output : outputs) made.emplace_back(int(made.size()), output);
  for (const auto& argument : arguments)
    each_tensor(argument,
                [&](const at::Tensor& tensor) { return foreseen.recipe->cost += double(tensor.numel()), true; });
  remember_foreseen(foreseen, value_traits(op), arguments, made);
}

}  // namespace maya
